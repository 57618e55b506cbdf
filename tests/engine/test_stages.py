"""Stages that stand apart: what is encoded, denoised and decoded by three processes is what one paints, byte for byte.

Everything that passes from one to another goes by the frames of ``ipc``, as in a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from diffserve.api import ipc
from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.api.stage_types import DecodeRequest, EncodeRequest, PictureDecoded, TextsEncoded
from diffserve.api.tensor_values import Encodings, TensorValue
from diffserve.api.types import Asks, Failed, GenerationRequest, ImageFinished, ImageResult, Picture, RewriteOptions
from diffserve.api.upscale_types import Upscaled, UpscaleRequest
from diffserve.engine.combined_engine import CombinedEngine
from diffserve.engine.process import open_probe, trial
from diffserve.models.controlnets import Control
from diffserve.runtime import load_model
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.settings.config import TextSettings
from diffserve.settings.layers import load_settings
from tests.device import DEVICE
from tests.engine import controlnets, loras
from tests.engine.controlnets import control_map, controlled
from tests.engine.pipelines import image_request
from tests.hardware import needs_int8

STAGES: Final = ("encode", "denoise", "decode")
LONG: Final = ", ".join(["the red fox and a cat"] * 20)

Stages = dict[str, CombinedEngine]


def load(kind: str, model: Path, folder: Path, stage: str, **config: Any) -> CombinedEngine:
    settings = load_settings(model=str(model), env={})
    folders = {"lora_dir": str(folder / "loras"), "controlnet_dir": str(folder / "controlnets")}
    refiner = str(model) if kind == "sdxl" else ""
    profile = replace(settings.model, dtype="float32", device=DEVICE, probe=False, refiner=refiner, **folders)
    studio = CombinedEngine.load(profile, replace(settings.engine, stage=stage, cache_dir="", **config), TextSettings())
    studio.warm_up()
    studio.try_out(trial(studio.info))
    open_probe(studio)
    return studio


@pytest.fixture(scope="module")
def stages(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Stages]:
    """``stages(kind)``: a studio of each stage, and of "all" of them, of one tiny model, made once."""
    stages_by_key: dict[tuple[Any, ...], Stages] = {}

    def of(kind: str, **config: Any) -> Stages:
        key = (kind, *config.items())
        if key not in stages_by_key:
            folder, model = tmp_path_factory.mktemp(f"stages-{kind}"), tiny_model(kind)
            for name in ("loras", "controlnets"):
                (folder / name).mkdir()
            loras.write_folder(folder / "loras", load_model(model, dtype="float32", device=DEVICE))
            unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(model / "unet"))
            controlnets.write_folder(folder / "controlnets", unet)
            stages_by_key[key] = {stage: load(kind, model, folder, stage, **config) for stage in ("all", *STAGES)}
        return stages_by_key[key]

    return of


def collect_events(studio: CombinedEngine, request: ipc.AnyRequest) -> list[Any]:
    """Return the events of ``request``, with the request and the events serialized as between processes."""
    (body,) = ipc.bodies(ipc.frame(request))
    command = ipc.decode_command(body)
    assert isinstance(command, Asks)
    studio.submit(command)
    events = [ipc.decode_report(body) for event in studio.events() for body in ipc.bodies(ipc.frame(event))]
    studio.check_integrity()
    return events


def painted(events: list[Any]) -> list[ImageResult]:
    assert not [event for event in events if isinstance(event, Failed)], events
    results = [event.result for event in events if isinstance(event, ImageFinished)]
    return sorted(results, key=lambda result: result.image_index)


def painted_apart(of: Stages, request: GenerationRequest) -> list[tuple[bytes, bytes]]:
    """Latents and pixels of ``request`` after all three stages."""
    (encoded,) = collect_events(of["encode"], EncodeRequest(generation=request))
    assert isinstance(encoded, TextsEncoded)
    encoded_request = replace(request, encodings=encoded.encodings, rewriting=None)
    outputs = []
    for result in painted(collect_events(of["denoise"], encoded_request)):
        assert result.latents is not None
        assert (result.picture.width_px, result.picture.height_px) == (1, 1)
        decode = DecodeRequest(
            request_id=f"{result.image_index}",
            latents=result.latents,
            init_image=request.init_image,
            mask_image=request.mask_image,
        )
        (decoded,) = collect_events(of["decode"], decode)
        assert isinstance(decoded, PictureDecoded)
        outputs.append((result.latents.data, decoded.picture.data))
    return outputs


def test_the_decoding_stage_upscales_and_the_others_refuse(stages: Callable[..., Stages]) -> None:
    request = UpscaleRequest(image=control_map(2), upscaler="embedded-4x")
    (alone,), (decoded,) = (collect_events(stages("sd15")[stage], request) for stage in ("all", "decode"))
    assert isinstance(decoded, Upscaled)
    assert decoded.image == alone.image
    for stage in ("encode", "denoise"):
        with pytest.raises(InvalidRequest, match="this process does not upscale"):
            stages("sd15")[stage].submit(request)


def masked(kind: str) -> GenerationRequest:
    mask = control_map(3).array[..., 0].copy()
    mask[:, :32] = 255
    mask[:, 32:] = 0
    images = {"init_image": control_map(2), "mask_image": Picture.from_array(mask)}
    return image_request(kind, "euler_a", 7, num_steps=4, strength=0.8, **images)


def requests(kind: str) -> dict[str, GenerationRequest]:
    """Everything that asks something of more than one stage."""
    edges = Control(name="edges", scale=0.7)
    return {
        "guided, two of them": replace(image_request(kind, "euler_a", 1, num_steps=3), num_images=2),
        "without guidance": image_request(kind, "ddim", 2, num_steps=3, guidance_scale=1.0),
        "of several windows": image_request(kind, "ddim", 3, num_steps=2, prompt=LONG),
        "weighted": image_request(kind, "dpmpp_2m", 4, num_steps=3, prompt="the (red:1.4) fox", negative_prompt=""),
        "another layer": image_request(kind, "ddim", 5, num_steps=2, clip_skip=2),
        "an adapter of everything": image_request(kind, "ddim", 6, num_steps=2, prompt="cat <lora:everything:0.8>"),
        "a mask": masked(kind),
        "edited and alternating": image_request(
            kind, "ddim", 3, num_steps=4, prompt=f"the [cat:{LONG}:0.5] fox", negative_prompt="[cat|dog]"
        ),
        "of two parts": image_request(kind, "ddim", 3, num_steps=2, prompt="the red fox AND a dog :0.5"),
        "of two prompts": replace(
            image_request(kind, "ddim", 3, num_steps=2, prompt="cat"),
            num_images=2,
            image_prompts=("cat", "a [dog|cat]"),
        ),
        "a ControlNet": controlled(edges, kind=kind, num_steps=2),
        "a ControlNet and parts": controlled(edges, kind=kind, num_steps=2, prompt="cat AND [dog|fox]"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "attention"), [("sd15", "paged"), ("sd15", "plain"), ("sdxl", "paged")])
def test_pictures_of_stages_apart_are_those_of_one_process(
    stages: Callable[..., Stages], kind: str, attention: str
) -> None:
    of = stages(kind, cross_attention=attention)
    for name, request in requests(kind).items():
        full_results = [
            (result.latents.data, result.picture.data)
            for result in painted(collect_events(of["all"], request))
            if result.latents
        ]
        assert painted_apart(of, replace(request, request_id="apart")) == full_results, name


@pytest.mark.slow
def test_a_refiner_gets_the_output_of_its_encoders(stages: Callable[..., Stages]) -> None:
    of = stages("sdxl", cross_attention="paged")
    request = image_request("sdxl", "ddim", 8, num_steps=4, switch_at=0.5)
    [full_result] = painted(collect_events(of["all"], request))
    assert full_result.refiner
    assert full_result.latents is not None
    assert painted_apart(of, replace(request, request_id="apart")) == [
        (full_result.latents.data, full_result.picture.data)
    ]


@pytest.mark.slow
def test_no_stage_holds_the_weights_of_another(stages: Callable[..., Stages]) -> None:
    of = stages("sd15", cross_attention="paged")
    reports = {stage: studio.engine.model.memory_report() for stage, studio in of.items()}
    components = {
        stage: {entry.component for entry in report if entry.weights_bytes} for stage, report in reports.items()
    }
    assert components == {
        "all": {"text_encoder", "unet", "vae"},
        "encode": {"text_encoder"},
        "denoise": {"unet", "vae"},
        "decode": {"vae"},
    }


@pytest.mark.slow
def test_what_is_wrong_is_refused_by_the_first_stage_and_work_of_another_stage_by_each(
    stages: Callable[..., Stages],
) -> None:
    of = stages("sd15", cross_attention="paged")
    good = image_request("sd15", "ddim", 9, num_steps=2)
    wrong = [
        (replace(good, width_px=60), "width is 60 px"),
        (replace(good, best_of=3), "best_of is 3; it is not supported where another process"),
        (image_request("sd15", "eular", 9), "'eular', which is unknown"),
    ]
    for request, message in wrong:
        with pytest.raises(InvalidRequest, match=message):
            of["encode"].submit(EncodeRequest(generation=request))
    elsewhere: list[tuple[str, ipc.AnyRequest]] = [("encode", good), ("decode", good)]
    for stage, work in [*elsewhere, ("all", EncodeRequest(generation=good))]:
        with pytest.raises(InvalidRequest, match=r"its engine\.stage is different"):
            of[stage].submit(work)
    (*_, failed, last) = collect_events(of["denoise"], replace(good, prompt="what nobody has encoded"))
    assert (failed.code, last.code) == ("engine_unavailable", "engine_unavailable")
    assert "encoded by another model" in last.message
    assert all(not studio.has_work for studio in of.values())


@pytest.mark.slow
def test_a_request_that_is_given_up_is_forgotten_and_a_deadline_holds(stages: Callable[..., Stages]) -> None:
    of = stages("sd15", cross_attention="paged")
    request = EncodeRequest(generation=image_request("sd15", "ddim", 9, num_steps=2, deadline_s=1e-9))
    (late,) = collect_events(of["encode"], request)
    assert late.code == "deadline_exceeded"
    studio = of["encode"]
    studio.submit(EncodeRequest(generation=image_request("sd15", "ddim", 9, request_id="given up")))
    assert studio.cancel("given up")
    assert [type(event).__name__ for event in studio.events()] == ["Cancelled"]
    assert not studio.has_work


@pytest.mark.slow
def test_a_prompt_that_nobody_can_rewrite_says_so_after_all_stages(stages: Callable[..., Stages]) -> None:
    of = stages("sd15", cross_attention="paged")
    request = replace(image_request("sd15", "ddim", 9, num_steps=2), rewriting=RewriteOptions())
    (encoded,) = collect_events(of["encode"], EncodeRequest(generation=request))
    assert isinstance(encoded, TextsEncoded)
    assert encoded.prompt == request.prompt
    assert encoded.warnings == ("no language model is loaded, so the prompt was used as it is.",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("float32", (2, 3), bytes(23)), r"23 bytes are no float32 tensor of \[2, 3\]"),
        (("object", (1,), bytes(8)), r"8 bytes are no object tensor of \[1\]"),
        (("float16", (-1, -2), bytes(4)), r"4 bytes are no float16 tensor of \[-1, -2\]"),
    ],
)
def test_what_is_no_tensor_does_not_travel(value: tuple[str, tuple[int, ...], bytes], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        TensorValue(*value)


def test_no_more_tensors_travel_than_a_prompt_may_have() -> None:
    tensor = TensorValue("float32", (1,), bytes(4))
    assert Encodings(base={bytes([place]): tensor for place in range(200)}).num_bytes == 800
    with pytest.raises(InvalidRequest, match="257 tensors; at most 256 are allowed"):
        Encodings(base={place.to_bytes(2, "big"): tensor for place in range(257)})


@pytest.mark.slow
@needs_int8
def test_ranges_of_activations_are_measured_by_a_whole_model_alone(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="int8_static is calibrated with all of a model"):
        load_model(tiny_model("sd15"), dtype="int8_static", device=DEVICE, hollow={"text"})

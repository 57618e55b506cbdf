"""ControlNets: they add what diffusers' pipelines add, in a batch of rows with others, with none, and with LoRA."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load_file, save_file

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import TERMINAL, GenerationRequest, ImageResult
from diffserve.engine import Engine
from diffserve.engine.image.buckets import NO_LIMIT
from diffserve.models.controlnets import Control, digest_of, read_control
from diffserve.runtime import load_model
from diffserve.runtime.controlnet_store import ControlNetFiles
from diffserve.runtime.dry_run import DryRun, ListIndices
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.unet.controlnet import residual_shapes
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.controlnets import control_map, controlled, with_folder, write_folder
from tests.engine.loras import with_folder as with_loras
from tests.engine.loras import write_folder as write_loras
from tests.engine.pipelines import load_pipeline, pipeline_latents
from tests.engine.test_out_of_memory import Shortage

TOLERANCE = 1e-3
PIPELINES = {"sd15": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def folders(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves two ControlNets for the tiny model of a kind."""
    written: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in written:
            unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(tiny_model(kind) / "unet"))
            written[kind] = write_folder(tmp_path_factory.mktemp(f"controlnets-{kind}"), unet)
        return written[kind]

    return folder


@pytest.fixture
def make(folders: Callable[[str], Path], _models: Callable[[str], Any]) -> MakeEngine:
    def make_engine(kind: str = "sd15", **config: Any) -> Engine:
        return Engine(with_folder(_models(kind), folders(kind)), EngineConfig(**config))

    return make_engine


def make_one(make: MakeEngine, folder: Path, clock: Callable[[], float] = time.perf_counter, **config: Any) -> Engine:
    """Return an engine with ControlNets and adapters."""
    engine = make(**config)
    if not any(folder.iterdir()):
        write_loras(folder, engine.model)
    return Engine(with_loras(engine.model, folder), engine.config, clock=clock)


def latents(result: ImageResult) -> Any:
    assert result.latents is not None
    return result.latents.array


def their_latents(
    request: GenerationRequest, kind: str, model: Path, folder: Path, purpose: str = "", **inputs: Any
) -> Any:
    """Return the latents of diffusers' ControlNet pipeline, for text or another ``purpose``."""
    controls = request.diffusion.controlnets
    plain = load_pipeline.__wrapped__(PIPELINES[kind], model)
    cls = import_quietly("diffusers", PIPELINES[kind].replace("Pipeline", f"ControlNet{purpose}Pipeline"))
    load = import_quietly("diffusers", "ControlNetModel").from_pretrained
    networks = [load(str(folder / control.name)).to(DEVICE) for control in controls]
    with hushed("transformers", "diffusers"):
        parts = {**plain.components, "controlnet": networks if len(networks) > 1 else networks[0]}
        pipeline = cls(**parts, **({} if "XL" in cls.__name__ else {"requires_safety_checker": False})).to(DEVICE)
    pipeline.set_progress_bar_config(disable=True)
    images = [Image.fromarray(picture.array) for picture in request.control_images]
    pipeline_inputs: dict[str, Any] = {
        "control_image" if purpose else "image": images,
        "controlnet_conditioning_scale": [control.scale for control in controls],
        "control_guidance_start": [control.start for control in controls],
        "control_guidance_end": [control.end for control in controls],
    }
    pipeline_inputs = (
        pipeline_inputs if len(controls) > 1 else {name: values[0] for name, values in pipeline_inputs.items()}
    )
    size: dict[str, Any] = {"width": request.width_px, "height": request.height_px}
    return pipeline_latents(pipeline, request, kind, **pipeline_inputs, **size, **inputs)


ONE = (Control("edges", 0.8),)
TWO = (Control("depth", 1.5, 0.3, 0.9), Control("edges", 0.5, 0.0, 0.5))


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
@pytest.mark.parametrize(("way", "controls"), [("paged", ONE), ("paged", TWO), ("plain", TWO)])
@pytest.mark.slow
def test_latents_are_those_of_the_pipelines_of_diffusers(
    kind: str, way: Any, controls: tuple[Control, ...], make: MakeEngine, tiny_model: Any, folders: Any
) -> None:
    request = controlled(*controls, kind=kind, num_steps=6)
    engine = make(kind, cross_attention=way)
    plain, result = engine.generate([controlled(kind=kind, num_steps=6), request])
    reference = their_latents(request, kind, tiny_model(kind), folders(kind))
    assert np.abs(latents(result) - reference).max() < TOLERANCE
    assert np.abs(latents(plain) - reference).max() > 30 * TOLERANCE
    engine.check_integrity()


@pytest.mark.slow
def test_a_picture_that_is_repainted_goes_by_controlnets_too(make: MakeEngine, tiny_model: Any, folders: Any) -> None:
    """Shares of the steps are those that are left."""
    init = control_map(9)
    request = controlled(*TWO, num_steps=10, strength=0.6, init_image=init)
    [result] = make().generate(request)
    inputs = {"image": Image.fromarray(init.array), "strength": 0.6}
    reference = their_latents(request, "sd15", tiny_model("sd15"), folders("sd15"), "Img2Img", **inputs)
    assert np.abs(latents(result) - reference).max() < TOLERANCE


def test_a_second_pass_and_tiles_follow_the_control_image(make: MakeEngine) -> None:
    engine = make()

    def differences(side_px: int, **fields: Any) -> tuple[float, float]:
        """Return how much another control image, and no ControlNet, changes the latents."""
        size: dict[str, Any] = {"width_px": side_px, "height_px": side_px}
        first, second = (
            controlled(Control("edges"), control_images=(control_map(seed, side_px, side_px),), **size, **fields)
            for seed in (1, 2)
        )
        results = [engine.generate(request)[0] for request in (first, second, controlled(**size, **fields))]
        return tuple(float(np.abs(latents(results[0]) - latents(other)).max()) for other in results[1:])  # type: ignore[return-value]

    usual = differences(64)
    for changes in (differences(64, hires_scale=1.5, hires_strength=0.9), differences(96, tile_size=64)):
        for change, of_plain in zip(changes, usual, strict=True):
            assert change > 0.2 * of_plain > 0.0


def company() -> list[GenerationRequest]:
    """Return requests with none, one and two ControlNets, with different intervals, and with adapters."""
    once, half = Control("edges"), Control("depth", 0.7, 0.0, 0.5)
    large = control_map(9, 96, 96)
    return [
        controlled(once, seed=1, num_steps=2),
        controlled(seed=2, num_steps=2),
        controlled(half, once, seed=3, num_steps=2),
        controlled(once, seed=4, num_steps=2, prompt="cat <lora:queries>"),
        controlled(Control("edges", 0.4, 0.4), once, seed=5, sampler="euler", guidance_scale=1.0),
        controlled(half, seed=6, num_steps=2, prompt="the dog", sampler="dpmpp_2m"),
        controlled(seed=7, num_steps=2, prompt="cat <lora:queries>"),
        controlled(once, seed=8, num_steps=2, prompt="cat <lora:queries>", hires_scale=1.5, hires_strength=0.9),
        controlled(once, seed=9, num_steps=2, width_px=96, height_px=96, tile_size=64, control_images=(large,)),
    ]


@pytest.mark.parametrize("is_measured", [pytest.param(True, marks=pytest.mark.slow), False])
def test_rows_with_and_without_share_ticks_and_none_depends_on_another(
    is_measured: bool, make: MakeEngine, tmp_path: Path
) -> None:
    requests = company() if is_measured else company()[:3]
    options: dict[str, Any] = {}
    if is_measured:  # every call takes a second, so that a shared call is the faster one in each of these engines
        options = {"clock": itertools.count(step=1.0).__next__, "cache_dir": ""}
    alone = {request.seed: make_one(make, tmp_path, **options).generate(request)[0] for request in requests}
    engine = make_one(make, tmp_path, max_rows=8, **options)
    if is_measured:
        for request in requests[:4]:
            engine.generate(request)
        while engine.study():
            pass
    together = engine.generate(list(reversed(requests)))
    for result in together:
        assert np.array_equal(latents(result), latents(alone[result.seed])), result.seed
        assert result.picture == alone[result.seed].picture
    ticks = [{call.control or bool(call.rows) for call in tick.calls} for tick in engine.trace]
    assert {True, "edges", "depth"} in ticks
    if is_measured:
        calls = [call for tick in engine.trace for call in tick.calls if call.control]
        assert max(len({row.request_id for row in call.rows}) for call in calls) > 1, "no two shared a call"
    engine.check_integrity()


def test_images_of_other_sizes_are_resized_where_the_control_allows_it(
    make: MakeEngine, tiny_model: Any, folders: Any
) -> None:
    images = (control_map(0, 160, 160), control_map(1))
    asked_for = controlled(replace(TWO[0], resize=True), TWO[1], num_steps=4, control_images=images)
    [result] = make().generate(asked_for)
    reference = their_latents(asked_for, "sd15", tiny_model("sd15"), folders("sd15"))
    assert np.abs(latents(result) - reference).max() < TOLERANCE
    assert result.controlnets == asked_for.diffusion.controlnets
    assert ["Resize Mode: Just Resize" in control.label for control in result.controlnets] == [True, False]
    assert [control.image for control in result.controlnets] == [
        digest_of(p.width_px, p.height_px, p.data) for p in images
    ]


def test_what_cannot_be_taken_is_refused_in_one_sentence_and_nobody_else_is_touched(
    tmp_path: Path, folders: Callable[[str], Path], loaded: Callable[[str], Any]
) -> None:
    for name in ("edges", "torn", "cut", "pickle", "union", "bare"):
        copytree(folders("sd15") / "edges", tmp_path / name)
    copytree(folders("sdxl") / "edges", tmp_path / "xl")
    weights = "diffusion_pytorch_model.safetensors"
    tensors = load_file(tmp_path / "torn" / weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "conv_in.bias"}, tmp_path / "torn" / weights)
    (tmp_path / "cut" / weights).write_bytes((tmp_path / "cut" / weights).read_bytes()[:100])
    (tmp_path / "pickle" / weights).rename(tmp_path / "pickle" / "diffusion_pytorch_model.bin")
    config = json.loads((tmp_path / "union" / "config.json").read_text())
    (tmp_path / "union" / "config.json").write_text(json.dumps(config | {"_class_name": "ControlNetUnionModel"}))
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config | {"global_pool_conditions": True}))
    engine = Engine(with_folder(loaded("sd15"), tmp_path), EngineConfig())
    neighbour = engine.submit(controlled(Control("edges"), num_steps=1))
    for request, message in (
        (controlled(Control("nowhere")), "there is no ControlNet 'nowhere'; the known ones are edges, torn."),
        (controlled(Control("xl")), "ControlNet 'xl' cannot be used with sd15: it reads texts of 128 numbers"),
        (controlled(Control("torn")), "tensor 'conv_in.bias' is missing from"),
        (controlled(Control("cut")), "is not a complete safetensors file"),
        (controlled(Control("pickle")), "is a pickle file"),
        (controlled(Control("union")), "config.json is of a ControlNetUnionModel; diffserve builds ControlNetModel"),
        (controlled(Control("bare")), "for conditional rows only"),
        (
            controlled(Control("edges", preprocessor="openpose")),
            "preprocessor is 'openpose'; use one of none, canny",
        ),
        (
            controlled(Control("edges"), control_images=(control_map(0, 64, 72),)),
            "edges' is 64x72 px, the generated image",
        ),
        (controlled(Control("edges"), cache_interval=2), "it cannot be combined with ControlNets"),
    ):
        with pytest.raises(InvalidRequest, match=message) as refused:
            engine.submit(request)
        assert refused.value.param in ("controlnets", "cache_interval")
        assert str(tmp_path) not in refused.value.message
    for size, resized, message in (
        ((128, 128), False, "64x64 px, or ask for size 128x128, or set resize."),
        ((64, 72), False, "64x64 px, or ask for size 64x72."),
        ((64, 72), True, "that aspect ratio: resizing keeps it."),
    ):
        error_message = (
            f"the image of ControlNet 'edges' is {size[0]}x{size[1]} px, the generated image 64x64 px; give one of "
            f"{message}"
        )
        with pytest.raises(InvalidRequest) as refused:
            engine.generate(controlled(Control("edges", resize=resized), control_images=(control_map(0, *size),)))
        assert refused.value.message == error_message
    for name, fields, message in (
        ("../edges", (), "give a path below the folder"),
        ("edges", (float("nan"),), "scale of ControlNet 'edges' is nan"),
        ("edges", (2.5,), "must lie between 0 and 2"),
        ("edges", (1.0, 0.5, 0.5), "0 <= start < end <= 1"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            Control(name, *fields)
    with pytest.raises(InvalidRequest, match="5 ControlNets are given"):
        controlled(*[Control("edges")] * 5)
    with pytest.raises(InvalidRequest, match="1 ControlNets are requested with 2 images"):
        controlled(Control("edges"), control_images=(control_map(0), control_map(1)))
    assert engine.num_live == 1
    events = [event for event in engine.events() if event.request_id == neighbour]
    assert type(events[-1]).__name__ == "Finished"


def test_memory_goes_to_those_asked_for_last(make: MakeEngine) -> None:
    engine = make(controlnet_bytes=1)
    shelf = engine.runners.controlnets
    assert shelf.planned_bytes == 1
    network = shelf.take("edges")
    assert shelf.take("edges") is network, "one that is in use was read twice"
    assert network.num_bytes == make().runners.controlnets.planned_bytes / 2
    digest = network.digest
    group = engine.runners.group_of_short_prompts(64, 64)._replace(control=digest)
    engine.runners.groups.facts_of(group)
    del network
    with pytest.raises(KeyError):
        shelf.of_digest(digest)
    assert engine.study()
    assert not engine.runners.groups.is_unmeasured(group)


@pytest.mark.parametrize(
    ("text", "image", "fields"),
    [
        ("edges:C:\\maps\\a-1.png", "C:\\maps\\a-1.png", {}),
        ("edges:a.png:0.8:canny", "a.png", {"scale": 0.8, "preprocessor": "canny"}),
        ("edges:a.png:canny:0-0.5", "a.png", {"preprocessor": "canny", "end": 0.5}),
        ("edges:a.png:2:.2-1", "a.png", {"scale": 2.0, "start": 0.2}),
        ("edges:a.png:resize", "a.png", {"resize": True}),
        (
            "edges:a.png:0.8:canny:0-0.5:resize",
            "a.png",
            {"scale": 0.8, "preprocessor": "canny", "end": 0.5, "resize": True},
        ),
    ],
)
def test_a_shell_says_what_is_wanted_of_a_controlnet_in_order(text: str, image: str, fields: dict[str, Any]) -> None:
    assert read_control(text) == (Control("edges", **fields), image)


def test_who_reads_a_controlnet_or_looks_for_edges_stops_nobody_else(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, may_read, load = make(), threading.Event(), ControlNetFiles.load
    num_read = []

    def slowly(files: ControlNetFiles, *args: Any) -> Any:
        assert may_read.wait(30)
        num_read.append(files)
        return load(files, *args)

    monkeypatch.setattr(ControlNetFiles, "load", slowly)
    waiting = [engine.submit(controlled(*ONE, seed=seed, num_steps=2)) for seed in (1, 2)]
    neighbour = engine.submit(controlled(seed=3, num_steps=2))
    over: dict[str, str] = {}
    while neighbour not in over:
        over |= {event.request_id: type(event).__name__ for event in engine.tick() if isinstance(event, TERMINAL)}
    assert over == {neighbour: "Finished"}
    may_read.set()
    over |= {event.request_id: type(event).__name__ for event in engine.events() if isinstance(event, TERMINAL)}
    assert [over[name] for name in waiting] == ["Finished", "Finished"]
    assert len(num_read) == 1, "one that two asked for was read twice"
    engine.check_integrity()


@pytest.mark.slow
def test_memory_that_runs_out_once_costs_no_byte(make: MakeEngine) -> None:
    def pair() -> list[GenerationRequest]:
        return [controlled(*TWO, seed=seed, num_steps=2, sampler="euler_a") for seed in (1, 2)]

    def engine() -> Engine:
        """Return an engine whose ControlNets are loaded; a failed read is an error of the requests that need it."""
        loaded_engine = make(max_rows=8)
        loaded_engine.runners.controlnets.check(TWO)
        for control in TWO:
            loaded_engine.runners.controlnets.take(control.name)
        return loaded_engine

    engine().generate(pair())
    expected = [latents(result) for result in engine().generate(pair())]
    loaded_engine = engine()
    with Shortage() as calm:
        loaded_engine.generate(pair())
    for when in range(1, calm.num_operations, max(1, calm.num_operations // 12)):
        loaded_engine = engine()
        with Shortage(when):
            outputs = [latents(result) for result in loaded_engine.generate(pair())]
        assert all(map(np.array_equal, outputs, expected)), f"operation {when}"


def test_a_controlled_tick_does_not_wait_for_the_device(
    tiny_model: Callable[[str], Path], folders: Callable[[str], Path]
) -> None:
    model = with_folder(load_model(tiny_model("sd15"), dtype="float16", device="meta"), folders("sd15"))
    engine = Engine(model, EngineConfig(max_rows=8, deterministic=False))
    for request in (controlled(*TWO, seed=1), controlled(*ONE, seed=2), controlled(seed=3)):
        engine.submit(request)
    for live in engine._inbox.values():
        assert live.control_loading is None or live.control_loading.result()
    engine.tick()
    with torch.inference_mode(), DryRun() as counted, ListIndices(counted.work):
        engine.tick()
    calls = [(call.control, len(call.rows)) for call in engine.last_tick.calls]
    assert calls == [("", 2), ("edges", 4), ("", 4)]
    assert counted.work.copies <= 20


def test_what_controlnets_add_takes_room(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make(activation_bytes=1 << 30).runners.room
    plain = make().runners.group_of_short_prompts(64, 64)
    room._most_rows = NO_LIMIT
    capped = [room.rows(group) for group in (plain, plain._replace(is_controlled=True), plain._replace(control="any"))]
    assert capped[0] > capped[1] == capped[2] > 0
    residuals = sum(map(math.prod, residual_shapes(room.model.unet.network, 8, 8))) * 4
    row = room.activations.of_row(64, plain.num_tokens)
    assert abs(capped[0] / capped[1] - (1 + 3 * residuals / row)) < 0.01
    monkeypatch.setattr("diffserve.engine.image.room.free_bytes", lambda _: 1 << 30)
    planned = make().runners.controlnets.planned_bytes
    assert (make().runners.room._first_bytes, room._first_bytes) == ((1 << 30) - planned, 1 << 30)

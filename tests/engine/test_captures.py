"""Captured images: another engine continues them from any step, and they end in the bytes of an undisturbed image."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from diffserve.api.types import Accepted, Captured, ImageFinished
from diffserve.engine import Engine
from diffserve.engine.image import scheduler
from diffserve.engine.image.capture_format import VERSION, decode_capture, encode_capture
from diffserve.engine.image.scheduler import PART_S
from diffserve.models.controlnets import Control
from diffserve.models.loras import Lora
from diffserve.models.references import Reference
from diffserve.models.upscalers import EMBEDDED_UPSCALER
from diffserve.runtime import DiffusionModel
from diffserve.settings.config import EngineConfig
from schedulers import SAMPLERS
from tests.engine import controlnets, loras, references
from tests.engine.capturing import ALWAYS, captures_of, check_resumes, content, resume, spread
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request
from tests.engine.test_hires import hires_request
from tests.engine.test_init_images import fields_of
from tests.engine.test_learned_samplers import NAME, write_sampler
from tests.engine.test_tiles import tiled_request

ROOM = 1 << 24
CONTROL = {"controlnets": (Control("edges"),), "control_images": (controlnets.control_map(1),)}
REFERENCE = {"references": (Reference("base"),), "reference_images": (controlnets.control_map(3, 80, 48),)}

CASES: dict[str, dict[str, Any]] = {
    **{sampler: {"sampler": sampler} for sampler in SAMPLERS},
    "learned": {"sampler": NAME, "num_steps": None, "spacing": None, "guidance_scale": None},
    "device noise": {"sampler": "euler_a", "noise_source": "device"},
    "variation": {"sampler": "euler_a", "variation_strength": 0.3, "variation_seed": 8},
    "image to image": {"sampler": "dpmpp_2m_sde", "strength": 0.8, **fields_of(with_mask=False)},
    "inpainting": {"sampler": "euler_a", "strength": 0.8, **fields_of(with_mask=True)},
    "lora": {"sampler": "euler_a", "loras": (Lora("everything"),)},
    "controlnet": {"sampler": "dpmpp_2m", **CONTROL},
    "ip-adapter": {"sampler": "dpmpp_2m", **REFERENCE},
    "deep cache": {"sampler": "dpmpp_2m", "cache_interval": 3},
    "and": {"sampler": "euler_a", "prompt": "cat AND dog :0.7"},
    "prompt editing": {"sampler": "dpmpp_2m", "prompt": "a [cat:dog:0.5] in [red|blue]"},
    "guidance interval": {"sampler": "deis", "guidance_interval": (0.2, 0.6), "guidance_rescale": 0.4},
    "without guidance": {"sampler": "unipc", "guidance_scale": 1.0},
}


@pytest.fixture(scope="module")
def equipped(
    _models: Callable[[str], Any], tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> DiffusionModel:
    """Return the tiny SD 1.x with adapters, ControlNets, IP-Adapters and a learned sampler."""
    model, folder = _models("sd15"), tmp_path_factory.mktemp
    write_sampler(folders := folder("samplers"), model)
    model = loras.with_folder(model, loras.write_folder(folder("loras"), model))
    model = controlnets.with_folder(model, controlnets.write_folder(folder("controlnets"), model.unet.network))
    model = references.with_folder(model, references.write_folder(folder("references"), tiny_model("sd15")))
    profile = msgspec.structs.replace(model.profile, sampler_dir=str(folders))
    equipped: DiffusionModel = dataclasses.replace(model, profile=profile)
    return equipped


@pytest.mark.parametrize("name", CASES)
def test_image_continues_with_the_same_bytes(name: str, equipped: DiffusionModel) -> None:
    fields: dict[str, Any] = {"sampler": "ddim", "seed": 5, "num_steps": 6} | CASES[name]
    check_resumes(lambda: Engine(equipped, EngineConfig()), image_request("sd15", **fields))


@pytest.mark.parametrize("kind", ["sdxl", "inpaint9"])
def test_other_models_continue_with_the_same_bytes(kind: str, make_engine: MakeEngine) -> None:
    fields = fields_of(with_mask=True) if kind == "inpaint9" else {}
    check_resumes(lambda: make_engine(kind), image_request(kind, "euler_a", seed=2, num_steps=5, **fields))


def test_both_passes_of_hires_fix_continue(make_engine: MakeEngine) -> None:
    check_resumes(make_engine, hires_request(sampler="euler_a"), number=7)


def test_an_upscaler_network_between_the_passes_runs_again(make_engine: MakeEngine) -> None:
    check_resumes(make_engine, hires_request(hires_upscaler=EMBEDDED_UPSCALER), number=7)


@pytest.mark.parametrize("part_s", [PART_S, 0.0])
def test_tiles_continue(part_s: float, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PART_S", part_s)  # 0: a step takes several ticks
    check_resumes(make_engine, tiled_request(sampler="dpmpp_2m", cache_interval=2))


def test_image_from_similar_latents_continues_without_these_latents(make_engine: MakeEngine) -> None:
    request = image_request("sd15", "euler_a", seed=5, prompt="the red fox", similarity_threshold=0.5)
    engine = make_engine(latent_cache_bytes=ROOM)
    engine.generate(replace(request, seed=1, request_id="earlier"))
    captures, [expected] = captures_of(engine, request)
    assert expected.skipped_steps
    [result], num_rows = resume(make_engine(latent_cache_bytes=ROOM), request, captures[0])
    assert content(result) == content(expected)
    assert num_rows < expected.num_evaluations


def test_images_of_one_request_continue_together_and_finished_ones_are_only_decoded(make_engine: MakeEngine) -> None:
    request = image_request("sd15", "euler_a", seed=5, num_images=3, num_steps=4)
    expected = make_engine().generate(replace(request, request_id="undisturbed"))
    captures, _ = captures_of(make_engine(max_rows=2, policy="throughput", max_lanes=1), request)
    for capture in spread(captures, 4):
        results, num_rows = resume(make_engine(), request, capture)
        assert [content(result) for result in results] == [content(result) for result in expected]
        assert num_rows < sum(result.num_evaluations for result in expected)
    steps = {image.row_index for image in decode_capture(captures[-1], make_engine().info).images.values()}
    assert 4 in steps


def test_resumed_image_can_be_captured_and_resumed_again(make_engine: MakeEngine) -> None:
    request = image_request("sd15", "dpmpp_2m_sde", seed=5, num_steps=8)
    [expected] = make_engine().generate(replace(request, request_id="undisturbed"))
    first, _ = captures_of(make_engine(), request)
    again, [middle] = captures_of(make_engine(), replace(request, resume_from=first[1]))
    [result], num_rows = resume(make_engine(), request, again[-1])
    assert content(middle) == content(result) == content(expected)
    assert num_rows < expected.num_evaluations // 2


def test_seeds_that_the_engine_drew_are_those_of_the_capture(make_engine: MakeEngine) -> None:
    request = replace(image_request("sd15", "euler_a", seed=5, num_steps=5, variation_strength=0.4), seed=None)
    captures, [expected] = captures_of(make_engine(), request)
    engine = make_engine()
    events = list(engine.stream(replace(request, request_id="again", resume_from=captures[-1])))
    assert [event.seed for event in events if isinstance(event, Accepted)] == [expected.seed]
    assert [content(event.result) for event in events if isinstance(event, ImageFinished)] == [content(expected)]


def test_equal_requests_that_share_an_image_are_both_captured(make_engine: MakeEngine) -> None:
    request = replace(image_request("sd15", "ddim", seed=5, num_steps=5), capture_every_s=ALWAYS)
    engine = make_engine(result_cache_bytes=ROOM)
    ids = [engine.submit(replace(request, request_id=name)) for name in ("leader", "follower")]
    captures: dict[str, bytes] = {}
    while engine.has_work:
        captures |= {event.request_id: event.data for event in engine.tick() if isinstance(event, Captured)}
        time.sleep(0.002)
    assert sorted(captures) == sorted(ids)
    [expected] = make_engine().generate(replace(request, request_id="undisturbed"))
    [result], num_rows = resume(make_engine(), request, captures["follower"])
    assert content(result) == content(expected)
    assert num_rows < expected.num_evaluations


def test_captures_are_taken_only_as_often_as_the_request_says(make_engine: MakeEngine) -> None:
    request = image_request("sd15", "ddim", seed=5)
    assert captures_of(make_engine(), replace(request, request_id="often"))[0]
    events = list(make_engine().stream(replace(request, capture_every_s=60.0)))
    assert not any(isinstance(event, Captured) for event in events)
    assert not any(isinstance(event, Captured) for event in make_engine().stream(replace(request, request_id="never")))


def damaged(capture: bytes) -> bytes:
    return capture[:100] + bytes([capture[100] ^ 1]) + capture[101:]


def of_another(field: str) -> Callable[[bytes], bytes]:
    def change(capture: bytes) -> bytes:
        body = msgspec.msgpack.decode(capture[4:])
        body[field] = "another"
        return encode_capture(body)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged, "bytes are damaged"),
        (lambda _: b"", "its 0 bytes are damaged"),
        (lambda capture: capture[:50], "its 50 bytes are damaged"),
        (lambda _: encode_capture({}), "cannot be read"),  # type: ignore[arg-type]
        (of_another("version"), f"its version is 'another', and here '{VERSION}'"),
        (of_another("model"), "its model is 'another', and here 'sd15"),
    ],
    ids=["damaged", "empty", "cut", "unreadable", "version", "model"],
)
def test_unusable_capture_is_refused_with_its_reason_and_the_image_starts_at_its_first_step(
    change: Callable[[bytes], bytes], reason: str, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    request = image_request("sd15", "ddim", seed=5, num_steps=4)
    captures, [expected] = captures_of(make_engine(), request)
    with caplog.at_level(logging.WARNING):
        [result], num_rows = resume(make_engine(), request, change(captures[-1]))
    assert reason in caplog.text
    assert content(result) == content(expected)
    assert num_rows == expected.num_evaluations


@pytest.mark.parametrize("changes", [{"seed": 6}, {"prompt": "a cat"}, {"return_latents": False}], ids=str)
def test_capture_of_another_request_is_refused(
    changes: dict[str, Any], make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    captures, _ = captures_of(make_engine(), image_request("sd15", "ddim", seed=5, num_steps=4))
    other = image_request("sd15", "ddim", **{"seed": 5, "num_steps": 4, **changes})
    [expected] = make_engine().generate(replace(other, request_id="undisturbed"))
    [result], num_rows = resume(make_engine(), other, captures[-1])
    assert "image 0 is of another request" in caplog.text
    assert result.picture == expected.picture
    assert num_rows == expected.num_evaluations


def test_image_of_compiled_calls_starts_again_where_calls_are_not_compiled(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    request = hires_request(sampler="euler_a")
    captures, [expected] = captures_of(make_engine(), request)
    info = make_engine().info
    capture = decode_capture(captures[-1], info)
    compiled = replace(capture, images={0: replace(capture.images[0], is_compiled=True)})
    [result], num_rows = resume(make_engine(), request, encode_capture(compiled))
    assert "its UNet calls were compiled, and here they are not" in caplog.text
    assert content(result) == content(expected)
    assert num_rows == expected.num_evaluations

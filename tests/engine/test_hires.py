"""Hires fix: the second pass equals image-to-image on the enlarged first image, in any company."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import save_file

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import (
    GenerationRequest,
    ImageFailed,
    ImageFinished,
    ImageResult,
    Picture,
    Preview,
    Progress,
)
from diffserve.engine import Engine
from diffserve.engine.records import Stage
from diffserve.media.upscaling import enlarge
from diffserve.models.upscalers import EMBEDDED_UPSCALER, SHIPPED
from diffserve.runtime import DiffusionModel, choose_device
from diffserve.runtime.upscaling import network, tiles
from diffserve.runtime.upscaling.network import Upscaler
from diffserve.settings.config import EngineConfig
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request, load_pipeline, pipeline_latents
from tests.upscalers import COMPACT, random_tensors, write_upscaler


def hires_request(seed: int = 3, kind: str = "sd15", sampler: str = "dpmpp_2m", **fields: Any) -> GenerationRequest:
    """Return a request whose second pass runs 3 of 6 steps at 96 px."""
    defaults = {"num_steps": 4, "hires_scale": 1.5, "hires_steps": 6, "hires_strength": 0.5}
    return image_request(kind, sampler, seed, **{**defaults, **fields})


def by_hand(
    engine: Any, request: GenerationRequest, upscale: Callable[[Picture, int, int], Picture] = enlarge
) -> ImageResult:
    """Return the image of the second pass of ``request`` from two requests: text-to-image, then image-to-image."""
    params = request.diffusion
    without = {"hires_scale": None, "hires_size": None}
    [first] = engine.generate(replace(request, request_id="first", diffusion=replace(params, **without)))
    size = 96, 96
    second = replace(
        params, **without, strength=params.hires_strength, num_steps=params.hires_steps or params.num_steps
    )
    changes = {"width_px": size[0], "height_px": size[1], "init_image": upscale(first.picture, *size)}
    [result] = engine.generate(replace(request, request_id="second", diffusion=second, **changes))
    assert isinstance(result, ImageResult)
    return result


def content(result: ImageResult) -> tuple[bytes, bytes]:
    assert result.latents is not None
    return result.latents.data, result.picture.data


@pytest.mark.parametrize("kind", ["sd15", "sdxl", "inpaint9"])
def test_the_second_pass_is_image_to_image_on_the_enlarged_image(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kind)
    request = hires_request(kind=kind)
    [result] = engine.generate(request)
    assert (result.picture.width_px, result.picture.height_px) == (96, 96)
    assert content(result) == content(by_hand(engine, request))
    assert result.num_steps == 4
    assert result.hires_scale == 1.5


def test_the_latents_are_those_of_two_diffusers_pipelines(
    make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    request = hires_request(sampler="ddim")
    [result] = make_engine().generate(request)
    plain = replace(request, diffusion=replace(request.diffusion, hires_scale=None))
    [first] = make_engine().generate(plain)
    enlarged = Image.fromarray(first.pixels).resize((96, 96), Image.Resampling.LANCZOS)
    pipeline = load_pipeline("StableDiffusionImg2ImgPipeline", tiny_model("sd15"))
    second = replace(plain, diffusion=replace(plain.diffusion, num_steps=6))
    reference = pipeline_latents(pipeline, second, "sd15", image=enlarged, strength=0.5)
    assert result.latents is not None
    assert np.abs(result.latents.array - reference).max() < 1e-3


def test_bytes_do_not_depend_on_neighbors(make_engine: MakeEngine) -> None:
    requests = [
        hires_request(1),
        image_request("sd15", "euler_a", 2, num_steps=9),
        hires_request(4, hires_scale=1.0, sampler="heun", guidance_scale=1.0),
        image_request("sd15", "ddim", 5, width_px=96, height_px=96, num_steps=12),
        hires_request(6, sampler="euler_a", hires_scale=None, hires_size="128x96"),
    ]
    mixed = make_engine(max_rows=16).generate(requests)
    solo = make_engine(max_rows=16)
    for together, request in zip(mixed, requests, strict=True):
        [alone] = solo.generate(replace(request, request_id="alone"))
        assert content(alone) == content(together)


def test_the_second_pass_shares_calls_with_images_of_its_size(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=16, deterministic=False)  # where groups need no measurement to share calls
    large = image_request("sd15", "ddim", 5, width_px=96, height_px=96, num_steps=30)
    engine.generate([hires_request(), large])
    shared = [call for tick in engine.trace for call in tick.calls if len({row.request_id for row in call.rows}) == 2]
    assert shared


def by_network(picture: Picture, width_px: int, height_px: int) -> Picture:
    """Upscale a picture in one piece by the shipped network, and resize it."""
    upscaler = Upscaler.load(SHIPPED / f"{EMBEDDED_UPSCALER}.safetensors", choose_device(DEVICE, "float32"))
    return enlarge(Picture.from_array(upscaler.upscale(picture.array)), width_px, height_px)


def test_a_network_between_the_passes_gives_what_three_requests_give(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = hires_request(hires_upscaler=EMBEDDED_UPSCALER)
    [result] = engine.generate(request)
    assert content(result) == content(by_hand(engine, request, by_network))
    assert result.hires_upscaler == EMBEDDED_UPSCALER
    [plain] = engine.generate(hires_request())
    assert content(plain) != content(result)


def use_smallest_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut images into the smallest tiles, so that an upscaler takes several ticks, on every device."""
    monkeypatch.setitem(network.OPERATIONS_PER_CALL, "cpu", 1.0)
    monkeypatch.setattr(network, "OTHER_OPERATIONS_PER_CALL", 1.0)
    monkeypatch.setattr(tiles, "MAX_CONTEXT_PX", 4)


def test_other_images_go_on_between_the_tiles_of_an_upscaler(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_smallest_tiles(monkeypatch)
    engine = make_engine(max_rows=16)
    request, other = hires_request(hires_upscaler=EMBEDDED_UPSCALER), image_request("sd15", "ddim", 5, num_steps=30)
    engine.submit(request)
    engine.submit(other)
    num_ticks, results = 0, {}
    while engine.has_work:
        for event in engine.tick():
            if isinstance(event, ImageFinished):
                results[event.request_id] = event.result
        enlarging = [task for task in engine.scheduler.in_flight if task.stage is Stage.ENLARGING]
        if enlarging:
            num_ticks += 1
            rows = [row for call in engine.trace[-1].calls for row in call.rows]
            assert {row.request_id for row in rows} >= {other.request_id}
    assert num_ticks >= 4
    [alone] = engine.generate(replace(request, request_id="alone"))
    assert content(alone) == content(results[request.request_id])


@pytest.mark.parametrize("ends", ["cancel", "interrupt"])
def test_an_image_may_end_while_a_network_enlarges_it(
    ends: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_smallest_tiles(monkeypatch)
    engine = make_engine()
    request_id = engine.submit(hires_request(hires_upscaler=EMBEDDED_UPSCALER))
    while not any(task.enlargement for task in engine.scheduler.in_flight):
        assert engine.has_work
        engine.tick()
    getattr(engine, ends)(request_id)
    finished = [event for event in engine.events() if isinstance(event, ImageFinished)]
    assert [event.result.picture.width_px for event in finished] == ([96] if ends == "interrupt" else [])
    assert not engine.num_live


def with_upscalers(model: DiffusionModel, folder: Path, **config: Any) -> Engine:
    """Return an engine whose upscalers are in ``folder``."""
    profile = replace(model.profile, upscaler_dir=str(folder))
    return Engine(dataclasses.replace(model, profile=profile), EngineConfig(**config))


def test_an_upscaler_that_fails_fails_its_image_only(loaded: Callable[[str], DiffusionModel], tmp_path: Path) -> None:
    tensors = random_tensors(COMPACT)
    tensors["body.0.weight"][:] = float("nan")
    save_file(tensors, tmp_path / "damaged.safetensors")
    engine = with_upscalers(loaded("sd15"), tmp_path)
    damaged, other = hires_request(hires_upscaler="damaged"), hires_request(4)
    engine.submit(damaged)
    engine.submit(other)
    events = list(engine.events())
    [failure] = [event for event in events if isinstance(event, ImageFailed)]
    assert (failure.request_id, failure.code) == (damaged.request_id, "numerical_error")
    assert [event.request_id for event in events if isinstance(event, ImageFinished)] == [other.request_id]


def test_a_changed_network_gives_another_image_than_the_cache(
    loaded: Callable[[str], DiffusionModel], tmp_path: Path
) -> None:
    file = write_upscaler(tmp_path / "own.safetensors")
    engine = with_upscalers(loaded("sd15"), tmp_path, result_cache_bytes=1 << 24)
    request = hires_request(hires_upscaler="own")
    [before] = engine.generate(request)
    write_upscaler(file, seed=1)
    [after] = engine.generate(replace(request, request_id="after"))
    assert after.cached is None
    assert content(after) != content(before)


def test_progress_and_previews_count_both_passes(make_engine: MakeEngine, waits_for_device: None) -> None:
    engine = make_engine()
    engine.submit(replace(hires_request(), preview_every=1))
    events = list(engine.events())
    steps = [(event.step_index, event.num_steps) for event in events if isinstance(event, Progress)]
    assert steps == [(step, 7) for step in range(1, 8)]
    previews = [event for event in events if isinstance(event, Preview)]
    assert [event.step_index for event in previews] == [1, 2, 3, 5, 6]
    assert [event.picture.width_px for event in previews] == [64, 64, 64, 96, 96]


def test_work_left_counts_both_passes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.submit(hires_request())
    native_px = engine.info.good_sizes[0][0] ** 2
    left = []
    while engine.has_work:
        engine.tick()
        left.append(engine.scheduler.cost_left)
    assert left == sorted(left, reverse=True)
    assert max(left) == 2 * 4 * 64 * 64 / native_px + 2 * 3 * 96 * 96 / native_px


def test_cancel_in_every_tick_frees_the_slot(make_engine: MakeEngine) -> None:
    for num_ticks in range(1, 11):
        engine = make_engine()
        request_id = engine.submit(hires_request())
        for _ in range(num_ticks):
            engine.tick()
        engine.cancel(request_id)
        [*_] = engine.events()
        assert not engine.num_live


@pytest.mark.parametrize("num_ticks", range(2, 8))
def test_interrupt_delivers_an_image_and_says_how_far_it_came(num_ticks: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(hires_request())
    for _ in range(num_ticks):
        engine.tick()
    engine.interrupt(request_id)
    [finished] = [event for event in engine.events() if isinstance(event, ImageFinished)]
    assert 0 < finished.result.interrupted_after < 7


def test_candidates_of_best_of_and_results_from_the_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(result_cache_bytes=1 << 24)
    request = hires_request()
    [first] = engine.generate(request)
    [again, other] = engine.generate([replace(request, request_id="a"), replace(request, request_id="b")])
    assert again.cached == other.cached == "hit"
    assert content(first) == content(again)
    fresh = make_engine(result_cache_bytes=1 << 24)
    both = fresh.generate([replace(request, request_id="a"), replace(request, request_id="b")])
    assert [result.cached for result in both] == [None, "shared"]
    assert content(both[0]) == content(both[1]) == content(first)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"hires_scale": None, "hires_size": "96"}, "hires_size", "hires_size is '96'; write it as WIDTHxHEIGHT"),
        ({"hires_upscaler": "4x"}, "hires_upscaler", "there is no upscaler '4x'; the known ones are embedded-4x, lanc"),
        (
            {"hires_scale": 8.0, "tile_size": 0},
            "hires_scale",
            "the width of the enlarged image is 512 px; this model allows at most",
        ),
        ({"hires_sampler": "none"}, "hires_sampler", "in the second pass"),
        ({"hires_steps": 1001}, "hires_steps", "hires_steps is 1001; it must lie between 1 and 1000"),
        ({"hires_prompt": "cat <lora:a:1>"}, "hires_prompt", "hires_prompt has a LoRA tag"),
    ],
)
def test_what_cannot_be_enlarged_is_refused(
    fields: dict[str, Any], param: str, text: str, make_engine: MakeEngine
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_engine().generate(hires_request(**fields))
    assert text in refused.value.message
    assert refused.value.param == param


def test_a_start_image_is_refused(make_engine: MakeEngine) -> None:
    start = Picture.from_array(np.zeros((64, 64, 3), np.uint8))
    with pytest.raises(InvalidRequest, match="for images from text"):
        make_engine().generate(replace(hires_request(), init_image=start))


def test_the_second_pass_has_its_own_prompt_sampler_and_upscaler(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [plain] = engine.generate(hires_request())
    for fields in (
        {"hires_prompt": "the dog"},
        {"hires_negative_prompt": "dog"},
        {"hires_sampler": "heun"},
        {"hires_schedule": "karras"},
        {"hires_upscaler": "Nearest"},
        {"hires_upscaler": EMBEDDED_UPSCALER},
        {"hires_strength": 0.9},
    ):
        [changed] = engine.generate(hires_request(**fields))
        assert content(changed) != content(plain)


def test_fields_without_hires_fix_have_no_effect_and_say_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    plain = image_request("sd15", "ddim", 3, num_steps=2)
    [result] = engine.generate(replace(plain, diffusion=replace(plain.diffusion, hires_steps=3)))
    assert "hires_steps has no effect without hires_scale or hires_size." in result.warnings


def test_few_steps_leave_one_to_the_second_pass(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for num_steps in (1, 2, 3, 7):
        [result] = engine.generate(hires_request(num_steps=num_steps, hires_steps=None, hires_strength=None))
        assert result.hires_strength is not None
        assert result.num_evaluations == 2 * (num_steps + max(1, int(0.4 * num_steps)))

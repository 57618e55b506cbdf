"""Hires fix: the second pass equals image-to-image on the enlarged first image, in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import GenerationRequest, ImageFinished, ImageResult, Picture, Preview, Progress
from diffserve.media.upscaling import enlarge
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request, load_pipeline, pipeline_latents


def hires_request(seed: int = 3, kind: str = "sd15", sampler: str = "dpmpp_2m", **fields: Any) -> GenerationRequest:
    """Return a request whose second pass runs 3 of 6 steps at 96 px."""
    defaults = {"num_steps": 4, "hires_scale": 1.5, "hires_steps": 6, "hires_strength": 0.5}
    return image_request(kind, sampler, seed, **{**defaults, **fields})


def by_hand(engine: Any, request: GenerationRequest) -> ImageResult:
    """Return the image of the second pass of ``request`` from two requests: text-to-image, then image-to-image."""
    params = request.diffusion
    without = {"hires_scale": None, "hires_size": None}
    [first] = engine.generate(replace(request, request_id="first", diffusion=replace(params, **without)))
    size = 96, 96
    second = replace(
        params, **without, strength=params.hires_strength, num_steps=params.hires_steps or params.num_steps
    )
    changes = {"width_px": size[0], "height_px": size[1], "init_image": enlarge(first.picture, *size)}
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
        ({"hires_upscaler": "4x"}, "hires_upscaler", "hires_upscaler is '4x'; it must be one of lanczos, nearest"),
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

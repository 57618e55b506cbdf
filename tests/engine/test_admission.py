"""At the door: what cannot be painted is refused with the value and the way out."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import DiffusionParams, Picture
from diffserve.engine.image.admission import ImageAdmission, guided_rows
from diffserve.models.vocabulary import Vocabulary
from schedulers import compile_table
from tests.engine.simulated_scheduler import INFO, SCHEDULE, admission, request

SQUARE = Picture.from_array(np.zeros((64, 64, 3), dtype=np.uint8))
MASK = Picture.from_array(np.zeros((64, 64), dtype=np.uint8))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"num_steps": 1001}, "num_inference_steps", r"num_steps is 1001; this model allows at most 1000"),
        ({"width_px": 60}, "size", r"width is 60 px; it must be a multiple of 8: try 56 or 64"),
        ({"height_px": 5}, "size", r"height is 5 px; it must be a multiple of 8: try 8\."),
        ({"width_px": 100000, "height_px": 8}, "size", r"width is 100000 px; this model allows at most 128 px"),
        ({"sampler": "eular"}, "sampler", r"'eular', which is unknown. Did you mean 'euler'\? Choose from ddim, ddpm"),
        ({"spacing": "sideways"}, "spacing", r"sideways"),
        ({"sigma_schedule": "crooked"}, "spacing", r"crooked"),
        ({"init_image": SQUARE, "strength": 0.01}, "strength", r"strength 0.01 of 10 steps leaves no step to run"),
        (
            {"init_image": SQUARE, "width_px": 96},
            "image",
            r"the image is 64x64 px, the generated image 96x64; resize the image",
        ),
        ({"init_image": SQUARE, "mask_image": SQUARE}, "mask", r"the mask has 3 channel\(s\); it must have 1"),
        ({"init_image": MASK}, "image", r"the image has 1 channel\(s\); it must have 3"),
        ({"seed": 2**63 - 1, "num_images": 2}, "seed", r"775806 \(the last of 2 images uses seed \+ 1\)"),
        ({"negative_prompt": "\ud800"}, "negative_prompt", r"has a lone surrogate"),
    ],
)
def test_bad_input_is_refused_with_the_value_in_it(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        admission().admit(request(**fields), 0.0)
    assert refused.value.param == param
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "a [fox:wolf:0.5] in snow:0.25 AND a cat :0.75"}, ["'wolf'"]),
        ({"prompt": "a [fox|wolf|cat] in snow"}, ["'wolf'"]),
        ({"prompt": "a [fox:12] in snow"}, []),
        ({"prompt": "a fox in snow 0.5"}, ["'0', '5'"]),
        ({"prompt": "a fox", "negative_prompt": "[snow:wolf:0.5]"}, ["'wolf' of the negative prompt"]),
    ],
)
def test_times_and_weights_in_a_prompt_are_no_unknown_words(fields: dict[str, str], words: list[str]) -> None:
    vocabulary = Vocabulary(objects=("fox",), places=(), colors=(), words=("a", "fox", "cat", "in", "snow"))
    door = admission(msgspec.structs.replace(INFO, world=vocabulary))
    warnings = door.admit(msgspec.structs.replace(request(num_steps=20), **fields), 0.0).warnings
    unknown = [warning for warning in warnings if "does not know" in warning]
    assert len(unknown) == len(words)
    for warning, word in zip(unknown, words, strict=True):
        assert f"does not know {word}" in warning


def test_missing_fields_are_filled_in_from_the_model() -> None:
    live = admission().admit(msgspec.structs.replace(request(), diffusion=DiffusionParams()), 7.0)
    settings = live.settings
    assert (settings.width_px, settings.height_px, settings.sampler, settings.num_steps) == (64, 64, "ddim", 10)
    assert (settings.guidance_scale, settings.spacing, settings.sigma_schedule) == (5.0, "leading", None)
    assert live.submitted_s == 7.0


def test_spacing_that_nobody_names_is_the_scheduler_file_s_or_else_the_sampler_s_own() -> None:
    info = msgspec.structs.replace(INFO, default_spacing="auto")
    spacings = [admission(info).admit(request(sampler=name), 0.0).settings.spacing for name in ("ddim", "euler")]
    assert spacings == ["leading", "linspace"]
    admission_result = admission(info, timestep_spacing="trailing")
    assert admission_result.admit(request(sampler="euler"), 0.0).settings.spacing == "trailing"
    assert admission_result.admit(request(sampler="euler", spacing="leading"), 0.0).settings.spacing == "leading"


def test_a_profile_s_sigma_schedule_belongs_to_its_sampler_only() -> None:
    profile = DiffusionParams(sampler="euler", sigma_schedule="karras", eta=0.0)
    door = ImageAdmission(msgspec.structs.replace(INFO, default_sampler="euler"), SCHEDULE, {}, profile)
    assert door.admit(request(), 0.0).settings.sigma_schedule == "karras"
    assert door.admit(request(sampler="heun"), 0.0).settings.sigma_schedule is None
    assert door.admit(request(sampler="DPM++ 2M Exponential"), 0.0).settings.sigma_schedule == "exponential"


def test_an_init_image_gives_the_size() -> None:
    wide = Picture.from_array(np.zeros((64, 96, 3), dtype=np.uint8))
    settings = admission().admit(request(init_image=wide, strength=0.5), 0.0).settings
    assert (settings.width_px, settings.height_px, settings.kind) == (96, 64, "image")
    assert (settings.num_steps, settings.table.num_steps) == (10, 5)


def test_a_seed_is_drawn_when_none_is_given() -> None:
    seeds = {admission().admit(request(), 0.0).seed for _ in range(8)}
    assert len(seeds) == 8
    assert admission().admit(request(seed=5), 0.0).seed == 5


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sampler": "euler", "eta": 0.5}, "eta 0.5 was ignored, because euler does not use it"),
        ({"sampler": "ddpm_large", "num_steps": 10}, "ddpm_large at 10 steps leaves much noise"),
        ({"token_merging": 0.5}, "token_merging has no effect: it was removed in 0.2"),
        ({"guidance_scale": 0.5}, "guidance_scale 0.5 was replaced by 1, which means no guidance"),
        ({"guidance_scale": 1.0, "negative_prompt": "night"}, "the negative prompt has no effect without guidance"),
        ({"seed": 7 + 2**32}, "4294967303 gives the same image as 7"),
        ({"seed": 2**32 - 1, "num_images": 2}, "4294967296 gives the same image as 0"),
    ],
)
def test_what_is_merely_unwise_is_let_through_with_a_warning(fields: dict[str, Any], says: str) -> None:
    """Row "guidance-below-one" of docs/parity.md is one of them."""
    [warning] = admission().admit(request(**fields), 0.0).warnings
    assert says in warning


def test_clipping_that_diffusers_applies_and_the_rows_do_not_is_a_warning() -> None:
    """StableDiffusionPipeline turns ``clip_sample`` off; the pipelines of SDXL do not."""
    sdxl = msgspec.structs.replace(INFO, family="sdxl")
    [warning] = admission(sdxl, clip_sample=True).admit(request(sampler="ddim"), 0.0).warnings
    assert "clip_sample is True in the model's scheduler configuration; ddim does not apply it" in warning
    assert admission(sdxl, clip_sample=True).admit(request(sampler="euler"), 0.0).warnings == ()
    assert admission(sdxl, clip_sample=False).admit(request(sampler="ddim"), 0.0).warnings == ()
    assert admission(clip_sample=True).admit(request(sampler="ddim"), 0.0).warnings == ()


def test_multistep_history_starts_empty_at_the_refiner() -> None:
    info = msgspec.structs.replace(INFO, refiner="refiner")
    plain, switched = (
        admission(info).admit(request(sampler="dpmpp_2m", switch_at=at), 0.0).settings for at in (None, 0.5)
    )
    assert switched.switch_row is not None
    assert plain.table.b[switched.switch_row, 1] != 0.0
    assert switched.table.b[switched.switch_row, 1] == 0.0
    before = slice(0, switched.switch_row)
    np.testing.assert_array_equal(plain.table.packed[before], switched.table.packed[before])


def test_equal_requests_share_one_table() -> None:
    door = admission()
    assert door.admit(request(), 0.0).settings.table is door.admit(request(), 0.0).settings.table


@pytest.mark.parametrize(
    ("scale", "interval", "guided"),
    [
        (5.0, (0.0, 1.0), 10),
        (5.0, (0.2, 0.6), 4),
        (5.0, (0.25, 0.5), 2),
        (5.0, (0.3, 0.3), 0),
        (1.0, (0.0, 1.0), 0),
        (0.0, (0.0, 1.0), 0),
    ],
)
def test_the_unconditional_row_runs_inside_the_interval_only(
    scale: float, interval: tuple[float, float], guided: int
) -> None:
    rows = guided_rows(compile_table("ddim", SCHEDULE, 10), scale, interval)
    assert int(rows.sum()) == guided
    assert rows[int(interval[0] * 10 + 0.5) :][:guided].all()

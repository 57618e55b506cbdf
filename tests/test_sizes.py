"""Size planning: images are generated at a size that suits the model and delivered at the requested size."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffserve.api.errors import InvalidRequest
from diffserve.api.sizes import parse_size, plan_size
from diffserve.api.types import ModelInfo, Picture

EMBEDDED = ModelInfo(
    model_id="embedded",
    family="sd",
    digest="",
    prediction_type="v_prediction",
    vae_factor=8,
    latent_channels=8,
    size_multiple_px=16,
    good_sizes=((128, 128), (128, 192), (192, 128)),
    max_side_px=192,
    train_timesteps=1000,
    is_inpainting=False,
    default_sampler="ddim",
    default_num_steps=20,
    default_guidance_scale=3.0,
    default_spacing="trailing",
    device="cpu",
    dtype="float32",
    choice_reason="",
    num_parameters=1,
    weights_bytes=4,
)


@pytest.mark.parametrize(
    ("requested", "generated"),
    [
        (None, (128, 128)),
        ((128, 128), (128, 128)),
        ((144, 144), (144, 144)),
        ((512, 512), (128, 128)),
        ((1024, 1024), (128, 128)),
        ((1024, 1536), (128, 192)),
        ((300, 200), (192, 128)),
        ((640, 480), (128, 96)),
        ((480, 640), (96, 128)),
    ],
)
def test_image_is_generated_at_the_nearest_suitable_size(
    requested: tuple[int, int] | None, generated: tuple[int, int]
) -> None:
    plan = plan_size(EMBEDDED, requested)
    assert (plan.paint_width_px, plan.paint_height_px) == generated
    assert (plan.width_px, plan.height_px) == (requested or (128, 128))
    assert (plan.warning is None) == (requested is None or requested == generated)


def test_warning_names_both_sizes_and_mentions_only_trained_sizes_as_good() -> None:
    assert plan_size(EMBEDDED, (512, 512)).warning == (
        "the image was generated at 128x128, a size that this model was trained for, and resized to 512x512."
    )
    assert plan_size(EMBEDDED, (640, 480)).warning == "the image was generated at 128x96 and resized to 640x480."


PADDING = msgspec.structs.replace(EMBEDDED, other_aspects="pad")


@pytest.mark.parametrize(
    ("requested", "generated"),
    [
        ((256, 128), (192, 128)),
        ((1920, 1080), (192, 128)),
        ((64, 1024), (128, 192)),
        ((640, 480), (192, 128)),
        ((144, 144), (128, 128)),
        ((600, 512), (128, 128)),
    ],
)
def test_model_of_few_aspect_ratios_generates_the_nearest_one_and_pads(
    requested: tuple[int, int], generated: tuple[int, int]
) -> None:
    plan = plan_size(PADDING, requested)
    assert (plan.paint_width_px, plan.paint_height_px) == generated
    assert plan.is_trained
    assert plan.is_padded == (requested != (144, 144))
    assert plan.warning is not None
    assert ("padded at its edges and resized" in plan.warning) == plan.is_padded


def test_padding_keeps_the_complete_image_and_extends_its_edges() -> None:
    plan = plan_size(PADDING, (256, 128))
    pixels = np.random.default_rng(1).integers(0, 256, (128, 192, 3), dtype=np.uint8)
    delivered = plan.deliver(Picture.from_array(pixels)).array
    assert delivered.shape == (128, 256, 3)
    assert np.array_equal(delivered[:, 32:-32], pixels)
    assert np.array_equal(delivered[:, :32], np.repeat(pixels[:, :1], 32, axis=1))
    tall = plan_size(PADDING, (128, 512)).deliver(Picture.from_array(pixels.transpose(1, 0, 2))).array
    assert tall.shape == (512, 128, 3)
    assert np.array_equal(tall[0], tall[100])


def test_padding_can_be_disabled() -> None:
    plan = plan_size(PADDING, (256, 128), may_pad=False)
    assert (plan.paint_width_px, plan.paint_height_px, plan.is_padded) == (192, 96, False)


@given(st.integers(64, 2048), st.integers(64, 2048))
def test_every_valid_size_has_a_plan_on_the_grid_near_its_aspect_ratio(width: int, height: int) -> None:
    plan = plan_size(EMBEDDED, (width, height))
    sides = (plan.paint_width_px, plan.paint_height_px)
    assert all(side % 16 == 0 and 16 <= side <= 192 for side in sides)
    assert sides[0] * sides[1] >= 8192
    if max(width, height) <= 1.5 * min(width, height):
        assert abs(math.log(sides[0] / sides[1] * height / width)) < 0.15


@given(st.integers(64, 2048), st.integers(64, 2048))
def test_swapped_sides_give_the_same_area(width: int, height: int) -> None:
    plan, turned = plan_size(EMBEDDED, (width, height)), plan_size(EMBEDDED, (height, width))
    area, turned_area = plan.paint_width_px * plan.paint_height_px, turned.paint_width_px * turned.paint_height_px
    assert area == turned_area


@pytest.mark.parametrize("requested", [(0, 512), (100_000, 8), (63, 64), (64, 2049)])
def test_error_about_a_size_out_of_range_names_it(requested: tuple[int, int]) -> None:
    with pytest.raises(
        InvalidRequest, match=f"size is {requested[0]}x{requested[1]}; each side must lie between 64 and 2048"
    ):
        plan_size(EMBEDDED, requested)


def test_size_text_is_parsed_or_refused() -> None:
    assert parse_size("512x768") == (512, 768)
    assert parse_size(" 512 X 768 ") == (512, 768)
    assert parse_size("auto") is None
    for text in ("", "512", "512x", "-1x5", "axb", "1" * 10 + "x5"):
        with pytest.raises(InvalidRequest, match="size is "):
            parse_size(text)

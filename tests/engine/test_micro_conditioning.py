"""SDXL size conditioning: the same latents as diffusers, for each row, and the values in every output format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.media.infotext import parse_infotext, write_infotext
from tests.device import tolerance
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import image_request, load_pipeline, pipeline_latents

TOLD = MicroConditioning(original_size=(40, 72), crop=(8, 16), target_size=(96, 80), negative_original_size=(24, 32),
    negative_crop=(4, 2), negative_target_size=(64, 48))  # fmt: skip
HALF = MicroConditioning(original_size=(40, 72), target_size=(96, 80))


def test_latents_match_diffusers_in_a_batch_with_different_size_conditioning(
    make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    pipeline = load_pipeline("StableDiffusionXLPipeline", tiny_model("sdxl"))
    conditioning: dict[str, Any] = {
        "original_size": (72, 40),
        "crops_coords_top_left": (16, 8),
        "target_size": (80, 96),
    }
    negative: dict[str, Any] = {"negative_original_size": (32, 24), "negative_crops_coords_top_left": (2, 4),
        "negative_target_size": (48, 64)}  # fmt: skip
    asks = [
        image_request("sdxl", "ddim", seed=5, num_steps=4, micro_conditioning=sizes) for sizes in (TOLD, HALF, None)
    ]
    variants: list[dict[str, Any]] = [conditioning | negative, {**conditioning, "crops_coords_top_left": (0, 0)}, {}]
    engine = make_engine("sdxl", max_rows=8)
    results = engine.generate(asks)
    for request, inputs, result in zip(asks, variants, results, strict=True):
        reference = pipeline_latents(pipeline, request, "sdxl", **inputs)
        assert result.latents is not None
        assert np.abs(result.latents.array - reference).max() < tolerance(1e-3)
        assert result.micro_conditioning == request.diffusion.micro_conditioning
    assert len({result.picture.data for result in results}) == 3
    assert max(len(set(tick.request_ids)) for tick in engine.trace) == 3
    written = write_infotext(results[0], width_px=64, height_px=64)
    assert MicroConditioning.read(parse_infotext(written).fields["Micro conditioning"]) == TOLD
    assert "Micro conditioning" not in write_infotext(results[2], width_px=64, height_px=64)


def test_a_model_without_size_conditioning_reports_it(make_engine: MakeEngine) -> None:
    with pytest.raises(
        InvalidRequest, match="has no size conditioning; micro_conditioning is only for SDXL: leave it out"
    ) as no:
        make_engine("sd15").submit(image_request("sd15", "ddim", seed=5, micro_conditioning=HALF))
    assert no.value.param == "micro_conditioning"


@pytest.mark.parametrize("text", ["", "640x480", "original_size 640", "origin 1x2", "crop 1x2 junk", "crop -1x2"])
def test_text_that_says_no_sizes_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write names and pairs, for example 'original_size 640x480"):
        MicroConditioning.read(text)


@pytest.mark.parametrize(("name", "pair"), [("crop", (-1, 0)), ("original_size", (0, 1)), ("target_size", (1, 16385))])
def test_sizes_out_of_bounds_are_named(name: str, pair: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=rf"micro_conditioning.{name} is \({pair[0]}, {pair[1]}\)"):
        MicroConditioning(**{name: pair})


def test_text_and_numbers_are_the_same_thing() -> None:
    assert MicroConditioning.read(str(TOLD)) == TOLD
    assert MicroConditioning.read(" crop 3x4 ") == MicroConditioning(crop=(3, 4))
    assert HALF.numbers(128, 64, is_uncond=True) == HALF.numbers(128, 64, is_uncond=False) == [72, 40, 0, 0, 80, 96]
    assert MicroConditioning().numbers(128, 64, is_uncond=False) == [64, 128, 0, 0, 64, 128]

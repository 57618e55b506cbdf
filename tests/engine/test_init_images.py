"""Image-to-image and inpainting against diffusers' pipelines: same order of draws, same latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.types import ImageResult, Picture
from tests.engine.conftest import MakeEngine
from tests.engine.pipelines import SCHEDULERS, image_request, load_pipeline, pipeline_latents

TOLERANCE = 1e-3


def scene(height: int = 64, width: int = 64) -> NDArray[np.uint8]:
    """Return an image with gradients and an edge, (height, width, 3)."""
    down, right = np.mgrid[0:height, 0:width]
    return np.stack([down * 255 // height, right * 255 // width, 255 * (down > right)], axis=-1).astype(np.uint8)


def half_mask(height: int = 64, width: int = 64) -> NDArray[np.uint8]:
    """Repaint the right half, with values next to the threshold in one row."""
    mask = np.zeros((height, width), dtype=np.uint8)
    mask[:, width // 2 :] = 255
    mask[0] = 127
    mask[8] = 128
    return mask


def inputs_of(with_mask: bool) -> dict[str, Any]:
    """Return the images as diffusers takes them."""
    pictures = {"image": Image.fromarray(scene())}
    return {**pictures, "mask_image": Image.fromarray(half_mask())} if with_mask else pictures


def fields_of(with_mask: bool) -> dict[str, Any]:
    """Return the images as a request takes them."""
    pictures = {"init_image": Picture.from_array(scene())}
    return {**pictures, "mask_image": Picture.from_array(half_mask())} if with_mask else pictures


def error(result: ImageResult, reference: NDArray[np.float32]) -> float:
    assert result.latents is not None
    return float(np.abs(result.latents.array - reference).max())


@pytest.mark.parametrize("sampler", sorted(SCHEDULERS))
@pytest.mark.parametrize("with_mask", [False, True], ids=["image-to-image", "inpainting"])
def test_an_init_image_gives_the_latents_of_diffusers(
    sampler: str, with_mask: bool, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    name = "StableDiffusionInpaintPipeline" if with_mask else "StableDiffusionImg2ImgPipeline"
    pipeline = load_pipeline(name, tiny_model("sd15"))
    engine = make_engine()
    for strength in (0.6, 1.0):
        request = image_request("sd15", sampler, seed=4, num_steps=6, strength=strength, **fields_of(with_mask))
        reference = pipeline_latents(pipeline, request, "sd15", strength=strength, **inputs_of(with_mask))
        [result] = engine.generate(request)
        assert error(result, reference) < TOLERANCE, f"strength {strength}"
        assert result.num_evaluations == 2 * int(6 * strength)


@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_a_nine_channel_unet_inpaints_as_in_diffusers(
    strength: float, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    pipeline = load_pipeline("StableDiffusionInpaintPipeline", tiny_model("inpaint9"))
    request = image_request("inpaint9", "ddpm", seed=4, strength=strength, **fields_of(with_mask=True))
    reference = pipeline_latents(pipeline, request, "inpaint9", strength=strength, **inputs_of(with_mask=True))
    [result] = make_engine("inpaint9").generate(request)
    assert error(result, reference) < TOLERANCE


def test_an_inpainting_unet_paints_from_text_by_repainting_everything(
    make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    pipeline = load_pipeline("StableDiffusionInpaintPipeline", tiny_model("inpaint9"))
    request = image_request("inpaint9", "euler", seed=4)
    everything = Image.fromarray(np.full((64, 64), 255, dtype=np.uint8))
    inputs: dict[str, Any] = {"image": Image.fromarray(scene()), "mask_image": everything}
    reference = pipeline_latents(pipeline, request, "inpaint9", strength=1.0, **inputs)
    [result] = make_engine("inpaint9").generate(request)
    assert error(result, reference) < TOLERANCE


@pytest.mark.parametrize("with_mask", [False, True], ids=["image-to-image", "inpainting"])
def test_sdxl_takes_init_images_as_in_diffusers(
    with_mask: bool, make_engine: MakeEngine, tiny_model: Callable[[str], Path]
) -> None:
    name = "StableDiffusionXLInpaintPipeline" if with_mask else "StableDiffusionXLImg2ImgPipeline"
    pipeline = load_pipeline(name, tiny_model("sdxl"))
    request = image_request("sdxl", "euler", seed=4, strength=0.6, **fields_of(with_mask))
    reference = pipeline_latents(pipeline, request, "sdxl", strength=0.6, **inputs_of(with_mask))
    [result] = make_engine("sdxl").generate(request)
    assert error(result, reference) < TOLERANCE


def test_inpainting_keeps_the_latents_outside_the_mask(make_engine: MakeEngine) -> None:
    engine = make_engine()
    results = [
        engine.generate(image_request("sd15", "euler", seed=seed, strength=1.0, **fields_of(with_mask=True)))[0]
        for seed in (1, 2)
    ]
    first, second = (result.latents.array for result in results if result.latents is not None)
    posterior_noise = 0.5  # two draws from the same narrow posterior
    assert np.abs(first[:, 2:, :4] - second[:, 2:, :4]).mean() < posterior_noise
    assert np.abs(first[:, 2:, 4:] - second[:, 2:, 4:]).mean() > posterior_noise


def test_outside_the_mask_every_pixel_is_the_init_images_own(make_engine: MakeEngine) -> None:
    fields = fields_of(with_mask=True)
    (painted,) = make_engine("sd15").generate(image_request("sd15", "euler", seed=1, strength=1.0, **fields))
    unmasked = fields["mask_image"].array < 128
    assert np.array_equal(painted.pixels[unmasked], fields["init_image"].array[unmasked])
    assert not np.array_equal(painted.pixels[~unmasked], fields["init_image"].array[~unmasked])


def test_text_images_and_masks_share_a_unet_call(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=16)
    requests = [
        image_request("sd15", "ddim", seed=1),
        image_request("sd15", "dpmpp_2m", seed=2, strength=0.9, **fields_of(with_mask=False)),
        image_request("sd15", "ddpm", seed=3, strength=0.8, **fields_of(with_mask=True)),
    ]
    alone = [engine.generate(request)[0] for request in requests]
    again = [image_request("sd15", "ddim", seed=1)]
    again += [image_request("sd15", "dpmpp_2m", seed=2, strength=0.9, **fields_of(with_mask=False))]
    again += [image_request("sd15", "ddpm", seed=3, strength=0.8, **fields_of(with_mask=True))]
    together = engine.generate(again)
    assert max(len(set(tick.request_ids)) for tick in engine.trace) == 3
    assert [result.picture for result in together] == [result.picture for result in alone]

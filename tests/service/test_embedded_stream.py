"""Streams of the embedded model with the ``openai`` client: every preview is closer to the image."""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import OpenAI

from diffserve.media.images import decode_image, resize
from tests.service.server import RunningServer

pytestmark = pytest.mark.slow


def pixels_of(event: Any, side_px: int) -> NDArray[np.float64]:
    """Return the image in an event, [side_px, side_px, 3] in 0..255."""
    picture = decode_image(base64.b64decode(event.b64_json, validate=True))
    return resize(picture, side_px, side_px).array.astype(np.float64)


def psnr_db(picture: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """Return the peak signal-to-noise ratio of pixels in 0..255: 10 log10(255^2 / mean squared error)."""
    return float(10 * np.log10(255**2 / np.mean((picture - reference) ** 2)))


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_each_preview_is_closer_to_the_completed_image(page_server: RunningServer, sampler: str) -> None:
    with OpenAI(base_url=f"{page_server.url}/v1", api_key="unused", max_retries=0) as client:
        stream = client.images.generate(
            prompt="a fox next to a cactus on the beach", stream=True, partial_images=3, size="128x128",
            extra_body={"num_inference_steps": 20, "sampler": sampler, "seed": 19},
        )  # fmt: skip
        events: list[Any] = [event for event in stream if str(event.type) != "image_generation.progress"]
    names = [event.type.removeprefix("image_generation.") for event in events]
    assert names == ["partial_image"] * 3 + ["completed"]
    side_px = int(events[0].size.partition("x")[0])  # the image is scaled down to the preview size
    *previews, picture = [pixels_of(event, side_px) for event in events]
    clearness = [psnr_db(preview, picture) for preview in previews]
    assert all(earlier < later for earlier, later in pairwise(clearness)), clearness
    assert clearness[0] + 2 < clearness[-1] > 15, clearness  # the preview decoder's own blur is some 26 dB

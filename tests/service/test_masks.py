"""Masks through both image APIs, in every pixel format of a PNG or JPEG, judged by which pixels change."""

from __future__ import annotations

import base64
from collections.abc import Callable
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.service.server import RunningServer
from tests.service.test_edits import in_base64, picture, pixels_of

SIDE = 64
MARKED = np.zeros((SIDE, SIDE), np.uint8)
MARKED[:, : SIDE // 2] = 255  # repaint the left half
BEFORE = picture(SIDE, SIDE)


def gray_alpha(gray: NDArray[np.uint8] | int, alpha: NDArray[np.uint8] | int) -> Image.Image:
    layers = [np.broadcast_to(np.uint8(values), MARKED.shape) for values in (gray, alpha)]
    return Image.fromarray(np.stack(layers, axis=-1), "LA")


def transparent_palette(alpha: NDArray[np.uint8]) -> Image.Image:
    """Return a palette image of two equal colors, of which the second is transparent."""
    image = Image.fromarray((alpha == 0).astype(np.uint8), "P")
    image.putpalette([255] * 6)
    image.info["transparency"] = b"\xff\x00"
    return image


def encode(image: Image.Image) -> str:
    file, options = BytesIO(), {}
    if "transparency" in image.info:
        options["transparency"] = image.info["transparency"]
    image.save(file, "JPEG" if image.mode == "CMYK" else "PNG", **options)
    return base64.b64encode(file.getvalue()).decode()


OPAQUE: dict[str, Callable[[], Image.Image]] = {
    "L": lambda: Image.fromarray(MARKED),
    "1": lambda: Image.fromarray(MARKED).convert("1"),
    "P": lambda: Image.fromarray(MARKED).convert("P"),
    "RGB": lambda: Image.fromarray(MARKED).convert("RGB"),
    "RGBA": lambda: Image.fromarray(MARKED).convert("RGBA"),
    "LA": lambda: gray_alpha(MARKED, 255),
    "I;16": lambda: Image.fromarray(MARKED.astype(np.uint16) * 257),
    "CMYK": lambda: Image.fromarray(MARKED).convert("RGB").convert("CMYK"),
    "gray at the threshold": lambda: Image.fromarray(np.where(MARKED, 128, 127).astype(np.uint8)),
}
"""White where to repaint; both APIs read these alike."""

WITH_ALPHA: dict[str, Callable[[NDArray[np.uint8]], Image.Image]] = {
    "white RGBA": lambda alpha: gray_alpha(255, alpha).convert("RGBA"),
    "black RGBA": lambda alpha: gray_alpha(0, alpha).convert("RGBA"),
    "LA": lambda alpha: gray_alpha(255, alpha),
    "P": transparent_palette,
}


def repaint_a1111(server: RunningServer, mask: Image.Image) -> NDArray[np.uint8]:
    body: dict[str, Any] = {
        "prompt": "a red fox", "init_images": [in_base64(BEFORE)], "mask": encode(mask), "mask_blur": 0, "seed": 1,
        "steps": 1, "denoising_strength": 1.0, "inpaint_full_res": False, "width": SIDE, "height": SIDE,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/sdapi/v1/img2img", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return pixels_of(answer.json()["images"][0])


def repaint_openai(server: RunningServer, mask: Image.Image) -> NDArray[np.uint8]:
    body = {"prompt": "a red fox", "image": in_base64(BEFORE), "mask": encode(mask), "seed": 1, "steps": 1}
    answer = httpx.post(f"{server.url}/v1/images/edits", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return pixels_of(answer.json()["data"][0]["b64_json"])


def assert_only_left_half_changed(after: NDArray[np.uint8]) -> None:
    changed = (after != BEFORE).any(axis=-1)
    assert not changed[:, SIDE // 2 :].any()
    assert changed[:, : SIDE // 2 - 4].mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("repaint", [repaint_a1111, repaint_openai])
@pytest.mark.parametrize("mode", OPAQUE)
def test_opaque_mask_repaints_where_it_is_white(
    server: RunningServer, mode: str, repaint: Callable[[RunningServer, Image.Image], NDArray[np.uint8]]
) -> None:
    assert_only_left_half_changed(repaint(server, OPAQUE[mode]()))


@pytest.mark.slow
@pytest.mark.parametrize("mode", WITH_ALPHA)
def test_a1111_mask_with_transparency_repaints_where_it_is_opaque(server: RunningServer, mode: str) -> None:
    assert_only_left_half_changed(repaint_a1111(server, WITH_ALPHA[mode](MARKED)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", WITH_ALPHA)
def test_openai_mask_with_transparency_repaints_where_it_is_transparent(server: RunningServer, mode: str) -> None:
    assert_only_left_half_changed(repaint_openai(server, WITH_ALPHA[mode](255 - MARKED)))


@pytest.mark.slow
def test_a1111_mask_repaints_where_alpha_is_above_128(server: RunningServer) -> None:
    alpha = np.where(MARKED, 129, 128).astype(np.uint8)
    assert_only_left_half_changed(repaint_a1111(server, gray_alpha(0, alpha).convert("RGBA")))

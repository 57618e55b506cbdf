"""Sizes, filters and recorded parameters of upscaled images, without torch."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

import numpy as np
from PIL import Image

from diffserve.api.bounds import check
from diffserve.api.types import FILTERS, LANCZOS, NEAREST, Picture
from diffserve.api.upscale_types import MAX_FACTOR, MAX_INPUT_PIXELS, MAX_OUTPUT_PIXELS, check_output_size
from diffserve.media.images import DIGITAL_SOURCE_TYPES
from diffserve.media.infotext import UPSCALE, parse_infotext
from diffserve.media.provenance import ProvenanceReport
from diffserve.media.watermark import Kind

FILTER_SCALE: Final = 2.0
"""Enlargement by a filter if the request names neither a scale nor a size."""

MAX_PASSES: Final = 3
"""Runs of a network for one image: an enlargement above that of the network takes several, as in A1111."""


FLATTENED: Final = "has transparent areas, which are white in the result: upscaled images are opaque."
"""Warning about an image with transparency; its subject is the image."""


class TargetSize(NamedTuple):
    """Size of the upscaled image; an image of another aspect ratio is cropped to it."""

    width_px: int
    height_px: int


def target_size(
    width_px: int, height_px: int, *, scale: float | None, size: tuple[int, int] | None, default_scale: float
) -> TargetSize:
    """Return the size of an upscaled image.

    Args:
        width_px: Width of the image.
        height_px: Height of the image.
        scale: Enlargement of both sides.
        size: Width and height instead.
        default_scale: Enlargement without both.

    Raises:
        InvalidRequest: Both are given, or the upscaled image would be too large.
    """
    check(scale is None or size is None, "scale and size are both given; give one of them.", "size")
    if size is not None:
        check(min(size) >= 1, f"size is {size[0]}x{size[1]}; both sides must be 1 px or more.", "size")
        check_output_size(*size, "size")
        largest = max(size[0] / width_px, size[1] / height_px)
        message = f"size is {size[0]}x{size[1]}, {largest:.1f} times the image; at most {MAX_FACTOR:g} is possible."
        check(largest <= MAX_FACTOR, message, "size")
        return TargetSize(*size)
    factor = default_scale if scale is None else scale
    message = f"scale is {factor:g}; it must be more than 0 and at most {MAX_FACTOR:g}."
    check(0.0 < factor <= MAX_FACTOR, message, "scale")
    target = TargetSize(max(1, round(width_px * factor)), max(1, round(height_px * factor)))
    check_output_size(*target, "scale")
    return target


RESAMPLING: Final[dict[str, Image.Resampling]] = {
    LANCZOS: Image.Resampling.LANCZOS,
    NEAREST: Image.Resampling.NEAREST,
}


def canonical_upscaler(name: str) -> str:
    """Return the canonical name of a filter in any letter case; the name of a network is returned unchanged."""
    name = name.strip()
    return name.lower() if name.lower() in FILTERS else name


def needs_another_run(picture: Picture, target: TargetSize, scale: int) -> bool:
    """Return whether a network should enlarge its own result again, which is too small and not too large to enlarge.

    Args:
        picture: The result.
        target: The size to reach.
        scale: Enlargement of the network.
    """
    width, height = picture.width_px, picture.height_px
    is_possible = width * height <= MAX_INPUT_PIXELS and scale**2 * width * height <= MAX_OUTPUT_PIXELS
    return scale > 1 and is_possible and (width < target.width_px or height < target.height_px)


def enlarge(picture: Picture, width_px: int, height_px: int, upscaler: str = LANCZOS) -> Picture:
    """Return ``picture`` at this size; one of another aspect ratio is cropped at its center.

    Args:
        picture: An RGB image.
        width_px: New width.
        height_px: New height.
        upscaler: One of ``FILTERS``.
    """
    if (picture.width_px, picture.height_px) == (width_px, height_px):
        return picture
    share = min(picture.width_px / width_px, picture.height_px / height_px)
    left, top = (picture.width_px - width_px * share) / 2, (picture.height_px - height_px * share) / 2
    box = (left, top, left + width_px * share, top + height_px * share)
    image = Image.fromarray(picture.array).resize((width_px, height_px), RESAMPLING[upscaler], box)
    return Picture.from_array(np.asarray(image, dtype=np.uint8))


def blend(first: Picture, second: Picture, share: float) -> Picture:
    """Mix two images of one size; ``share`` is that of the second, 0 to 1."""
    pixels = first.array.astype(np.float32) * (1 - share) + second.array.astype(np.float32) * share
    return Picture.from_array(np.rint(pixels).astype(np.uint8))


def upscale_label(name: str, scale: float) -> str:
    """Return the value of the infotext key ``Upscale``: name of the upscaler and enlargement."""
    return f"{name} x{scale:g}"


def with_upscale(infotext: str | None, label: str) -> str:
    """Add the key ``Upscale`` to the parameters of an image; after a second upscaling the last one names both."""
    text = (infotext or "").strip()
    fields = parse_infotext(text).fields
    steps = f"{fields[UPSCALE]}, {label}" if UPSCALE in fields else label
    value = json.dumps(steps, ensure_ascii=False) if any(mark in steps for mark in ",:\n") else steps
    pair = f"{UPSCALE}: {value}"
    if not text:
        return pair
    return f"{text}, {pair}" if fields else f"{text}\n{pair}"


def kind_of(report: ProvenanceReport) -> Kind | None:
    """Return the mark that an image already has: generated, composite, or None for an image without a mark."""
    if not report.is_generated:
        return None
    sources = [part.digital_source_type for part in (report.xmp, report.c2pa) if part is not None]
    is_marked = report.watermark is not None and report.watermark.kind == "composite"
    return "composite" if is_marked or DIGITAL_SOURCE_TYPES["composite"] in sources else "generated"

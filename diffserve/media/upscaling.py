"""Upscalers between the two passes of hires fix, by name: resize filters here; networks may be added by the engine."""

from __future__ import annotations

from typing import Final

import numpy as np
from PIL import Image

from diffserve.api.bounds import check
from diffserve.api.types import LANCZOS, Picture

NEAREST: Final = "nearest"
UPSCALERS: Final[dict[str, Image.Resampling]] = {
    LANCZOS: Image.Resampling.LANCZOS,
    NEAREST: Image.Resampling.NEAREST,
}
"""Resize filters by name."""


def canonical_upscaler(name: str) -> str | None:
    """Return the canonical name of an upscaler in any letter case, or ``None`` if there is none of that name."""
    return name.strip().lower() if name.strip().lower() in UPSCALERS else None


def check_upscaler(name: str) -> str:
    """Return the canonical name of an upscaler.

    Raises:
        InvalidRequest: There is no upscaler of that name.
    """
    found = canonical_upscaler(name)
    message = f"hires_upscaler is {name[:80]!r}; it must be one of {', '.join(UPSCALERS)}."
    check(found is not None, message, "hires_upscaler", "unknown_upscaler")
    return found or LANCZOS


def enlarge(picture: Picture, width_px: int, height_px: int, upscaler: str = LANCZOS) -> Picture:
    """Return ``picture`` at this size; one of another aspect ratio is cropped at its center.

    Args:
        picture: An RGB image.
        width_px: New width.
        height_px: New height.
        upscaler: A name in ``UPSCALERS``.
    """
    if (picture.width_px, picture.height_px) == (width_px, height_px):
        return picture
    share = min(picture.width_px / width_px, picture.height_px / height_px)
    left, top = (picture.width_px - width_px * share) / 2, (picture.height_px - height_px * share) / 2
    box = (left, top, left + width_px * share, top + height_px * share)
    image = Image.fromarray(picture.array).resize((width_px, height_px), UPSCALERS[upscaler], box)
    return Picture.from_array(np.asarray(image, dtype=np.uint8))

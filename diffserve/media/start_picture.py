"""Input images of img2img and inpainting: size planning, resizing, and compositing of the result with the original."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
import numpy as np
from PIL import Image, ImageFilter

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.sizes import MAX_SIDE_PX, MIN_SIDE_PX, SizePlan, plan_size
from diffserve.api.types import ModelInfo, Picture
from diffserve.media.images import resize, stretch

FEATHER: Final = 4 / 512
"""Blur radius of the mask edge, as a fraction of the shorter side; A1111 uses 4 pixels of 512."""


BAND: Final = 1 / 32
"""Width of the band in which outpainting blends old and new pixels, as a fraction of the shorter side of the canvas."""

MIN_BAND_PX: Final = 8
FILL_NOISE: Final = 24.0
"""Standard deviation of the noise in the area that outpainting adds, of 255."""

MAX_MARGIN_PX: Final = 2048
_MARGINS: Final = re.compile(r"\s*([0-9]{1,6})\s*,\s*([0-9]{1,6})\s*,\s*([0-9]{1,6})\s*,\s*([0-9]{1,6})\s*")


def read_margins(text: str) -> tuple[int, int, int, int]:
    """Parse ``outpaint``, "LEFT,TOP,RIGHT,BOTTOM" in pixels.

    Raises:
        InvalidRequest: The text is something else, all margins are 0, or one is above ``MAX_MARGIN_PX``.
    """
    match = _MARGINS.fullmatch(text)
    advice = "write LEFT,TOP,RIGHT,BOTTOM in pixels, for example 0,0,128,0"
    if match is None:
        raise InvalidRequest(f"outpaint is {text[:40]!r}; {advice}.", param="outpaint")
    left, top, right, bottom = map(int, match.groups())
    margins = left, top, right, bottom
    is_inside = 0 < max(margins) <= MAX_MARGIN_PX
    check(is_inside, f"outpaint is {text[:40]!r}; give at least one margin, of at most {MAX_MARGIN_PX} px.", "outpaint")
    return margins


def check_large_enough(picture: Picture, name: str) -> None:
    """Check that both sides of ``picture`` have at least ``MIN_SIDE_PX`` pixels.

    Raises:
        InvalidRequest: A side is too short. The error names the parameter ``name``.
    """
    message = f"{name} is {picture.width_px}x{picture.height_px}; each side must have at least {MIN_SIDE_PX} pixels."
    check(min(picture.width_px, picture.height_px) >= MIN_SIDE_PX, message, name, "image_too_small")


class StartPicture(msgspec.Struct, frozen=True, kw_only=True):
    """Input image and, for inpainting, a mask of the same size.

    Attributes:
        picture: The input image.
        mask: Mask with 255 for pixels to repaint; ``None`` to repaint all of them.
        names: Names of image and mask in errors.
        feather_px: Blur radius of the mask edge, in pixels of the result; ``None`` for ``FEATHER`` of its shorter side.
        region: Left, top, right and bottom in pixels of the part to generate, which is then pasted into the image.
    """

    picture: Picture
    mask: Picture | None = None
    names: tuple[str, str] = ("image", "mask")
    feather_px: float | None = None
    region: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.mask is None:
            return
        sizes = [(item.width_px, item.height_px) for item in (self.picture, self.mask)]
        (width, height), (mask_width, mask_height) = sizes
        image, mask = self.names
        message = f"{mask} is {mask_width}x{mask_height} and {image} {width}x{height}; they must have the same size."
        check(sizes[0] == sizes[1], message, mask, "invalid_image")
        check(255 in self.mask.data, f"the {mask} selects no area to generate; mark some of it.", mask)

    def plan(
        self,
        info: ModelInfo,
        size: tuple[int, int] | None,
        *,
        min_side_px: int = MIN_SIDE_PX,
        max_side_px: int = MAX_SIDE_PX,
        may_shrink: bool = False,
        is_tiled: bool = False,
    ) -> SizePlan:
        """Plan the size at which the image is generated.

        Args:
            info: The model.
            size: Width and height of the delivered image; ``None`` for the size of the input image.
            min_side_px: Minimum length of a side.
            max_side_px: Maximum length of a side.
            may_shrink: Whether to scale an input image into these limits; ``size`` is never changed.
            is_tiled: See ``plan_size``.

        Raises:
            InvalidRequest: The size is outside the limits.
        """
        plan = partial(
            plan_size, info, min_side_px=min_side_px, max_side_px=max_side_px, may_pad=False, is_tiled=is_tiled
        )
        if size is not None:
            return plan(size)
        size = self.picture.width_px, self.picture.height_px
        if may_shrink:
            size = _fit_within(*size, min_side_px, max_side_px)
        try:
            return plan(size)
        except InvalidRequest as error:
            name = self.names[0]
            raise InvalidRequest(f"of {name}, the {error.message} Give another size.", param=name) from None

    def fitted(self, width_px: int, height_px: int) -> tuple[Picture, Picture | None]:
        """Return image and mask, or the region of both, resized to this size and cropped to its aspect ratio."""
        mask = None if self.mask is None else resize(self._crop_region(self.mask), width_px, height_px)
        return resize(self._crop_region(self.picture), width_px, height_px), mask

    def around_mask(self, aspect: float, padding_px: int) -> StartPicture:
        """Return a copy whose region is the bounding box of the mask; without a mask, return ``self``.

        Args:
            aspect: Aspect ratio (width / height) to which the region is extended, as far as the image allows.
            padding_px: Margin around the mask.
        """
        if self.mask is None:
            return self
        rows, columns = np.nonzero(self.mask.array.max(axis=1))[0], np.nonzero(self.mask.array.max(axis=0))[0]
        horizontal = _grow(columns[0] - padding_px, columns[-1] + 1 + padding_px, 0, self.picture.width_px)
        vertical = _grow(rows[0] - padding_px, rows[-1] + 1 + padding_px, 0, self.picture.height_px)
        width, height = horizontal[1] - horizontal[0], vertical[1] - vertical[0]
        horizontal = _grow(*horizontal, round(height * aspect), self.picture.width_px)
        vertical = _grow(*vertical, round(width / aspect), self.picture.height_px)
        region = (horizontal[0], vertical[0], horizontal[1], vertical[1])
        return msgspec.structs.replace(self, region=region)

    def extended(self, margins: tuple[int, int, int, int]) -> StartPicture:
        """Return a copy on a larger canvas whose new area is to be generated (outpainting).

        The new area has the colors of the nearest edge, with Gaussian noise of ``FILL_NOISE``. The mask is that area,
        an equal band inside the edges that are extended, in which the old and the new blend, and the mask of ``self``.

        Args:
            margins: Pixels to add on the left, at the top, on the right and at the bottom.
        """
        left, top, right, bottom = margins
        sides = ((top, bottom), (left, right))
        pixels = np.pad(self.picture.array, (*sides, (0, 0)), mode="edge").astype(np.float32)
        height, width = pixels.shape[:2]
        band = max(MIN_BAND_PX, math.ceil(BAND * min(width, height)))
        inner = np.zeros((height, width), np.uint8)  # 255 inside the old picture
        inner[top : height - bottom, left : width - right] = 255
        old_area = inner.copy()
        old_area[: top + band] *= not top
        old_area[height - bottom - band :] *= not bottom
        old_area[:, : left + band] *= not left
        old_area[:, width - right - band :] *= not right
        noise = np.random.default_rng(0).normal(0.0, FILL_NOISE, pixels.shape).astype(np.float32)
        filled = np.where(inner[..., None] > 0, pixels, np.rint(pixels + noise).clip(0, 255)).astype(np.uint8)
        mask = 255 - old_area
        if self.mask is not None:
            mask = np.maximum(mask, np.pad(self.mask.array, sides))
        return msgspec.structs.replace(self, picture=Picture.from_array(filled), mask=Picture.from_array(mask))

    def _crop_region(self, picture: Picture) -> Picture:
        if self.region is None:
            return picture
        left, top, right, bottom = self.region
        return Picture.from_array(picture.array[top:bottom, left:right])

    def lay_around(self, painted: Picture, mark: Callable[[Picture], Picture] = lambda picture: picture) -> Picture:
        """Composite ``painted`` with the input image, which stays byte-identical outside the mask.

        Args:
            painted: The generated image.
            mark: Applied to the generated pixels before compositing, such as a watermark.
        """
        if self.mask is None:
            return mark(painted)
        original, mask = self.picture, self.mask
        if self.region is None:
            original, resized_mask = self.fitted(painted.width_px, painted.height_px)
            mask = resized_mask or mask
        else:
            left, top, right, bottom = self.region
            pixels = original.array.copy()
            pixels[top:bottom, left:right] = stretch(painted, right - left, bottom - top).array
            painted = Picture.from_array(pixels)
        painted = mark(painted)
        width, height = painted.width_px, painted.height_px
        radius = FEATHER * min(width, height) if self.feather_px is None else self.feather_px
        blurred_mask = Image.fromarray(mask.array).filter(ImageFilter.GaussianBlur(radius))
        alpha = np.minimum(np.asarray(blurred_mask, dtype=np.uint8), mask.array)  # nothing changes outside the mask
        layers = (Image.fromarray(array) for array in (painted.array, original.array, alpha))
        return Picture.from_array(np.asarray(Image.composite(*layers), dtype=np.uint8))


def _grow(low: int, high: int, length: int, end: int) -> tuple[int, int]:
    """Clip the range low .. high to 0 .. end and extend it on both sides to ``length`` if there is room."""
    low, high = max(0, int(low)), min(end, int(high))
    missing = min(length, end) - (high - low)
    if missing > 0:
        low = max(0, min(low - missing // 2, end - min(length, end)))
        high = low + min(length, end)
    return low, high


def _fit_within(width: int, height: int, low: int, high: int) -> tuple[int, int]:
    """Scale a size until its sides are between ``low`` and ``high``; sides that do not fit are clamped."""
    scale = 1.0
    if max(width, height) > high:
        scale = high / max(width, height)
    elif min(width, height) < low:
        scale = low / min(width, height)
    return tuple(min(max(math.floor(side * scale + 0.5), low), high) for side in (width, height))  # type: ignore[return-value]

"""A picture that somebody starts from: read, planned, brought to the size that is painted, and laid around the result.
For every door."""

from __future__ import annotations

import math
from collections.abc import Callable
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
"""Radius of the edge where painted goes over into kept, as a share of the shorter side; A1111 has 4 pixels of 512."""


def check_large_enough(picture: Picture, name: str) -> None:
    """InvalidRequest where a side of ``picture`` has too few pixels to begin from."""
    said = f"{name} is {picture.width_px}x{picture.height_px}; each side must have at least {MIN_SIDE_PX} pixels."
    check(min(picture.width_px, picture.height_px) >= MIN_SIDE_PX, said, name, "image_too_small")


class StartPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture and, where only a part of it is repainted, the mask of that part (255: repaint), of the same size.

    names    what errors call the two
    feather  radius of the mask's soft edge, in pixels of the result; ``None``: by its size
    region   (left, top, right, bottom) in pixels: that part alone is painted, and laid back into all of the picture
    """

    picture: Picture
    mask: Picture | None = None
    names: tuple[str, str] = ("image", "mask")
    feather_px: float | None = None
    region: tuple[int, int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.mask is None:
            return
        sizes = [(one.width_px, one.height_px) for one in (self.picture, self.mask)]
        (width, height), (mask_width, mask_height) = sizes
        image, mask = self.names
        said = f"{mask} is {mask_width}x{mask_height} and {image} {width}x{height}; they must have the same size."
        check(sizes[0] == sizes[1], said, mask, "invalid_image")
        check(255 in self.mask.data, f"the {mask} leaves nothing to repaint; nothing of it is marked.", mask)

    def plan(
        self,
        info: ModelInfo,
        size: tuple[int, int] | None,
        *,
        min_side_px: int = MIN_SIDE_PX,
        max_side_px: int = MAX_SIDE_PX,
        may_shrink: bool = False,
    ) -> SizePlan:
        """Where it is painted to be delivered at ``size``, its own unless given; ``may_shrink``: and where that is out
        of bounds, the nearest of its aspect within them. Raises InvalidRequest."""
        if size is not None:
            return plan_size(info, size, min_side_px=min_side_px, max_side_px=max_side_px, may_pad=False)
        size = self.picture.width_px, self.picture.height_px
        if may_shrink:
            size = _within(*size, min_side_px, max_side_px)
        try:
            return plan_size(info, size, min_side_px=min_side_px, max_side_px=max_side_px, may_pad=False)
        except InvalidRequest as error:
            name = self.names[0]
            raise InvalidRequest(f"of {name}, the {error.message} Give another size.", param=name) from None

    def fitted(self, width_px: int, height_px: int) -> tuple[Picture, Picture | None]:
        """Picture and mask, or the region of both, at that size, what is too much at the sides cut off."""
        mask = None if self.mask is None else resize(self._part(self.mask), width_px, height_px)
        return resize(self._part(self.picture), width_px, height_px), mask

    def around_mask(self, aspect: float, padding_px: int) -> StartPicture:
        """The same with the region that its mask lies in, with ``padding_px`` around that, grown towards ``aspect``
        (width / height) as far as the picture goes; without a mask as it is."""
        if self.mask is None:
            return self
        rows, columns = np.nonzero(self.mask.array.max(axis=1))[0], np.nonzero(self.mask.array.max(axis=0))[0]
        across = _grown(columns[0] - padding_px, columns[-1] + 1 + padding_px, 0, self.picture.width_px)
        along = _grown(rows[0] - padding_px, rows[-1] + 1 + padding_px, 0, self.picture.height_px)
        width, height = across[1] - across[0], along[1] - along[0]
        across = _grown(*across, round(height * aspect), self.picture.width_px)
        along = _grown(*along, round(width / aspect), self.picture.height_px)
        return msgspec.structs.replace(self, region=(across[0], along[0], across[1], along[1]))

    def _part(self, picture: Picture) -> Picture:
        if self.region is None:
            return picture
        left, top, right, bottom = self.region
        return Picture.from_array(picture.array[top:bottom, left:right])

    def lay_around(self, painted: Picture, mark: Callable[[Picture], Picture] = lambda picture: picture) -> Picture:
        """``painted``, and where the mask says that nothing is repainted, what was there before, to the byte.

        ``mark``: what is done to the painted pixels at the size that is delivered, and to no others.
        """
        if self.mask is None:
            return mark(painted)
        before, mask = self.picture, self.mask
        if self.region is None:
            before, whole_mask = self.fitted(painted.width_px, painted.height_px)
            mask = whole_mask or mask
        else:
            left, top, right, bottom = self.region
            whole = before.array.copy()
            whole[top:bottom, left:right] = stretch(painted, right - left, bottom - top).array
            painted = Picture.from_array(whole)
        painted = mark(painted)
        width, height = painted.width_px, painted.height_px
        radius = FEATHER * min(width, height) if self.feather_px is None else self.feather_px
        soft = Image.fromarray(mask.array).filter(ImageFilter.GaussianBlur(radius))
        shares = np.minimum(np.asarray(soft, dtype=np.uint8), mask.array)  # outside the mask nothing changes
        over = Image.composite(Image.fromarray(painted.array), Image.fromarray(before.array), Image.fromarray(shares))
        return Picture.from_array(np.asarray(over, dtype=np.uint8))


def _grown(low: int, high: int, length: int, end: int) -> tuple[int, int]:
    """low .. high within 0 .. end, grown on both sides to ``length`` where there is room."""
    low, high = max(0, int(low)), min(end, int(high))
    missing = min(length, end) - (high - low)
    if missing > 0:
        low = max(0, min(low - missing // 2, end - min(length, end)))
        high = low + min(length, end)
    return low, high


def _within(width: int, height: int, low: int, high: int) -> tuple[int, int]:
    """width x height, grown or shrunk until its sides lie within; a picture too long for both is cut."""
    scale = 1.0
    if max(width, height) > high:
        scale = high / max(width, height)
    elif min(width, height) < low:
        scale = low / min(width, height)
    return tuple(min(max(math.floor(side * scale + 0.5), low), high) for side in (width, height))  # type: ignore[return-value]

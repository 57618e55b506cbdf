"""Tiled execution of an upscaler: one tile at a time, with overlap, so that large images fit into memory.

A tile is a core of the image with a margin around it. If the margin covers the network's receptive field, the result
equals that of the image in one piece up to rounding. Networks with larger fields get a margin of ``MAX_CONTEXT_PX``,
which bounds the error. Results of neighboring tiles are blended linearly across the border of their cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_CONTEXT_PX: Final = 32
BLEND_PX: Final = 4
"""Half the width of the stripe, in input pixels, across which two tiles are blended."""

MIN_CORE_PX: Final = 32
MAX_CORE_PX: Final = 1024

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]
Enlarge = Callable[[Floats], Floats]
"""Enlarges (h, w, 3) in 0..1 to (scale h, scale w, 3), not clamped."""


class Span(NamedTuple):
    """One tile along an axis: the core ``start`` to ``end``, and ``low`` to ``high`` with its margins."""

    start: int
    end: int
    low: int
    high: int


@dataclass(frozen=True)
class TilePlan:
    """How an image is cut into tiles.

    Attributes:
        core_px: Side of a core.
        margin_px: Margin around a core, where the image has so much.
        scale: Enlargement.
    """

    core_px: int
    margin_px: int
    scale: int

    @classmethod
    def of(cls, *, receptive_px: int, multiple_px: int, scale: int, max_tile_pixels: int) -> TilePlan:
        """Plan tiles for a network.

        Args:
            receptive_px: Pixels on each side that a result depends on.
            multiple_px: Tiles begin at multiples of it.
            scale: Enlargement of the network.
            max_tile_pixels: Input pixels of a tile, with its margins, that one call should have at most; it may have
                more, because cores have at least ``MIN_CORE_PX`` a side.
        """
        margin = _round_up(min(receptive_px, MAX_CONTEXT_PX) + BLEND_PX, multiple_px)
        core = min(MAX_CORE_PX, max(MIN_CORE_PX, int(max_tile_pixels**0.5) - 2 * margin))
        return cls(_round_up(core, multiple_px), margin, scale)

    def spans(self, length: int) -> list[Span]:
        """Cut an axis of ``length`` pixels; the last core may be longer than the others by half of the smallest one."""
        if length <= self.core_px + 2 * self.margin_px:  # as large as an inner tile: in one piece
            return [Span(0, length, 0, length)]
        starts = range(0, length - MIN_CORE_PX // 2, self.core_px)
        ends = [*starts[1:], length]
        return [
            Span(start, end, max(0, start - self.margin_px), min(length, end + self.margin_px))
            for start, end in zip(starts, ends, strict=True)
        ]


class TiledImage:
    """An image that is enlarged tile by tile.

    Attributes:
        plan: How it is cut into tiles.
        num_tiles: Number of tiles.
        num_done: Number of finished tiles.
    """

    def __init__(self, pixels: Pixels, plan: TilePlan) -> None:
        """Prepare the tiles of ``pixels`` (H, W, 3)."""
        height, width = pixels.shape[:2]
        self._pixels, self.plan = pixels, plan
        rows, columns = plan.spans(height), plan.spans(width)
        self._tiles = [(row, column) for row in rows for column in columns]
        self._sum: Floats = np.zeros((plan.scale * height, plan.scale * width, 3), np.float32)
        self.num_tiles, self.num_done = len(self._tiles), 0

    @property
    def is_done(self) -> bool:
        """Whether all tiles are finished."""
        return self.num_done == self.num_tiles

    def run_next(self, enlarge: Enlarge) -> None:
        """Enlarge the next tile."""
        row, column = self._tiles[self.num_done]
        tile = self._pixels[row.low : row.high, column.low : column.high].astype(np.float32) / np.float32(255)
        large = enlarge(tile)
        scale = self.plan.scale
        height, width = self._pixels.shape[:2]
        down, across = self._weights(row, height), self._weights(column, width)
        spot = self._sum[scale * row.low : scale * row.high, scale * column.low : scale * column.high]
        spot += large * down[:, None, None] * across[None, :, None]
        self.num_done += 1

    def result(self) -> Pixels:
        """Return the enlarged image (scale H, scale W, 3)."""
        enlarged: Pixels = np.rint(self._sum.clip(0, 1) * 255).astype(np.uint8)
        return enlarged

    def _weights(self, span: Span, length: int) -> Floats:
        """Return the weight of each enlarged pixel from ``span.low`` to ``span.high``."""
        scale = self.plan.scale
        place = (np.arange(scale * (span.high - span.low)) + 0.5) / scale + span.low
        weight = np.ones(len(place))
        if span.start > 0:
            weight *= ((place - (span.start - BLEND_PX)) / (2 * BLEND_PX)).clip(0, 1)
        if span.end < length:
            weight *= ((span.end + BLEND_PX - place) / (2 * BLEND_PX)).clip(0, 1)
        return weight.astype(np.float32)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

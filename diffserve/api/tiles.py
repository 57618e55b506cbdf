"""Tiles of a large latent: where they lie, and how their predictions are blended (MultiDiffusion). No torch.

A tiled image runs the UNet on overlapping tiles, which are rows of the batch. The prediction for the latent is the
weighted mean of the tiles' predictions, and the sampler's step is made on the entire latent (Bar-Tal et al.,
"MultiDiffusion: Fusing Diffusion Paths for Controlled Image Generation", 2023, arXiv 2302.08113, equation 5).
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffserve.api.bounds import check
from diffserve.api.types import DiffusionParams, ModelInfo

MAX_TILES: Final = 1024
"""Tiles of an image at most."""

OVERLAP_SHARE: Final = 4
"""Without ``tile_overlap`` tiles overlap by one part in this many of their side."""


class TileLayout(msgspec.Struct, frozen=True, dict=True):
    """Overlapping tiles of equal size that cover a latent, in latent cells.

    Attributes:
        latent: (h, w) of the latent.
        tile: (h, w) of a tile.
        tops: Upper edge of each row of tiles.
        lefts: Left edge of each column of tiles.
        factor: Pixels per cell.
    """

    latent: tuple[int, int]
    tile: tuple[int, int]
    tops: tuple[int, ...]
    lefts: tuple[int, ...]
    factor: int

    @property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return len(self.tops) * len(self.lefts)

    @property
    def tile_px(self) -> tuple[int, int]:
        """Width and height of a tile in pixels."""
        return self.tile[1] * self.factor, self.tile[0] * self.factor

    @cached_property
    def corners(self) -> tuple[tuple[int, int], ...]:
        """Top and left cell of each tile, row by row; the index of a tile is its view in ``BatchRow``."""
        return tuple((top, left) for top in self.tops for left in self.lefts)

    def corner_px(self, view: int) -> tuple[int, int]:
        """Return the left and top pixel of tile ``view``."""
        top, left = self.corners[view]
        return left * self.factor, top * self.factor

    def slices(self, view: int) -> tuple[slice, slice]:
        """Return the rows and columns of tile ``view``, as indices of the last two dimensions of a latent."""
        top, left = self.corners[view]
        return slice(top, top + self.tile[0]), slice(left, left + self.tile[1])

    @cached_property
    def weights(self) -> NDArray[np.float32]:
        """Weights (num_tiles, tile h, tile w) of the tiles' predictions; in each cell of the latent they add up to 1.

        They fall from the middle of a tile to its edges as a raised cosine, so that no edge of a tile shows. At the
        edge of the latent there is only one tile, whose weight is 1.
        """
        height, width = self.tile
        ramps = [np.sin(np.pi * (np.arange(side) + 0.5) / side) ** 2 for side in (height, width)]
        ramp = np.outer(*ramps)  # (tile h, tile w)
        total = np.zeros(self.latent)
        for view in range(self.num_tiles):
            total[self.slices(view)] += ramp
        return np.stack([ramp / total[self.slices(view)] for view in range(self.num_tiles)]).astype(np.float32)


def tiles_of(
    params: DiffusionParams, info: ModelInfo, width_px: int, height_px: int, *, is_second: bool = False
) -> TileLayout | None:
    """Return the tiles of an image of this size, ``None`` for none.

    A second pass (hires fix) beyond the model's largest side has tiles of the native size, unless ``tile_size`` is 0.

    Raises:
        InvalidRequest: The tiles do not fit.
    """
    tile_px = params.tile_size
    if tile_px is None and is_second and max(width_px, height_px) > info.max_side_px:
        tile_px = min(info.good_sizes[0])
    if not tile_px:
        return None
    message = f"tile_size is {tile_px} px; this model allows at most {info.max_side_px} px per side."
    check(tile_px <= info.max_side_px, message, "tile_size")
    return plan_tiles(width_px, height_px, tile_px, params.tile_overlap, info.vae_factor, info.size_multiple_px)


@lru_cache(maxsize=256)
def plan_tiles(
    width_px: int, height_px: int, tile_px: int, overlap_px: int | None, factor: int, multiple_px: int
) -> TileLayout | None:
    """Plan the tiles of an image; ``None`` if one tile covers it.

    Args:
        width_px: Width of the image.
        height_px: Height of the image.
        tile_px: Side of a tile; along a shorter side of the image the tile is that long.
        overlap_px: Least overlap of neighboring tiles; ``None``: a quarter of ``tile_px``.
        factor: Pixels per latent cell.
        multiple_px: Tiles must be multiples of this.

    Raises:
        InvalidRequest: The tiles do not fit the model's grid, overlap too much, or are too many.
    """
    below = tile_px // multiple_px * multiple_px
    tries = " or ".join(str(side) for side in (below, below + multiple_px) if side > 0)
    check(
        tile_px == below,
        f"tile_size is {tile_px} px; it must be a multiple of {multiple_px}: try {tries}.",
        "tile_size",
    )
    overlap = min(tile_px // OVERLAP_SHARE, tile_px - factor) if overlap_px is None else overlap_px
    too_much = f"tile_overlap is {overlap} px; it must be less than tile_size, which is {tile_px}: give at most "
    too_much += f"{tile_px - factor}, or leave it out."
    check(overlap <= tile_px - factor, too_much, "tile_overlap")
    if width_px <= tile_px and height_px <= tile_px:
        return None
    cells = math.ceil(overlap / factor)
    sides = [side // factor for side in (height_px, width_px)]
    tile = [min(side, tile_px // factor) for side in sides]
    edges = [_edges(side, length, cells) for side, length in zip(sides, tile, strict=True)]
    layout = TileLayout((sides[0], sides[1]), (tile[0], tile[1]), edges[0], edges[1], factor)
    many = f"tile_size is {tile_px} px with an overlap of {overlap} px: that is {layout.num_tiles} tiles for "
    many += f"{width_px}x{height_px} px, and at most {MAX_TILES} are allowed; give larger tiles or less overlap."
    check(layout.num_tiles <= MAX_TILES, many, "tile_size")
    return layout


def _edges(side: int, tile: int, overlap: int) -> tuple[int, ...]:
    """Return the first cell of each tile along a side, evenly spaced, with at least ``overlap`` cells in common."""
    if side <= tile:
        return (0,)
    count = math.ceil((side - overlap) / (tile - overlap))
    return tuple(round(index * (side - tile) / (count - 1)) for index in range(count))

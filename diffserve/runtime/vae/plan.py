"""Plan for decoding latents: dtype, images per call, and tiling."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

BFLOAT16_CAPABILITY: Final = (8, 0)
"""NVIDIA GPUs have bfloat16 matrix units from this compute capability (Ampere) on."""

TILE_SHARES: Final = (5 / 8, 3 / 8, 1 / 4)
"""Sides of a tile in shares of the whole: less than half of the memory at first, then a seventh, then a sixteenth."""

MIN_TILE_CELLS: Final = 8
"""Latent cells along a side of the smallest tile."""


class DecodePlan(NamedTuple):
    """How latents of one size are decoded.

    images_per_call  how many images share a call
    tile_share       side of a tile in shares of the image's side; 1.0: the image is decoded whole
    """

    images_per_call: int
    tile_share: float


def vae_dtype(dtype: torch.dtype, capability: tuple[int, int] | None, *, overflows: bool) -> torch.dtype:
    """Return the dtype of the VAE of a model that computes in ``dtype``.

    No VAE overflows in bfloat16, which has the range of float32.

    Args:
        dtype: What the model computes in.
        capability: Compute capability of its NVIDIA GPU; ``None`` on other devices.
        overflows: Whether activations of this VAE are too large for float16, as those of SDXL's are.
    """
    if not overflows or dtype != torch.float16:
        return dtype
    return torch.bfloat16 if capability is not None and capability >= BFLOAT16_CAPABILITY else torch.float32


def plan_decode(num_images: int, height: int, width: int, *, most_cells: int, tile_share: float = 1.0) -> DecodePlan:
    """Plan the decoding of ``num_images`` latents of (``height``, ``width``) cells.

    Args:
        num_images: How many images may share a call.
        height: Cells along the side.
        width: Cells along the top.
        most_cells: How many cells the free memory lets one call decode.
        tile_share: Largest side of a tile that the configuration allows; smaller ones are chosen where memory is short.
    """
    smaller = (share for share in TILE_SHARES if share < tile_share)
    shares = (tile_share, *smaller)
    share = next((share for share in shares if tile_cells(height, width, share) <= most_cells), shares[-1])
    fitting = most_cells // tile_cells(height, width, share)
    return DecodePlan(max(1, min(num_images, fitting)), share)


def tile_cells(height: int, width: int, share: float) -> int:
    """Return the number of cells in a tile of latents of (``height``, ``width``) cells."""
    return math.prod(min(side, tile_side(side, share)) for side in (height, width))


def tile_side(num_cells: int, share: float) -> int:
    """Return the cells along the side of a tile, for a side of ``num_cells``."""
    return max(MIN_TILE_CELLS, -int(-num_cells * share // 1))

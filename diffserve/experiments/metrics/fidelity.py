"""How near one picture is to another: latent RMSE, PSNR and SSIM. PSNR has no other home; only SSIM loads torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BEST_PSNR_DB = 99.0
"""What equal pictures count as, so that a mean over pictures stays a number."""

MIN_SIDE_PX = 11  # the window of SSIM


def latent_rmse(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Root of the mean squared difference of latents (C, h, w) of one shape, in their own units."""
    return float(np.sqrt(_mean_squared(one, other)))


def psnr_db(one: NDArray[np.generic], other: NDArray[np.generic], *, peak: float = 255.0) -> float:
    """10 log10(peak^2 / mean squared difference) of pictures of one shape in decibels, at most ``BEST_PSNR_DB``."""
    squared = _mean_squared(one, other)
    return BEST_PSNR_DB if squared == 0 else min(BEST_PSNR_DB, 10 * float(np.log10(peak**2 / squared)))


def ssim(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """SSIM of pictures (H, W, 3), up to 1, by torchmetrics.

    Wang et al. 2004, Gaussian window of 11 x 11 with sigma 1.5, edges mirrored, averaged over pixels and colours.
    Raises ValueError for pictures of different shapes, or smaller than the window.
    """
    if one.shape != other.shape:
        raise _unequal(one, other)
    if min(one.shape[:2]) < MIN_SIDE_PX:
        raise ValueError(f"SSIM needs pictures of {MIN_SIDE_PX} pixels a side, not {one.shape[:2]}")
    import torch

    from diffserve.runtime.loading.library_imports import hushed

    with hushed("transformers"):
        from torchmetrics.functional.image import structural_similarity_index_measure

    def to_image(pixels: NDArray[np.uint8]) -> torch.Tensor:
        """(1, 3, H, W) in float32: float64 moves SSIM by 3e-4 at most and takes ten times as long."""
        return torch.from_numpy(np.array(pixels, copy=True)).permute(2, 0, 1)[None].float()

    value = structural_similarity_index_measure(to_image(one), to_image(other), data_range=255.0)
    assert isinstance(value, torch.Tensor)
    return float(value)


def _mean_squared(one: NDArray[np.generic], other: NDArray[np.generic]) -> float:
    if one.shape != other.shape:
        raise _unequal(one, other)
    return float(np.mean(np.square(one.astype(np.float64) - other.astype(np.float64))))


def _unequal(one: NDArray[np.generic], other: NDArray[np.generic]) -> ValueError:
    return ValueError(f"a picture {one.shape} cannot be held against one of {other.shape}")

"""Distances between two images: latent RMSE, PSNR and SSIM; only SSIM imports torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BEST_PSNR_DB = 99.0
"""PSNR of equal images, which keeps means finite."""

MIN_SIDE_PX = 11  # window size of SSIM


def latent_rmse(latents: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Compute the root mean squared difference of two latents (C, h, w) of the same shape."""
    return float(np.sqrt(_mean_squared(latents, other)))


def psnr_db(image: NDArray[np.generic], other: NDArray[np.generic], *, peak: float = 255.0) -> float:
    """Compute the PSNR of two images of the same shape in decibels, at most ``BEST_PSNR_DB``."""
    # not torchmetrics, whose values are the same: the page computes PSNR in a process without torch
    squared = _mean_squared(image, other)
    return BEST_PSNR_DB if squared == 0 else min(BEST_PSNR_DB, 10 * float(np.log10(peak**2 / squared)))


def ssim(image: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Compute the SSIM of two images (H, W, 3) with torchmetrics; equal images have 1.

    Follows Wang et al. 2004 with an 11 x 11 Gaussian window of sigma 1.5 and mirrored edges, averaged over pixels and
    color channels.

    Raises:
        ValueError: The images differ in shape or are smaller than the window.
    """
    if image.shape != other.shape:
        raise _unequal(image, other)
    if min(image.shape[:2]) < MIN_SIDE_PX:
        raise ValueError(f"SSIM needs images of at least {MIN_SIDE_PX} pixels per side, got {image.shape[:2]}")
    import torch

    from diffserve.runtime.loading.library_imports import hushed

    with hushed("transformers"):
        from torchmetrics.functional.image import structural_similarity_index_measure

    def to_image(pixels: NDArray[np.uint8]) -> torch.Tensor:
        """Convert to (1, 3, H, W) float32; float64 changes SSIM by at most 3e-4 and takes ten times as long."""
        return torch.from_numpy(np.array(pixels, copy=True)).permute(2, 0, 1)[None].float()

    value = structural_similarity_index_measure(to_image(image), to_image(other), data_range=255.0)
    assert isinstance(value, torch.Tensor)
    return float(value)


def _mean_squared(first: NDArray[np.generic], other: NDArray[np.generic]) -> float:
    if first.shape != other.shape:
        raise _unequal(first, other)
    return float(np.mean(np.square(first.astype(np.float64) - other.astype(np.float64))))


def _unequal(first: NDArray[np.generic], other: NDArray[np.generic]) -> ValueError:
    return ValueError(f"cannot compare images of shapes {first.shape} and {other.shape}; give images of one shape")

"""How near one picture is to another: latent RMSE, PSNR and SSIM; the last two are torchmetrics'."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffserve.experiments.metrics.library import peak_signal_noise_ratio, structural_similarity_index_measure

PEAK = 255.0
BEST_PSNR_DB = 99.0
"""What equal pictures count as, so that a mean over pictures stays a number."""

MIN_SIDE_PX = 11  # the window of SSIM


class Fidelity(NamedTuple):
    """latent_rmse in units of the latents; psnr_db in decibels, at most ``BEST_PSNR_DB``; ssim up to 1."""

    latent_rmse: float
    psnr_db: float
    ssim: float


@torch.inference_mode()
def fidelity(
    pixels: NDArray[np.uint8],
    latents: NDArray[np.float32],
    converged_pixels: NDArray[np.uint8],
    converged_latents: NDArray[np.float32],
) -> Fidelity:
    """How near a picture (H, W, 3) with its final latents (C, h, w) is to the converged one of the same shapes.

    PSNR: 10 log10(255^2 / mean squared difference). SSIM: Wang et al. 2004, Gaussian window of 11 x 11 with sigma 1.5,
    edges mirrored, averaged over pixels and colours. Raises ValueError for pictures of different shapes, or smaller
    than the window.
    """
    if pixels.shape != converged_pixels.shape or latents.shape != converged_latents.shape:
        raise ValueError(f"a picture {pixels.shape} cannot be held against one of {converged_pixels.shape}")
    rmse = float(np.sqrt(np.mean(np.square(latents.astype(np.float64) - converged_latents))))
    painted, target = _to_image(pixels), _to_image(converged_pixels)
    return Fidelity(rmse, _psnr(painted, target), _ssim(painted, target))


def _psnr(painted: Tensor, target: Tensor) -> float:
    return min(BEST_PSNR_DB, float(peak_signal_noise_ratio(painted, target, data_range=PEAK)))


def _ssim(painted: Tensor, target: Tensor) -> float:
    if min(painted.shape[-2:]) < MIN_SIDE_PX:
        raise ValueError(f"SSIM needs pictures of {MIN_SIDE_PX} pixels a side, not {tuple(painted.shape[-2:])}")
    value = structural_similarity_index_measure(painted, target, data_range=PEAK)
    assert isinstance(value, Tensor)
    return float(value)


def _to_image(pixels: NDArray[np.uint8]) -> Tensor:
    """(1, 3, H, W) in 0..255, float32: float64 moves SSIM by 3e-4 at most and takes ten times as long."""
    return torch.from_numpy(np.array(pixels, copy=True)).permute(2, 0, 1)[None].float()

"""Update of latents by table rows, for batches that mix samplers, step counts and noise schedules.

All functions only add and multiply tensors elementwise in a fixed order, without branches on values. The result of a
latent is therefore bitwise independent of the other latents in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedulers.table import COLUMNS, HISTORY, NUM_COLUMNS, StepTable

__all__ = ["HISTORY", "NUM_COLUMNS", "advance", "guide", "new_history", "renoise", "rows_of", "scale_input"]

_COLUMN_INDEX = {name: index for index, name in enumerate(COLUMNS)}


def _column(rows: Tensor, name: str) -> Tensor:
    return rows[:, _COLUMN_INDEX[name]].reshape(-1, 1, 1, 1)


def rows_of(table: StepTable, device: torch.device | str = "cpu") -> Tensor:
    """Return the rows of a table as a float32 tensor (num_rows, NUM_COLUMNS) on ``device``."""
    return torch.tensor(table.packed, device=device)


def new_history(x: Tensor) -> Tensor:
    """Return an empty history, zeros (B, HISTORY, C, h, w), for latents ``x`` (B, C, h, w).

    A history that is reused for another image must be set to zero again.
    """
    return x.new_zeros((x.shape[0], HISTORY, *x.shape[1:]))


def scale_input(x: Tensor, rows: Tensor) -> Tensor:
    """Scale latents to the network input.

    Args:
        x: Latents (B, C, h, w) in sigma coordinates.
        rows: One table row per latent, (B, NUM_COLUMNS).
    """
    return x * _column(rows, "c_in")


def guide(uncond: Tensor, cond: Tensor, scale: Tensor) -> Tensor:
    """Apply classifier-free guidance, uncond + scale * (cond - uncond) (Ho & Salimans 2022).

    Args:
        uncond: Network output (B, C, h, w) for the negative prompt.
        cond: Network output (B, C, h, w) for the prompt.
        scale: Guidance scales (B,).
    """
    return uncond + scale.reshape(-1, 1, 1, 1) * (cond - uncond)


def rescale_guided(guided: Tensor, cond: Tensor, share: float) -> Tensor:
    """Rescale a guided output toward the standard deviation of the conditional output.

    This avoids overexposed images with strong guidance, in particular at zero terminal SNR (Lin et al. 2023, arXiv
    2305.08891, section 3.4).

    Args:
        guided: Output (C, h, w) of :func:`guide` for one latent.
        cond: Network output (C, h, w) for the prompt.
        share: Weight of the rescaled output, from 0 (unchanged) to 1.
    """
    return share * (guided * (cond.std() / guided.std())) + (1.0 - share) * guided


def advance(
    x: Tensor, model_output: Tensor, history: Tensor, noise: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance each latent of a batch by one row of its table.

    Args:
        x: Latents (B, C, h, w) in sigma coordinates, float32.
        model_output: Network output (B, C, h, w), after guidance.
        history: Earlier pushed values (B, HISTORY, C, h, w), newest first.
        noise: Fresh noise (B, C, h, w). Latents whose row has n = 0 may pass any finite values, such as zeros.
        rows: One table row per latent, (B, NUM_COLUMNS), float32.

    Returns:
        The next latents and the denoised estimates, both (B, C, h, w), and the next history.
    """
    denoised = _column(rows, "c_skip") * x + _column(rows, "c_out") * model_output
    x_next = _column(rows, "a") * x + _column(rows, "b0") * denoised
    for back in range(HISTORY):
        x_next = x_next + _column(rows, f"b{back + 1}") * history[:, back]
    x_next = x_next + _column(rows, "n") * noise
    pushed = _column(rows, "hx") * x + _column(rows, "hd") * denoised
    return x_next, denoised, torch.cat([pushed.unsqueeze(1), history[:, :-1]], dim=1)


def renoise(latents: Tensor, noise: Tensor, rows: Tensor) -> Tensor:
    """Add noise to clean latents up to the noise level after each row: latents + sigma_next * noise.

    Inpainting with a 4-channel network replaces the area outside the mask by the result after every row.

    Args:
        latents: Clean latents (B, C, h, w).
        noise: Standard normal noise (B, C, h, w).
        rows: One table row per latent, (B, NUM_COLUMNS).
    """
    return latents + _column(rows, "sigma_next") * noise

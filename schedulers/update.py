"""The one place that touches latents: a fused, branch-free update of a batch whose rows share nothing but their shape.

Only additions and multiplications of whole tensors, in a fixed order: a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from schedulers.table import COLUMNS, HISTORY, NUM_COLUMNS, StepTable

__all__ = ["HISTORY", "NUM_COLUMNS", "advance", "guide", "new_history", "renoise", "rows_of", "scale_input"]

_AT = {name: index for index, name in enumerate(COLUMNS)}


def _column(rows: Tensor, name: str) -> Tensor:
    return rows[:, _AT[name]].reshape(-1, 1, 1, 1)


def rows_of(table: StepTable, device: torch.device | str = "cpu") -> Tensor:
    """``table.packed`` as a float32 tensor (num_rows, NUM_COLUMNS) on ``device``; index it by row number."""
    return torch.tensor(table.packed, device=device)


def new_history(x: Tensor) -> Tensor:
    """Zeros (B, HISTORY, C, h, w) for latents (B, C, h, w). A lane that changes hands must be zeroed again."""
    return x.new_zeros((x.shape[0], HISTORY, *x.shape[1:]))


def scale_input(x: Tensor, rows: Tensor) -> Tensor:
    """What the network sees, (B, C, h, w), of latents ``x`` (B, C, h, w) in sigma coordinates at ``rows`` (B, K)."""
    return x * _column(rows, "c_in")


def guide(uncond: Tensor, cond: Tensor, scale: Tensor) -> Tensor:
    """Classifier-free guidance, uncond + scale * (cond - uncond): both (B, C, h, w), ``scale`` (B,). Ho et al. 2022."""
    return uncond + scale.reshape(-1, 1, 1, 1) * (cond - uncond)


def rescale_guided(guided: Tensor, cond: Tensor, share: float) -> Tensor:
    """``share`` of the way from ``guided`` to what has the standard deviation of ``cond``, for one latent (C, h, w):
    strong guidance burns pictures out otherwise, most of all at zero terminal SNR. Lin et al. 2023, arXiv 2305.08891,
    section 3.4."""
    return share * (guided * (cond.std() / guided.std())) + (1.0 - share) * guided


def advance(
    x: Tensor, model_output: Tensor, history: Tensor, noise: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One row of its own table for each latent of a mixed batch.

    x, model_output, noise (B, C, h, w) float32; history (B, HISTORY, C, h, w), newest first; rows (B, K) float32.
    ``noise`` is read where the row's n is not 0; elsewhere it must only be finite (zeros will do).
    Returns x_next and denoised, both (B, C, h, w), and the next history.
    """
    denoised = _column(rows, "c_skip") * x + _column(rows, "c_out") * model_output
    x_next = _column(rows, "a") * x + _column(rows, "b0") * denoised
    for back in range(HISTORY):
        x_next = x_next + _column(rows, f"b{back + 1}") * history[:, back]
    x_next = x_next + _column(rows, "n") * noise
    pushed = _column(rows, "hx") * x + _column(rows, "hd") * denoised
    return x_next, denoised, torch.cat([pushed.unsqueeze(1), history[:, :-1]], dim=1)


def renoise(latents: Tensor, noise: Tensor, rows: Tensor) -> Tensor:
    """A clean latent at the noise level each row leaves: latents + sigma_next * noise, all (B, C, h, w).

    Inpainting with a 4-channel network puts this back outside the mask after every row.
    """
    return latents + _column(rows, "sigma_next") * noise

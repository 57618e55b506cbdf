"""Starting point of a search: coefficients of each row by least squares against converged trajectories.

Row i maps x and the denoised estimates so far to the latents that the converged sampler has at the next noise level.
All rows are fitted in order, on the latents that the rows before produce. This costs one evaluation per row and image,
a small part of a gradient step's cost times the number of steps that it replaces. Weighted least squares are repeated
with weights 1 / error, so that the mean logarithm of the errors falls (iteratively reweighted least squares, Holland &
Welsch 1977).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from diffserve.experiments.search.learnable_table import LearnableTable
from diffserve.experiments.search.pairs import Pairs, guided_output, parts_of
from diffserve.runtime.model import DiffusionModel
from schedulers.table import COLUMNS, HISTORY

REWEIGHTINGS: Final = 6
RIDGE: Final = 1e-6
"""Weight of the distance to DPM-Solver++(2M), relative to the diagonal of the normal equations (Tikhonov).

The network's input and estimates are nearly collinear. Without it a few images determine large weights that cancel.
"""


@torch.no_grad()
def fit_rows(
    model: DiffusionModel,
    table: LearnableTable,
    pairs: Pairs,
    guidance_scale: float,
    *,
    batch: int,
    error_floor: float,
) -> None:
    """Set the weights of all rows of ``table`` at its timesteps.

    Args:
        model: The model.
        table: The table to change.
        pairs: Training pairs with their paths.
        guidance_scale: Scale of classifier-free guidance.
        batch: Images per UNet call.
        error_floor: Added to an image's mean squared error in its weight.
    """
    latents, history = pairs.noise.double(), list[Tensor]()
    timesteps = [*table.timesteps.tolist(), None]
    for row in range(table.num_rows):
        values = table()[row].to(model.device)
        column = {name: values[place] for place, name in enumerate(COLUMNS)}
        scaled = (latents / model.schedule.sigma_data).float()
        outputs = [
            guided_output(
                model,
                scaled[part.start : part.stop],
                column["timestep"].float(),
                pairs.texts.take(part),
                guidance_scale,
            )
            for part in parts_of(len(scaled), batch)
        ]
        x = scaled.double() / column["c_in"]
        history = [column["c_skip"] * x + column["c_out"] * torch.cat(outputs), *history][: HISTORY + 1]
        features = torch.stack([latents, *history])
        following = timesteps[row + 1]
        target = pairs.target.double() if following is None else pairs.at(following)
        prior = torch.tensor(table.row_weights(row, len(history)), dtype=features.dtype, device=features.device)
        weights = _least_squares(features, target, prior, error_floor)
        table.set_row(row, weights[0].item(), weights[1:].tolist())
        latents = torch.einsum("f,f...->...", weights, features)


def _least_squares(features: Tensor, target: Tensor, prior: Tensor, error_floor: float) -> Tensor:
    """Return weights (F,) for which the weighted sum of ``features`` (F, B, C, h, w) is closest to ``target``.

    They are drawn to ``prior`` (F,).
    """
    flat, goal = features.flatten(2), target.flatten(1)
    products = torch.einsum("fbp,gbp->bfg", flat, flat) / goal.shape[1]
    projections = torch.einsum("fbp,bp->bf", flat, goal) / goal.shape[1]
    power = (goal * goal).mean(1)
    share = torch.ones_like(power)
    weights = prior
    for _ in range(REWEIGHTINGS):
        matrix = torch.einsum("b,bfg->fg", share, products)
        ridge = RIDGE * torch.diag(matrix)
        drawn = torch.einsum("b,bf->f", share, projections) + ridge * prior
        weights = torch.linalg.solve(matrix + torch.diag(ridge), drawn)
        errors = torch.einsum("f,bfg,g->b", weights, products, weights) - 2.0 * projections @ weights + power
        share = 1.0 / (errors.clamp(min=0.0) + error_floor)
    return weights

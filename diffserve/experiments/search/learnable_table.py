"""Step table whose timesteps and coefficients are parameters, to be optimized by gradients.

The network stays frozen. Parameters are the timesteps of the rows and, per row, additive corrections of the
coefficients of DPM-Solver++(2M) (Lu et al. 2022, arXiv 2211.01095) and of the time input. S4S (arXiv 2502.17423) learns
solver coefficients and timesteps together; LD3 and Align Your Steps (arXiv 2404.14507) learn the timesteps.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from schedulers import NoiseSchedule
from schedulers.compile import train_sigmas_of
from schedulers.noise import EDM
from schedulers.table import COLUMNS, HISTORY

TIME_SCALE: Final = 100.0
"""Timesteps per unit of ``time_shift``, so that the same learning rate suits all corrections."""


class LearnableTable(torch.nn.Module):
    """Rows of a deterministic multistep sampler with N evaluations, as a differentiable function of parameters.

    Initially the table is DPM-Solver++(2M) with trailing timesteps. The first row stays at the last training timestep
    and the last row ends at sigma 0.

    Attributes:
        gaps: (N,) logarithms of the distances between timesteps, up to a constant.
        time_shift: (N,) corrections of the time input, in units of ``TIME_SCALE``; not applied to the first row.
        x_weight: (N,) corrections of the weight of x, for x scaled to unit variance.
        denoised_weight: (N,) corrections of the weight of the denoised estimate, for x scaled to unit variance.
        slope_weight: (N, HISTORY) corrections of the weights of the differences to earlier denoised estimates.
    """

    log_sigmas: Tensor

    def __init__(self, schedule: NoiseSchedule, num_rows: int) -> None:
        super().__init__()
        self.preconditioning = schedule.preconditioning
        self.num_rows = num_rows
        sigmas = train_sigmas_of(schedule, is_exact=schedule.prediction_type != "epsilon")
        self.register_buffer("log_sigmas", torch.tensor(sigmas).log())

        def zeros(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))

        self.gaps, self.time_shift = zeros(num_rows), zeros(num_rows)
        self.x_weight, self.denoised_weight = zeros(num_rows), zeros(num_rows)
        self.slope_weight = zeros(num_rows, HISTORY)

    @property
    def timesteps(self) -> Tensor:
        """Timesteps (N,) of the noise levels, descending and fractional."""
        length = len(self.log_sigmas)
        steps = torch.softmax(self.gaps, 0) * length
        return length - 1.0 - (torch.cumsum(steps, 0) - steps)

    def sigma_at(self, timesteps: Tensor) -> Tensor:
        """Interpolate the noise levels (N,) at ``timesteps`` (N,), linearly in the logarithm."""
        below = timesteps.detach().floor().clamp(0, len(self.log_sigmas) - 2).long()
        share = timesteps - below
        return torch.exp(self.log_sigmas[below] * (1.0 - share) + self.log_sigmas[below + 1] * share)

    def forward(self) -> Tensor:
        """Return all columns, float64 (N, NUM_COLUMNS), in the order of :data:`schedulers.table.COLUMNS`."""
        timesteps = self.timesteps
        sigma = self.sigma_at(timesteps)
        ones, zeros = torch.ones_like(sigma), torch.zeros_like(sigma)
        sigma_next = torch.cat([sigma[1:], zeros[:1]])
        ratio, scale_next = sigma_next / sigma, self._deviation(sigma_next)
        places = torch.arange(self.num_rows)

        shift = TIME_SCALE * self.time_shift * (places > 0)
        time_input = (timesteps + shift).clamp(0, len(self.log_sigmas) - 1)
        if self.preconditioning.is_continuous:
            time_input = 0.25 * torch.log(self.sigma_at(time_input))

        has_entry = places[:, None] > torch.arange(HISTORY)
        slopes = has_entry * self.slope_weight * scale_next[:, None]
        slopes = torch.cat([slopes[:, :1] + _second_order(sigma, ratio)[:, None], slopes[:, 1:]], dim=1)
        a = ratio + self.x_weight * scale_next / self._deviation(sigma)
        b0 = 1.0 - ratio + self.denoised_weight * scale_next + slopes.sum(1)
        c_in, c_skip, c_out = self._factors(sigma)
        columns = {
            **{"c_in": c_in, "c_skip": c_skip, "c_out": c_out, "timestep": time_input, "a": a, "b0": b0},
            **{f"b{back + 1}": -slopes[:, back] for back in range(HISTORY)},
            **{"n": zeros, "hx": zeros, "hd": ones, "sigma": sigma, "sigma_next": sigma_next},
        }
        return torch.stack([columns[name] for name in COLUMNS], dim=1)

    @torch.no_grad()
    def space(self, exponent: float) -> None:
        """Set the timesteps to 1 - (i / N)^exponent of the training length; 1 is trailing spacing."""
        edges = torch.linspace(0.0, 1.0, self.num_rows + 1, dtype=torch.float64) ** exponent
        self.gaps.copy_(torch.log(edges.diff()))

    @torch.no_grad()
    def row_weights(self, row: int, count: int) -> list[float]:
        """Return the weights of a row for latents scaled to unit variance: of them and of ``count`` estimates."""
        values = dict(zip(COLUMNS, self()[row].tolist(), strict=True))
        scale, scale_next = (math.hypot(1.0, values[name] / self._data) for name in ("sigma", "sigma_next"))
        return [values["a"] * scale / scale_next, *(values[f"b{back}"] / scale_next for back in range(count))]

    @torch.no_grad()
    def set_row(self, row: int, x_weight: float, estimate_weights: list[float]) -> None:
        """Set the coefficients of one evaluation, for latents scaled to unit variance.

        Args:
            row: The row.
            x_weight: Weight of the latents.
            estimate_weights: Weights of the denoised estimates of this row and of earlier rows, newest first; at most
                row + 1 and HISTORY + 1 numbers.
        """
        for parameter in (self.x_weight, self.denoised_weight, self.slope_weight):
            parameter[row] = 0.0
        own_x_weight, *own_weights = self.row_weights(row, len(estimate_weights))
        self.x_weight[row] = x_weight - own_x_weight
        for back, change in enumerate(map(float.__sub__, estimate_weights, own_weights)):
            self.denoised_weight[row] += change
            if back:
                self.slope_weight[row, back - 1] = -change

    @torch.no_grad()
    def columns(self) -> dict[str, list[float]]:
        """Return the columns by name."""
        values = self().T.tolist()
        return dict(zip(COLUMNS, values, strict=True))

    @property
    def _data(self) -> float:
        """Standard deviation of the data."""
        return self.preconditioning.sigma_data

    def _deviation(self, sigma: Tensor) -> Tensor:
        """Return the standard deviation of x at ``sigma``, relative to that of the data."""
        return torch.sqrt(1.0 + (sigma / self._data) ** 2)

    def _factors(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return c_in, c_skip and c_out, each (N,), as :meth:`schedulers.noise.Preconditioning.factors`."""
        kind, data = self.preconditioning.prediction_type, self._data
        c_in = 1.0 / torch.sqrt(data * data + sigma * sigma)
        if kind == "epsilon":
            return c_in, torch.ones_like(sigma), -sigma
        if kind == "sample":
            return c_in, torch.zeros_like(sigma), torch.ones_like(sigma)
        slope = data * sigma * c_in
        return c_in, (data * c_in) ** 2, slope if kind == EDM else -slope


def _second_order(sigma: Tensor, ratio: Tensor) -> Tensor:
    """Return the weights (N,) of the difference to the previous denoised estimate in DPM-Solver++(2M).

    The first and the last row have none.
    """
    if len(sigma) < 3:
        return torch.zeros_like(sigma)
    width = torch.log(sigma[:-1] / sigma[1:])
    inner = (1.0 - ratio[1:-1]) * 0.5 * width[1:] / width[:-1]
    return torch.cat([sigma.new_zeros(1), inner, sigma.new_zeros(1)])

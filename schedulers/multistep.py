"""DPM-Solver++ multistep samplers: exponential integrators in lambda = -log sigma that reuse denoised estimates."""

from __future__ import annotations

import math
from collections.abc import Callable

from schedulers.grids import Grid
from schedulers.table import Row

FEW_STEPS = 15
"""Number of steps below which the last steps use a lower order, as in diffusers."""


def log_ratio(high: float, low: float) -> float:
    """Return the step in lambda from sigma ``high`` down to ``low``; infinite if ``low`` is 0."""
    return math.inf if low == 0.0 else math.log(high / low)


def order_at(grid: Grid, i: int, highest: int) -> int:
    """Return the order of step ``i``.

    The order is limited by ``highest`` and by the length of the history. It is lower in the last steps of short runs,
    and 1 in a last step that ends at sigma 0.
    """
    order = min(highest, i - grid.start + 1)
    remaining = grid.num_steps - i
    if grid.num_steps < FEW_STEPS:
        order = min(order, remaining)
    if remaining == 1 and grid.ends_clean:
        order = 1
    return order


def _rows(
    grid: Grid,
    k: float,
    order_of: Callable[[int], int],
    weights: Callable[[int, float, list[float]], tuple[float, ...]],
) -> list[Row]:
    """Write the rows of an exponential integrator.

    The update is x_next = (sigma_next / sigma)^k x + weighted denoised estimates + noise.

    Args:
        grid: Noise levels and timesteps.
        k: 1 for the probability-flow ODE; 2 for the reverse SDE, which decays twice as fast and adds noise.
        order_of: Function that returns the order of a step index.
        weights: Function (order, step h in lambda, earlier steps in lambda, newest first) that returns the weights of
            the denoised estimates, newest first. They sum to 1 - exp(-k h).
    """
    rows = []
    for i in range(grid.start, grid.num_steps):
        sigma, target = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
        draws = k == 2.0  # the SDE draws noise at every step, as in diffusers
        if target == sigma:
            rows.append(Row(i, sigma, float(grid.timesteps[i]), 1.0, (0.0,), draws=draws))
            continue
        order = order_of(i)
        earlier_steps = [
            log_ratio(float(grid.sigmas[j - 1]), float(grid.sigmas[j])) for j in range(i, i - order + 1, -1)
        ]
        b = weights(order, log_ratio(sigma, target), earlier_steps)
        ratio = target / sigma
        n = target * math.sqrt(max(0.0, 1.0 - ratio * ratio)) if draws else 0.0
        rows.append(Row(i, sigma, float(grid.timesteps[i]), ratio**k, b, n, draws=draws))
    return rows


def dpmpp_2m_rows(grid: Grid, eta: float, *, k: float) -> list[Row]:
    """Write the rows of DPM-Solver++(2M) (Lu et al. 2022b, algorithm 2) or of its SDE variant (section 5).

    Args:
        grid: Noise levels and timesteps.
        eta: Not used.
        k: 1 for DPM-Solver++(2M), 2 for SDE-DPM-Solver++(2M).
    """

    def midpoint_weights(order: int, h: float, earlier_steps: list[float]) -> tuple[float, ...]:
        total = -math.expm1(-k * h)
        if order == 1:
            return (total,)
        r0 = earlier_steps[0] / h
        correction = 0.5 * total / r0
        return (total + correction, -correction)

    return _rows(grid, k, lambda i: order_at(grid, i, 2), midpoint_weights)


def dpmpp_3m_sde_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of DPM-Solver++(3M) SDE as in k-diffusion's ``sample_dpmpp_3m_sde`` with eta 1, used by A1111.

    diffusers' DPMSolverMultistepScheduler of order 3 differs in the sign of one term (diffusers #9104) and in the
    second step. Below 15 steps diffusers lowers the order of the last two steps, k-diffusion only that of the last
    step.
    """

    def order_of(i: int) -> int:
        return 1 if i + 1 == grid.num_steps else min(3, i - grid.start + 1)

    def weights(order: int, h: float, earlier_steps: list[float]) -> tuple[float, ...]:
        total = -math.expm1(-2.0 * h)
        if order == 1:
            return (total,)
        phi_2 = 1.0 - total / (2.0 * h)
        r0 = earlier_steps[0] / h
        if order == 2:
            return (total + phi_2 / r0, -phi_2 / r0)
        r1 = earlier_steps[1] / h
        phi_3 = phi_2 / (2.0 * h) - 0.5
        newest = (phi_2 * (1.0 + r0 / (r0 + r1)) - phi_3 / (r0 + r1)) / r0
        oldest = (phi_2 * r0 / (r0 + r1) - phi_3 / (r0 + r1)) / r1
        return (total + newest, -newest - oldest, oldest)

    return _rows(grid, 2.0, order_of, weights)

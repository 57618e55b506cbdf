"""DPM-Solver++ over several steps: exponential integrators in lambda = -log sigma that keep denoised estimates."""

from __future__ import annotations

import math
from collections.abc import Callable

from schedulers.grids import Grid
from schedulers.table import Row

FEW_STEPS = 15
"""Below this many steps the last ones drop to lower order, as in diffusers."""


def log_ratio(high: float, low: float) -> float:
    """Step in lambda from sigma ``high`` down to ``low``; infinite when ``low`` is 0."""
    return math.inf if low == 0.0 else math.log(high / low)


def order_at(grid: Grid, i: int, highest: int) -> int:
    """Order that step i may use: limited by the history, lowered at the end (few steps, or a jump to sigma 0)."""
    order = min(highest, i - grid.start + 1)
    left = grid.num_steps - i
    if grid.num_steps < FEW_STEPS:
        order = min(order, left)
    if left == 1 and grid.ends_clean:
        order = 1
    return order


def _rows(
    grid: Grid,
    k: float,
    order_of: Callable[[int], int],
    weights: Callable[[int, float, list[float]], tuple[float, ...]],
) -> list[Row]:
    """Rows of an exponential integrator: x_next = (sigma_next / sigma)^k x + the weighted denoised estimates + noise.

    Args:
        grid: Noise levels and timesteps.
        k: 1 for the flow; 2 for the reverse diffusion, where everything happens twice as fast and noise is added.
        order_of: Order of a step, by its number.
        weights: (order, step in lambda, earlier steps in lambda, newest first) -> weights of the denoised estimates,
            newest first, which sum to 1 - exp(-k h).
    """
    rows = []
    for i in range(grid.start, grid.num_steps):
        sigma, target = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
        draws = k == 2.0  # at every step, as in diffusers
        if target == sigma:
            rows.append(Row(i, sigma, float(grid.timesteps[i]), 1.0, (0.0,), draws=draws))
            continue
        order = order_of(i)
        before = [log_ratio(float(grid.sigmas[j - 1]), float(grid.sigmas[j])) for j in range(i, i - order + 1, -1)]
        b = weights(order, log_ratio(sigma, target), before)
        ratio = target / sigma
        n = target * math.sqrt(max(0.0, 1.0 - ratio * ratio)) if draws else 0.0
        rows.append(Row(i, sigma, float(grid.timesteps[i]), ratio**k, b, n, draws=draws))
    return rows


def dpmpp_2m_rows(grid: Grid, eta: float, *, k: float) -> list[Row]:
    """DPM-Solver++(2M) (Lu et al. 2022b, algorithm 2) with ``k`` 1, SDE-DPM-Solver++(2M) (section 5) with ``k`` 2."""

    def midpoint(order: int, h: float, before: list[float]) -> tuple[float, ...]:
        reach = -math.expm1(-k * h)
        if order == 1:
            return (reach,)
        r0 = before[0] / h
        tilt = 0.5 * reach / r0
        return (reach + tilt, -tilt)

    return _rows(grid, k, lambda i: order_at(grid, i, 2), midpoint)


def dpmpp_3m_sde_rows(grid: Grid, eta: float) -> list[Row]:
    """DPM-Solver++(3M) SDE as k-diffusion's ``sample_dpmpp_3m_sde`` with eta 1, which A1111 runs under this name.

    It differs from order 3 of diffusers' DPMSolverMultistepScheduler in the sign of one term (diffusers #9104), in the
    second step, and below 15 steps, where diffusers lowers the order of the last two steps and k-diffusion that of the
    last alone.
    """

    def order_of(i: int) -> int:
        return 1 if i + 1 == grid.num_steps else min(3, i - grid.start + 1)

    def weights(order: int, h: float, before: list[float]) -> tuple[float, ...]:
        reach = -math.expm1(-2.0 * h)
        if order == 1:
            return (reach,)
        phi_2 = 1.0 - reach / (2.0 * h)
        r0 = before[0] / h
        if order == 2:
            return (reach + phi_2 / r0, -phi_2 / r0)
        r1 = before[1] / h
        phi_3 = phi_2 / (2.0 * h) - 0.5
        newest = (phi_2 * (1.0 + r0 / (r0 + r1)) - phi_3 / (r0 + r1)) / r0
        oldest = (phi_2 * r0 / (r0 + r1) - phi_3 / (r0 + r1)) / r1
        return (reach + newest, -newest - oldest, oldest)

    return _rows(grid, 2.0, order_of, weights)

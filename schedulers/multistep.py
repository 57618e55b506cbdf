"""DPM-Solver++ over several steps: exponential integrators in lambda = -log sigma that keep denoised estimates."""

from __future__ import annotations

import math

from schedulers.grids import Grid
from schedulers.table import Row

FEW_STEPS = 15
"""Below this many steps the last ones drop to lower order, as in diffusers."""


def log_ratio(high: float, low: float) -> float:
    """Step in lambda from sigma ``high`` down to ``low``; infinite when ``low`` is 0."""
    return math.inf if low == 0.0 else math.log(high / low)


def order_at(grid: Grid, i: int, highest: int, *, first_order_at_zero: bool = True) -> int:
    """Order that step i may use: what the history holds, lowered at the end (few steps, or a jump to sigma 0)."""
    order = min(highest, i - grid.start + 1)
    left = grid.num_steps - i
    if grid.num_steps < FEW_STEPS:
        order = min(order, left)
    if left == 1 and grid.ends_clean and first_order_at_zero:
        order = 1
    return order


def _weights(order: int, h: float, before: list[float], k: float) -> tuple[float, ...]:
    """Weights of the denoised estimates, newest first, for a step ``h``; ``before``: steps already made, newest first.

    ``k`` is 1 for the flow and 2 for the reverse diffusion, where everything happens twice as fast. Second order is the
    midpoint rule; third order adds the bend through three estimates, with half its Taylor weight: so do the paper's
    code and k-diffusion, so do the pictures people know by this name. The weights sum to 1 - exp(-k h).
    """
    reach = -math.expm1(-k * h)
    if order == 1:
        return (reach,)
    r0 = before[0] / h
    if order == 2:
        tilt = 0.5 * reach / r0
        return (reach + tilt, -tilt)
    r1 = before[1] / h
    kh = k * h
    linear = 1.0 - reach / kh
    curve = 0.5 - (kh - reach) / (kh * kh)
    d0, d1 = 1.0 / r0, 1.0 / r1
    bend = 1.0 / (r0 + r1)
    newest = (linear * (1.0 + r0 * bend) + curve * bend) * d0
    oldest = (linear * r0 * bend + curve * bend) * d1
    return (reach + newest, -newest - oldest, oldest)


def dpmpp_rows(grid: Grid, eta: float, *, highest: int, k: float) -> list[Row]:
    """DPM-Solver++ of at most ``highest`` order (2: midpoint); ``k`` as in ``_weights``.

    2, 1: DPM-Solver++(2M) (Lu et al. 2022b, algorithm 2). 2, 2: SDE-DPM-Solver++(2M) (section 5); diffusers draws at
    every step. 3, 2: SDE-DPM-Solver++ of third order over three steps.
    """
    rows = []
    for i in range(grid.start, grid.num_steps):
        sigma, target = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
        draws = k == 2.0
        if target == sigma:
            rows.append(Row(i, sigma, float(grid.timesteps[i]), 1.0, (0.0,), draws=draws))
            continue
        order = order_at(grid, i, highest)
        before = [log_ratio(float(grid.sigmas[j - 1]), float(grid.sigmas[j])) for j in range(i, i - order + 1, -1)]
        b = _weights(order, log_ratio(sigma, target), before, k)
        ratio = target / sigma
        n = target * math.sqrt(max(0.0, 1.0 - ratio * ratio)) if draws else 0.0
        rows.append(Row(i, sigma, float(grid.timesteps[i]), ratio**k, b, n, draws=draws))
    return rows

"""Multistep samplers: DPM-Solver++ and UniPC store denoised estimates; LMS, PLMS and DEIS store slopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from schedulers.grids import Grid
from schedulers.table import FloatArray, Row

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


UNIPC_ORDER = 2


def _moments(h: float, count: int) -> FloatArray:
    """Return the right-hand sides (count,) k! phi_{k+1}(-h) h^k / B(h), by the recursion of the phi functions."""
    z = -h
    first = math.expm1(z)
    phi, factorial, out = first / z - 1.0, 1.0, []
    for k in range(1, count + 1):
        out.append(phi * factorial / first)
        factorial *= k + 1
        phi = phi / z - 1.0 / factorial
    return np.array(out)


def _estimate_weights(total: float, shares: FloatArray, nodes: FloatArray) -> list[float]:
    """Return the weights of estimates m_0, m_1, ... in total * (m_0 + sum over k of shares_k (m_k - m_0) / nodes_k)."""
    earlier = total * shares / nodes
    return [total - float(earlier.sum()), *map(float, earlier)]


def _nodes(grid: Grid, i: int, order: int, h: float) -> FloatArray:
    """Return the positions (order - 1,) of the earlier estimates at step i, in units of the step h; all negative."""
    return np.array([-log_ratio(float(grid.sigmas[i - k]), float(grid.sigmas[i])) / h for k in range(1, order)])


def predict_weights(grid: Grid, i: int, order: int) -> list[float]:
    """Return the weights (order,) of the denoised estimates in the predictor from step i to i + 1, newest first."""
    h = log_ratio(float(grid.sigmas[i]), float(grid.sigmas[i + 1]))
    total = -math.expm1(-h)
    if order == 1 or h == 0.0:
        return [total] + [0.0] * (order - 1)
    nodes = _nodes(grid, i, order, h)
    shares = np.array([0.5])
    if order > 2:
        powers = np.vander(nodes, order - 1, increasing=True).T
        shares = np.linalg.solve(powers, _moments(h, order - 1))
    return _estimate_weights(total, shares, nodes)


def correct_weights(grid: Grid, i: int, order: int) -> tuple[float, list[float]]:
    """Return the weights of the denoised estimates in the corrector of step i.

    Returns:
        The weight of the estimate at i + 1, and the weights (order,) of the estimates at i, i - 1, ...
    """
    h = log_ratio(float(grid.sigmas[i]), float(grid.sigmas[i + 1]))
    total = -math.expm1(-h)
    nodes = np.append(_nodes(grid, i, order, h), 1.0)
    shares = np.array([0.5])
    if order > 1:
        shares = np.linalg.solve(np.vander(nodes, order, increasing=True).T, _moments(h, order))
    at_start, *earlier, at_end = _estimate_weights(total, shares, nodes)
    return at_end, [at_start, *earlier]


def unipc_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of UniPC of order 2; the last step has order 1, and a corrector has the order of its step."""
    rows: list[Row] = []
    predictor: list[float] = []
    for i in range(grid.start, grid.num_steps):
        sigma, target = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
        order = min(UNIPC_ORDER, i - grid.start + 1, grid.num_steps - i)
        ratio = target / sigma
        b = [0.0] * (2 + UNIPC_ORDER)
        if predictor:
            at_x, corrector = correct_weights(grid, i - 1, len(predictor))
            b[0] += ratio * at_x
            for k, (new, old) in enumerate(zip(corrector, predictor, strict=True)):
                b[k + 1] += ratio * (new - old)
        predictor = predict_weights(grid, i, order)
        for k, weight in enumerate(predictor):
            b[k] += weight
        rows.append(Row(i, sigma, float(grid.timesteps[i]), ratio, tuple(b)))
    return rows


LMS_ORDER = 4
PLMS_WEIGHTS: tuple[tuple[float, ...], ...] = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)
"""Adams-Bashforth weights for equal steps, newest slope first; entry k is of order k + 1."""

_quadrature = lru_cache(maxsize=1)(np.polynomial.legendre.leggauss)
"""Points and weights of Gauss-Legendre quadrature on (-1, 1), by number of points."""


def slope_row(grid: Grid, step: int, moves: Sequence[float], *, back: Sequence[int] = (), at_end: bool = False) -> Row:
    """Build the row that adds weighted slopes to x and pushes the current slope onto the history.

    The update is x_next = x + moves[0] * slope + moves[1] * (first earlier slope) + ...

    Args:
        grid: Noise levels and timesteps.
        step: Step the row belongs to.
        moves: Weights of the slopes in units of sigma, newest first. They sum to the change of sigma in this step, or
            to 0 with ``at_end``.
        back: Positions of the earlier slopes in the history (1 is the newest); default 1, 2, ...
        at_end: Evaluate the row at the end of the step, where x already is.
    """
    point = step + 1 if at_end else step
    sigma, target = float(grid.sigmas[point]), float(grid.sigmas[step + 1])
    slope_weight = moves[0] / sigma
    a = (target - sum(moves[1:])) / sigma  # equals 1 + slope_weight, without cancellation
    b = [0.0] * (1 + max([*back, len(moves) - 1], default=0))
    b[0] = -slope_weight
    for j, move in enumerate(moves[1:]):
        b[back[j] if back else j + 1] = move
    return Row(step, sigma, float(grid.timesteps[point]), a, tuple(b), hx=1.0 / sigma, hd=-1.0 / sigma)


def lagrange_moves(nodes: FloatArray, start: float, stop: float, *, logarithmic: bool) -> tuple[float, ...]:
    """Integrate the Lagrange basis polynomials of earlier noise levels over a step.

    The polynomials sum to 1, so the integrals sum to ``stop - start``. The rounding error of the sum is added to the
    first integral.

    Args:
        nodes: Noise levels (k,) of the slopes, newest first.
        start: Sigma at the start of the step.
        stop: Sigma at the end of the step.
        logarithmic: Use polynomials in log sigma instead of sigma. The integral is over sigma in both cases.

    Returns:
        One integral for each node, newest first.
    """
    low, high = (math.log(start), math.log(stop)) if logarithmic else (start, stop)
    positions = np.log(nodes) if logarithmic else nodes
    points, weights = _quadrature(48)
    at = 0.5 * (high - low) * points + 0.5 * (high + low)
    weights = 0.5 * (high - low) * weights * (np.exp(at) if logarithmic else 1.0)
    moves = []
    for j in range(nodes.size):
        other_positions = np.delete(positions, j)
        basis = np.prod((at[:, None] - other_positions) / (positions[j] - other_positions), axis=1)
        moves.append(float(weights @ basis))
    moves[0] += (stop - start) - sum(moves)
    return tuple(moves)


def lms_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of LMS: order 4, with a polynomial in sigma through the last four slopes (Karras, k-diffusion)."""
    rows = []
    for i in range(grid.start, grid.num_steps):
        order = min(LMS_ORDER, i - grid.start + 1)
        nodes = grid.sigmas[i - order + 1 : i + 1][::-1]
        moves = lagrange_moves(nodes, float(grid.sigmas[i]), float(grid.sigmas[i + 1]), logarithmic=False)
        rows.append(slope_row(grid, i, moves))
    return rows


def deis_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of DEIS (Zhang & Chen 2023): order 2, with a polynomial in log sigma through two slopes."""
    rows = []
    for i in range(grid.start, grid.num_steps):
        order = order_at(grid, i, 2)
        start, stop = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
        if order == 1:
            rows.append(slope_row(grid, i, (stop - start,)))
            continue
        nodes = grid.sigmas[i - order + 1 : i + 1][::-1]
        rows.append(slope_row(grid, i, lagrange_moves(nodes, start, stop, logarithmic=True)))
    return rows


def plms_rows(grid: Grid, eta: float) -> list[Row]:
    """Write the rows of PLMS (Liu et al. 2022, PNDM without Runge-Kutta steps): Adams-Bashforth weights on the slopes.

    The first step has two rows, as in diffusers: an Euler step to its end, and a correction with the mean of the slopes
    at both ends. The next step evaluates the slope at that point again, so later rows skip the slope of the second row.
    A first step from pure noise has one row, and later rows do not use its slope: the weights assume equal steps and
    would amplify its error.
    """
    first, last = grid.start, grid.num_steps
    move = float(grid.sigmas[first + 1] - grid.sigmas[first])
    rows = [slope_row(grid, first, (move,))]
    if last - first == 1:
        return rows
    if not grid.leaves_pure_noise(first):
        rows.append(slope_row(grid, first, (0.5 * move, -0.5 * move), at_end=True))
    slope_rows = [] if grid.leaves_pure_noise(first) else [0]
    for i in range(first + 1, last):
        row_index = len(rows)
        weights = PLMS_WEIGHTS[min(len(slope_rows), 3)]
        back = [row_index - earlier for earlier in slope_rows[: len(weights) - 1]]
        move = float(grid.sigmas[i + 1] - grid.sigmas[i])
        rows.append(slope_row(grid, i, [move * weight for weight in weights], back=back))
        slope_rows.insert(0, row_index)
    return rows

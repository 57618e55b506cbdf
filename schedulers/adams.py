"""Linear multistep samplers LMS, PLMS and DEIS, which store earlier slopes (x - denoised) / sigma."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from schedulers.grids import Grid
from schedulers.multistep import order_at
from schedulers.table import FloatArray, Row

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

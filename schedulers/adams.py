"""Linear multistep samplers that keep the slope (x - denoised) / sigma, the noise the network sees: LMS, PLMS, DEIS."""

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
"""Adams-Bashforth weights for equal steps, newest slope first, by order."""

_quadrature = lru_cache(maxsize=1)(np.polynomial.legendre.leggauss)
"""(points, weights) of Gauss-Legendre quadrature on (-1, 1), by their number."""


def slope_row(grid: Grid, step: int, moves: Sequence[float], *, back: Sequence[int] = (), again: bool = False) -> Row:
    """x_next = x + moves[0] * slope + moves[1:] * (slopes in history), and the slope is pushed.

    ``moves`` are in units of sigma, newest first; ``back[j]`` is where in the history (1 = newest) slope j + 1 lies, by
    default j + 1. ``moves`` sum to the change of sigma in this step. With ``again`` the row is evaluated at the end of
    the step, where x already is, and the moves sum to 0.
    """
    point = step + 1 if again else step
    sigma, target = float(grid.sigmas[point]), float(grid.sigmas[step + 1])
    share = moves[0] / sigma
    a = (target - sum(moves[1:])) / sigma  # 1 + share without cancellation
    b = [0.0] * (1 + max([*back, len(moves) - 1], default=0))
    b[0] = -share
    for j, move in enumerate(moves[1:]):
        b[back[j] if back else j + 1] = move
    return Row(step, sigma, float(grid.timesteps[point]), a, tuple(b), hx=1.0 / sigma, hd=-1.0 / sigma)


def lagrange_moves(nodes: FloatArray, start: float, stop: float, *, logarithmic: bool) -> tuple[float, ...]:
    """Integrals from sigma ``start`` to ``stop`` of the Lagrange polynomials through ``nodes`` (k,), newest first.

    The polynomials are in sigma, or in log sigma when ``logarithmic`` (the integral is over sigma either way). They sum
    to 1, so the integrals to stop - start; what rounding leaves of that goes to the newest.
    """
    low, high = (math.log(start), math.log(stop)) if logarithmic else (start, stop)
    centres = np.log(nodes) if logarithmic else nodes
    points, weights = _quadrature(48)
    at = 0.5 * (high - low) * points + 0.5 * (high + low)
    weights = 0.5 * (high - low) * weights * (np.exp(at) if logarithmic else 1.0)
    moves = []
    for j in range(nodes.size):
        others = np.delete(centres, j)
        basis = np.prod((at[:, None] - others) / (centres[j] - others), axis=1)
        moves.append(float(weights @ basis))
    moves[0] += (stop - start) - sum(moves)
    return tuple(moves)


def lms_rows(grid: Grid, eta: float) -> list[Row]:
    """Linear multistep of order 4: the slope as a polynomial in sigma through the last four (Karras, k-diffusion)."""
    rows = []
    for i in range(grid.start, grid.num_steps):
        order = min(LMS_ORDER, i - grid.start + 1)
        nodes = grid.sigmas[i - order + 1 : i + 1][::-1]
        moves = lagrange_moves(nodes, float(grid.sigmas[i]), float(grid.sigmas[i + 1]), logarithmic=False)
        rows.append(slope_row(grid, i, moves))
    return rows


def deis_rows(grid: Grid, eta: float) -> list[Row]:
    """DEIS of order 2 in log-rho (Zhang & Chen 2023): the slope as a polynomial in log sigma through the last two."""
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
    """Pseudo linear multistep (Liu et al. 2022, PNDM without Runge-Kutta steps): Adams-Bashforth weights on the slopes.

    The first step is made twice, as diffusers does: to its end, then again with the mean of both slopes. The slope at
    that end is evaluated anew afterwards, so the one pushed by the second row is skipped by all who come later. A step
    that leaves pure noise is made once, and its slope is not looked back at: weights for equal steps carry it far.
    """
    first, last = grid.start, grid.num_steps
    move = float(grid.sigmas[first + 1] - grid.sigmas[first])
    rows = [slope_row(grid, first, (move,))]
    if last - first == 1:
        return rows
    if not grid.leaves_pure_noise(first):
        rows.append(slope_row(grid, first, (0.5 * move, -0.5 * move), again=True))
    kept = [] if grid.leaves_pure_noise(first) else [0]
    for i in range(first + 1, last):
        here = len(rows)
        weights = PLMS_WEIGHTS[min(len(kept), 3)]
        back = [here - row for row in kept[: len(weights) - 1]]
        move = float(grid.sigmas[i + 1] - grid.sigmas[i])
        rows.append(slope_row(grid, i, [move * weight for weight in weights], back=back))
        kept.insert(0, here)
    return rows

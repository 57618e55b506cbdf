"""UniPC (Zhao et al. 2023), B(h) = e^h - 1 ("bh2"), data prediction: predictor and corrector from the same evaluations.

The corrector redoes the step that led to x with the estimate just made at x. Both start from the same earlier point
with the same factor sigma / sigma_before, so their difference holds denoised estimates only, and one row can correct
and predict at once.
"""

from __future__ import annotations

import math

import numpy as np

from schedulers.grids import Grid
from schedulers.multistep import log_ratio
from schedulers.table import FloatArray, Row

UNIPC_ORDER = 2


def _moments(h: float, count: int) -> FloatArray:
    """Right-hand sides b_k (count,): k! phi_{k+1}(-h) h^k over B(h), by the recursion of the phi functions."""
    z = -h
    first = math.expm1(z)
    phi, factorial, out = first / z - 1.0, 1.0, []
    for k in range(1, count + 1):
        out.append(phi * factorial / first)
        factorial *= k + 1
        phi = phi / z - 1.0 / factorial
    return np.array(out)


def _spread(reach: float, shares: FloatArray, nodes: FloatArray) -> list[float]:
    """Weights (newest, then those at ``nodes``) of reach * (m0 + sum of shares * (m_k - m0) / node_k)."""
    outer = reach * shares / nodes
    return [reach - float(outer.sum()), *map(float, outer)]


def _nodes(grid: Grid, i: int, order: int, h: float) -> FloatArray:
    """Positions (order - 1,) of the estimates before the newest at step i, in units of the step h; all negative."""
    return np.array([-log_ratio(float(grid.sigmas[i - k]), float(grid.sigmas[i])) / h for k in range(1, order)])


def predict_weights(grid: Grid, i: int, order: int) -> list[float]:
    """Weights (order,) of the denoised estimates, newest first, in the predictor from step i to i + 1."""
    h = log_ratio(float(grid.sigmas[i]), float(grid.sigmas[i + 1]))
    reach = -math.expm1(-h)
    if order == 1 or h == 0.0:
        return [reach] + [0.0] * (order - 1)
    nodes = _nodes(grid, i, order, h)
    shares = np.array([0.5])
    if order > 2:
        powers = np.vander(nodes, order - 1, increasing=True).T
        shares = np.linalg.solve(powers, _moments(h, order - 1))
    return _spread(reach, shares, nodes)


def correct_weights(grid: Grid, i: int, order: int) -> tuple[float, list[float]]:
    """Weight of the estimate at i + 1, and of those from i backwards (order,), in the corrector of step i."""
    h = log_ratio(float(grid.sigmas[i]), float(grid.sigmas[i + 1]))
    reach = -math.expm1(-h)
    nodes = np.append(_nodes(grid, i, order, h), 1.0)
    shares = np.array([0.5])
    if order > 1:
        shares = np.linalg.solve(np.vander(nodes, order, increasing=True).T, _moments(h, order))
    newest, *rest = _spread(reach, shares, nodes)
    return rest[-1], [newest, *rest[:-1]]


def unipc_rows(grid: Grid, eta: float) -> list[Row]:
    """UniPC of order 2; the last step is of order 1, and the corrector has the order of the step it redoes."""
    rows: list[Row] = []
    before: list[float] = []
    for i in range(grid.start, grid.num_steps):
        sigma, target = float(grid.sigmas[i]), float(grid.sigmas[i + 1])
        order = min(UNIPC_ORDER, i - grid.start + 1, grid.num_steps - i)
        ratio = target / sigma
        b = [0.0] * (2 + UNIPC_ORDER)
        if before:
            at_x, corrected = correct_weights(grid, i - 1, len(before))
            b[0] += ratio * at_x
            for k, (new, old) in enumerate(zip(corrected, before, strict=True)):
                b[k + 1] += ratio * (new - old)
        before = predict_weights(grid, i, order)
        for k, weight in enumerate(before):
            b[k] += weight
        rows.append(Row(i, sigma, float(grid.timesteps[i]), ratio, tuple(b)))
    return rows

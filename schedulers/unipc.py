"""UniPC (Zhao et al. 2023) for data prediction with B(h) = e^h - 1 ("bh2").

The corrector repeats the previous step with the denoised estimate at its end. Predictor and corrector start from the
same x with the same factor, so they differ only in weights of denoised estimates, and one row can correct and predict.
"""

from __future__ import annotations

import math

import numpy as np

from schedulers.grids import Grid
from schedulers.multistep import log_ratio
from schedulers.table import FloatArray, Row

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

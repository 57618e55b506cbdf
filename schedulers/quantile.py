"""Quantiles of the beta distribution, for the "beta" sigma schedule, in numpy alone."""

from __future__ import annotations

import math

import numpy as np

from schedulers.arrays import FloatArray

_TERMS = 60
_HALVINGS = 60


def _lower_half_mass(u: FloatArray, shape: float) -> FloatArray:
    """Unnormalised beta(shape, shape) mass below x = u^(1/shape), x up to 1/2: the series of (1 - x)^(shape - 1)."""
    x = u ** (1.0 / shape)
    total = np.zeros_like(x)
    coefficient, power = 1.0, np.ones_like(x)
    for k in range(_TERMS):
        total += coefficient * power / (shape + k)
        coefficient *= (k + 1.0 - shape) / (k + 1.0)
        power = power * x
    return np.asarray(u * total)


def symmetric_beta_quantile(probability: FloatArray, shape: float) -> FloatArray:
    """x (N,) below which beta(shape, shape) holds ``probability`` (N,) of its mass, to about 1e-13.

    The half below 1/2 is found by bisection in u = x^shape, where the mass is nearly straight; the other mirrors it.
    """
    mass = math.exp(2.0 * math.lgamma(shape) - math.lgamma(2.0 * shape))
    p = np.asarray(probability, dtype=np.float64)
    target = np.minimum(p, 1.0 - p) * mass
    low, high = np.zeros_like(p), np.full_like(p, 0.5**shape)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        below = _lower_half_mass(middle, shape) < target
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    x = (0.5 * (low + high)) ** (1.0 / shape)
    x = np.where(np.minimum(p, 1.0 - p) <= 0.0, 0.0, x)
    return np.asarray(np.where(p > 0.5, 1.0 - x, x))

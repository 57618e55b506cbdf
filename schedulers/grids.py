"""Timestep spacings and sigma schedules: the noise levels at which a sampler evaluates the network.

The schedulers of diffusers interpret a spacing in four ways, called families here; see :data:`FAMILIES`.
:func:`make_grid` computes the :class:`Grid` of a family, a spacing and a sigma schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from schedulers.errors import BadSigmaRange, UnknownSpacing
from schedulers.table import FloatArray

SPACINGS = ("leading", "linspace", "quadratic", "trailing")
SIGMA_SCHEDULES = ("beta", "exponential", "karras", "sgm_uniform", "simple")

FAMILIES = ("ddim", "k", "dpm", "lcm")
"""Interpretations of a spacing with n steps.

* ddim (DDIM, DDPM, PNDM): n training timesteps, rounded.
* k (Euler, Heun, LMS): n timesteps, not rounded; sigmas are interpolated between training timesteps.
* dpm (DPM-Solver++, DEIS, UniPC): n + 1 timesteps without the lowest one.
* lcm (LCM, TCD): a subset of the timesteps of the distillation, for every spacing.
"""

KARRAS_RHO = 7.0
BETA_SHAPE = 0.6
QUADRATIC_REACH = 0.8
"""Fraction of the training length that quadratic spacing covers."""

DISTILLATION_STEPS = 50
"""Timesteps that LCM and TCD models are distilled on (``original_inference_steps`` in diffusers)."""

PURE_NOISE_SIGMA = 256.0
"""Noise level above which the latents contain no usable signal, so that samplers must use first order.

Even the mean of SDXL's 128 x 128 latent cells is lost in the noise at sigma 128. Above the threshold the network
predicts the mean of its training data, and changes between two such predictions are only network error, which
extrapolation would amplify. Schedules with zero terminal SNR (sigma 4096) and the cosine schedule (20000) start above
it; Stable Diffusion (15) and the linear schedule of Ho et al. (157) do not.
"""

_SERIES_TERMS = 60
_BISECTION_STEPS = 60


@dataclass(frozen=True, eq=False)
class Grid:
    """Noise levels and timesteps at which a sampler evaluates the network.

    Attributes:
        sigmas: Noise levels (num_steps + 1,), descending; the last one is the level at which sampling ends.
        timesteps: Training timesteps (num_steps,), possibly fractional.
        start: First step to run; above 0 for image-to-image.
        train_sigmas: Noise levels (T,) of the training timesteps, ascending; only tcd needs them.
    """

    sigmas: FloatArray
    timesteps: FloatArray
    start: int = 0
    train_sigmas: FloatArray | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps of the grid, including the steps before ``start``."""
        return int(self.timesteps.size)

    @property
    def ends_clean(self) -> bool:
        """Whether sampling ends at sigma 0."""
        return float(self.sigmas[-1]) == 0.0

    def leaves_pure_noise(self, step: int) -> bool:
        """Return whether ``step`` starts above :data:`PURE_NOISE_SIGMA` and must therefore be of first order.

        This is the counterpart of ``lower_order_final`` at the start of sampling. A second evaluation at the end of a
        step has the weight (sigma / sigma_next - 1) / 2: 148 in the first of eight Heun steps at zero terminal SNR
        (4096 to 14), against 1 or 2 on an ordinary schedule. First order is exact while the denoised estimate is
        constant.
        """
        return float(self.sigmas[step]) > PURE_NOISE_SIGMA


def pick_timesteps(
    family: str,
    spacing: str,
    num_steps: int,
    length: int,
    steps_offset: int = 0,
    distillation_steps: int = DISTILLATION_STEPS,
) -> FloatArray:
    """Select the training timesteps of a spacing.

    diffusers exceeds the last timestep for leading spacing with an offset at high step counts, and repeats timesteps
    for dpm at ``num_steps == length``. In these cases the nearest distinct timesteps are returned instead.

    Args:
        family: One of :data:`FAMILIES`.
        spacing: One of :data:`SPACINGS`.
        num_steps: Number of timesteps to select.
        length: Number of training timesteps.
        steps_offset: Offset added to leading timesteps.
        distillation_steps: Number of timesteps the model was distilled on, for the lcm family.

    Returns:
        Timesteps (num_steps,), descending and distinct.

    Raises:
        UnknownSpacing: If ``spacing`` is unknown.
    """
    if spacing not in SPACINGS:
        raise UnknownSpacing(f"spacing is {spacing!r}; choose from {', '.join(SPACINGS)}.")
    if family == "lcm":
        return _lcm_timesteps(num_steps, length, distillation_steps)
    if spacing == "leading":
        points = num_steps + 1 if family == "dpm" and num_steps < length else num_steps
        rising = np.arange(points) * (length // points)
        rising = rising[points - num_steps :]
        return _falling(rising + min(steps_offset, length - 1 - int(rising[-1])))
    if spacing == "trailing":
        return np.asarray(np.round(length - np.arange(num_steps) * (length / num_steps)) - 1.0, dtype=np.float64)
    if spacing == "quadratic":
        return _falling(_quadratic(num_steps, length))
    if family == "dpm" and num_steps < length:
        return _falling(np.linspace(0.0, length - 1.0, num_steps + 1).round()[1:])
    if num_steps == 1:
        return np.array([length - 1.0])
    even = np.linspace(0.0, length - 1.0, num_steps)
    return _falling(even if family == "k" else even.round())


def _falling(rising: FloatArray | np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> FloatArray:
    return np.ascontiguousarray(rising[::-1], dtype=np.float64)


def _quadratic(num_steps: int, length: int) -> FloatArray:
    """Return squares of evenly spaced numbers up to 0.8 of the length, made distinct (DDIM paper, appendix D.2)."""
    root = math.sqrt(QUADRATIC_REACH * length)
    roots = np.linspace(0.0, root, num_steps) if num_steps > 1 else np.array([root])
    squares = np.minimum(np.floor(roots**2 + 1e-9), length - 1.0)
    index = np.arange(num_steps, dtype=np.float64)
    distinct = np.maximum.accumulate(squares - index) + index
    return np.minimum(distinct, length - num_steps + index)


def _lcm_timesteps(num_steps: int, length: int, distillation_steps: int) -> FloatArray:
    origin = distillation_steps if num_steps <= distillation_steps <= length else length
    falling = np.arange(origin, 0, -1) * (length // origin) - 1.0
    indices = np.floor(np.linspace(0, origin, num_steps, endpoint=False)).astype(np.int64)
    return np.asarray(falling[indices], dtype=np.float64)


def timesteps_of_sigmas(sigmas: FloatArray, train_sigmas: FloatArray) -> FloatArray:
    """Interpolate the fractional training timesteps (N,) of noise levels ``sigmas`` (N,), linearly in log sigma."""
    index = np.arange(train_sigmas.size, dtype=np.float64)
    return np.asarray(np.interp(np.log(sigmas), np.log(train_sigmas), index), dtype=np.float64)


def karras_sigmas(high: float, low: float, num_steps: int) -> FloatArray:
    """Return sigmas (num_steps,) from high to low, evenly spaced in sigma^(1/7) (Karras et al. 2022, equation 5)."""
    ramp = np.linspace(0.0, 1.0, num_steps)
    top, bottom = high ** (1.0 / KARRAS_RHO), low ** (1.0 / KARRAS_RHO)
    return np.asarray((top + ramp * (bottom - top)) ** KARRAS_RHO, dtype=np.float64)


def exponential_sigmas(high: float, low: float, num_steps: int) -> FloatArray:
    """Return sigmas (num_steps,) from high to low, evenly spaced in log sigma."""
    return np.asarray(np.exp(np.linspace(math.log(high), math.log(low), num_steps)), dtype=np.float64)


def beta_sigmas(high: float, low: float, num_steps: int) -> FloatArray:
    """Return sigmas (num_steps,) from high to low at quantiles of beta(0.6, 0.6) (Lee et al. 2024)."""
    return low + symmetric_beta_quantile(1.0 - np.linspace(0.0, 1.0, num_steps), BETA_SHAPE) * (high - low)


RAMPS: dict[str, Callable[[float, float, int], FloatArray]] = {
    "karras": karras_sigmas,
    "exponential": exponential_sigmas,
    "beta": beta_sigmas,
}
"""Sigma schedules that depend only on their ends: functions (high, low, num_steps) -> descending sigmas."""


def _even_timesteps(name: str, num_steps: int, length: int) -> FloatArray:
    """Return the timesteps (num_steps,) of the schedules "sgm_uniform" and "simple".

    "sgm_uniform" has n + 1 evenly spaced timesteps without the lowest; "simple" has every (length / n)-th from the top.
    """
    if name == "sgm_uniform":
        return np.linspace(length - 1.0, 0.0, num_steps + 1)[:-1]
    return np.asarray(length - 1.0 - np.floor(np.arange(num_steps) * (length / num_steps)), dtype=np.float64)


def _scheduled_sigmas(name: str, high: float, low: float, num_steps: int, train_sigmas: FloatArray) -> FloatArray:
    """Return the sigmas (num_steps,) of the schedule ``name`` from ``high`` to ``low``.

    If ``high`` is above :data:`PURE_NOISE_SIGMA`, the first step ends where trailing spacing ends it and the schedule
    covers the remaining range. Otherwise about half of the steps would be at levels without any signal.
    """
    if high <= PURE_NOISE_SIGMA or num_steps == 1:
        return RAMPS[name](high, low, num_steps)
    second = int(pick_timesteps("k", "trailing", num_steps, train_sigmas.size)[1])
    return np.append(high, RAMPS[name](max(low, float(train_sigmas[second])), low, num_steps - 1))


def make_grid(
    family: str,
    train_sigmas: FloatArray,
    num_steps: int,
    *,
    spacing: str,
    sigma_schedule: str | None,
    steps_offset: int,
    sigma_end: float,
    start: int = 0,
    distillation_steps: int = DISTILLATION_STEPS,
    sigma_range: tuple[float | None, float | None] = (None, None),
) -> Grid:
    """Compute the noise levels and timesteps of a sampling run.

    Args:
        family: Interpretation of the spacing, one of :data:`FAMILIES`.
        train_sigmas: Noise levels (T,) of the training timesteps, ascending.
        num_steps: Number of sampling steps.
        spacing: One of :data:`SPACINGS`.
        sigma_schedule: One of :data:`SIGMA_SCHEDULES`, or ``None`` for the sigmas of the timesteps.
        steps_offset: Offset added to leading timesteps.
        sigma_end: Noise level at which sampling ends; lowered to the last scheduled sigma if it is above it.
        start: First step to run.
        distillation_steps: Number of timesteps the model was distilled on, for the lcm family.
        sigma_range: Smallest and largest noise level of the schedules in :data:`RAMPS`; ``None``: the schedule's own.

    Raises:
        BadSigmaRange: If the smallest noise level is not below the largest.
        UnknownSpacing: If the spacing or the sigma schedule is unknown.
    """
    length = int(train_sigmas.size)
    timesteps = pick_timesteps(family, spacing, num_steps, length, steps_offset, distillation_steps)
    index = np.arange(length, dtype=np.float64)
    if sigma_schedule is None:
        sigmas = np.interp(timesteps, index, train_sigmas)
    elif sigma_schedule in RAMPS:
        timestep_sigmas = np.interp(timesteps, index, train_sigmas)
        ends = (timestep_sigmas[0], timestep_sigmas[-1]) if family == "k" else (train_sigmas[-1], train_sigmas[0])
        low = float(ends[1]) if sigma_range[0] is None else sigma_range[0]
        high = float(ends[0]) if sigma_range[1] is None else sigma_range[1]
        if sigma_range != (None, None) and not 0.0 < low < high:
            raise BadSigmaRange(f"sigma_min is {low:g} and sigma_max {high:g}; sigma_min must be above 0 and smaller.")
        sigmas = _scheduled_sigmas(sigma_schedule, high, low, num_steps, train_sigmas)
        timesteps = timesteps_of_sigmas(sigmas, train_sigmas)
        if family == "dpm":
            timesteps = timesteps.round() if sigma_schedule == "karras" else _truncate(timesteps, train_sigmas)
    elif sigma_schedule in SIGMA_SCHEDULES:
        timesteps = _even_timesteps(sigma_schedule, num_steps, length)
        sigmas = np.exp(np.interp(timesteps, index, np.log(train_sigmas)))
    else:
        raise UnknownSpacing(f"sigma_schedule is {sigma_schedule!r}; choose from {', '.join(SIGMA_SCHEDULES)}.")
    last = min(sigma_end, float(sigmas[-1]))
    return Grid(np.append(sigmas, last), timesteps, start, train_sigmas)


def _truncate(timesteps: FloatArray, train_sigmas: FloatArray) -> FloatArray:
    """Truncate timesteps to integers with the same result as diffusers' float32 arithmetic.

    In float32 the first timestep on Stable Diffusion's betas is 998.99999 instead of 999, so diffusers truncates it to
    998. Schedules that start from pure noise keep the last training timestep.
    """
    timesteps = np.floor(timesteps)
    is_pure_noise = train_sigmas[-1] > PURE_NOISE_SIGMA
    return timesteps if is_pure_noise else np.minimum(timesteps, max(train_sigmas.size - 2.0, 0.0))


def _lower_half_mass(u: FloatArray, shape: float) -> FloatArray:
    """Return the unnormalized beta(shape, shape) mass below x = u^(1/shape), for x up to 1/2.

    The result is a power series, from the expansion of (1 - x)^(shape - 1).
    """
    x = u ** (1.0 / shape)
    total = np.zeros_like(x)
    coefficient, power = 1.0, np.ones_like(x)
    for k in range(_SERIES_TERMS):
        total += coefficient * power / (shape + k)
        coefficient *= (k + 1.0 - shape) / (k + 1.0)
        power = power * x
    return np.asarray(u * total)


def symmetric_beta_quantile(probability: FloatArray, shape: float) -> FloatArray:
    """Return the quantiles (N,) of the beta(shape, shape) distribution, accurate to about 1e-13.

    Quantiles below 1/2 are computed by bisection in u = x^shape, in which the mass is nearly linear. The others follow
    by symmetry.

    Args:
        probability: Probabilities (N,) in 0..1.
        shape: Both shape parameters of the distribution.
    """
    mass = math.exp(2.0 * math.lgamma(shape) - math.lgamma(2.0 * shape))
    p = np.asarray(probability, dtype=np.float64)
    target = np.minimum(p, 1.0 - p) * mass
    low, high = np.zeros_like(p), np.full_like(p, 0.5**shape)
    for _ in range(_BISECTION_STEPS):
        middle = 0.5 * (low + high)
        below = _lower_half_mass(middle, shape) < target
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    x = (0.5 * (low + high)) ** (1.0 / shape)
    x = np.where(np.minimum(p, 1.0 - p) <= 0.0, 0.0, x)
    return np.asarray(np.where(p > 0.5, 1.0 - x, x))

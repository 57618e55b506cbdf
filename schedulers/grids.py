"""Where a sampler evaluates the network: timestep spacings and sigma schedules, compiled to a :class:`Grid`.

diffusers' schedulers disagree about what a spacing means, so each sampler names its reading here ("family"):

    ddim   n points of the training timesteps, rounded                          (DDIM, DDPM, PNDM)
    k      n points, not rounded; sigmas interpolated between timesteps         (Euler, Heun, LMS)
    dpm    n + 1 points, the lowest left out, so the last step is never the smallest (DPM-Solver++, DEIS, UniPC)
    lcm    a subset of the timesteps of the distillation, whatever the spacing     (LCM, TCD)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from schedulers.errors import UnknownSpacing
from schedulers.table import FloatArray

SPACINGS = ("leading", "linspace", "quadratic", "trailing")
SIGMA_SCHEDULES = ("beta", "exponential", "karras", "sgm_uniform", "simple")

KARRAS_RHO = 7.0
BETA_SHAPE = 0.6
QUADRATIC_REACH = 0.8
DISTILLATION_STEPS = 50
"""Timesteps that LCM and TCD models are distilled on (``original_inference_steps`` in diffusers)."""

PURE_NOISE_SIGMA = 256.0
"""Above this nothing of a picture shows through, not even the mean of the 128 x 128 cells of SDXL's latents (it drowns
at 128). The network's estimate there is the mean of all pictures, and how it changes from one such level to the next is
nothing but the network's error: no formula may extrapolate from it. Only schedules of zero terminal SNR (4096) and the
cosine schedule (20000) start there; the ordinary ones end at 15 (Stable Diffusion) and 157 (Ho et al.)."""

_TERMS = 60
_HALVINGS = 60


@dataclass(frozen=True, eq=False)
class Grid:
    """``sigmas`` (num_steps + 1,), falling, the last being where sampling ends; ``timesteps`` (num_steps,).

    ``start`` is the first step to run (more than 0 under image-to-image). ``train_sigmas`` (T,) are the noise levels of
    the training timesteps, rising; only tcd reads them.
    """

    sigmas: FloatArray
    timesteps: FloatArray
    start: int = 0
    train_sigmas: FloatArray | None = None

    @property
    def num_steps(self) -> int:
        """All steps of the grid, those before ``start`` included."""
        return int(self.timesteps.size)

    @property
    def ends_clean(self) -> bool:
        """The last sigma is 0."""
        return float(self.sigmas[-1]) == 0.0

    def leaves_pure_noise(self, step: int) -> bool:
        """``step`` starts from pure noise, so that first order is all it can be: the counterpart of
        ``lower_order_final`` at the other end.

        A second look at the end of a step enters with the weight (sigma / sigma_next - 1) / 2: 148 for the first of
        Heun's eight steps at zero terminal SNR (4096 to 14), 1 or 2 on an ordinary schedule. First order loses nothing:
        it is exact while the estimate does not change.
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
    """Falling timesteps (num_steps,) of a training length, as the family reads the spacing.

    Raises :class:`UnknownSpacing`. Where diffusers would run past the last timestep (leading with an offset at high
    step counts) or repeat timesteps (dpm at num_steps == length), the nearest distinct timesteps are taken.
    """
    if spacing not in SPACINGS:
        raise UnknownSpacing(f"spacing is {spacing!r}; known are {', '.join(SPACINGS)}.")
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
    """Squares of evenly spaced roots up to 0.8 of the length (DDIM paper, appendix D.2), kept distinct."""
    root = math.sqrt(QUADRATIC_REACH * length)
    roots = np.linspace(0.0, root, num_steps) if num_steps > 1 else np.array([root])
    wanted = np.minimum(np.floor(roots**2 + 1e-9), length - 1.0)
    index = np.arange(num_steps, dtype=np.float64)
    distinct = np.maximum.accumulate(wanted - index) + index
    return np.minimum(distinct, length - num_steps + index)


def _lcm_timesteps(num_steps: int, length: int, distillation_steps: int) -> FloatArray:
    origin = distillation_steps if num_steps <= distillation_steps <= length else length
    falling = np.arange(origin, 0, -1) * (length // origin) - 1.0
    chosen = np.floor(np.linspace(0, origin, num_steps, endpoint=False)).astype(np.int64)
    return np.asarray(falling[chosen], dtype=np.float64)


def timesteps_of_sigmas(sigmas: FloatArray, train_sigmas: FloatArray) -> FloatArray:
    """Fractional training timesteps (N,) at which the schedule has ``sigmas`` (N,), straight in log sigma."""
    index = np.arange(train_sigmas.size, dtype=np.float64)
    return np.asarray(np.interp(np.log(sigmas), np.log(train_sigmas), index), dtype=np.float64)


def karras_sigmas(high: float, low: float, num_steps: int) -> FloatArray:
    """(num_steps,) even in sigma^(1/7) from high to low. Karras et al. 2022, equation 5."""
    ramp = np.linspace(0.0, 1.0, num_steps)
    top, bottom = high ** (1.0 / KARRAS_RHO), low ** (1.0 / KARRAS_RHO)
    return np.asarray((top + ramp * (bottom - top)) ** KARRAS_RHO, dtype=np.float64)


def exponential_sigmas(high: float, low: float, num_steps: int) -> FloatArray:
    """(num_steps,) even in log sigma from high to low."""
    return np.asarray(np.exp(np.linspace(math.log(high), math.log(low), num_steps)), dtype=np.float64)


def beta_sigmas(high: float, low: float, num_steps: int) -> FloatArray:
    """(num_steps,) at quantiles of beta(0.6, 0.6) between high and low: dense at both ends. Lee et al. 2024."""
    return low + symmetric_beta_quantile(1.0 - np.linspace(0.0, 1.0, num_steps), BETA_SHAPE) * (high - low)


RAMPS: dict[str, Callable[[float, float, int], FloatArray]] = {
    "karras": karras_sigmas,
    "exponential": exponential_sigmas,
    "beta": beta_sigmas,
}
"""Sigma schedules that need the two ends only: (high, low, num_steps) -> sigmas, falling."""


def _even_timesteps(name: str, num_steps: int, length: int) -> FloatArray:
    """sgm_uniform: even, the lowest of n + 1 left out; simple: every (length / n)-th timestep from the top."""
    if name == "sgm_uniform":
        return np.linspace(length - 1.0, 0.0, num_steps + 1)[:-1]
    return np.asarray(length - 1.0 - np.floor(np.arange(num_steps) * (length / num_steps)), dtype=np.float64)


def _spread(name: str, high: float, low: float, num_steps: int, train_sigmas: FloatArray) -> FloatArray:
    """(num_steps,) of the sigma schedule ``name``. From pure noise the first step goes where trailing spacing goes, and
    the schedule fills what is left: otherwise it would spend half of its steps where nothing is to be seen."""
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
) -> Grid:
    """The grid of ``num_steps`` on a schedule of ``train_sigmas`` (T,), which rise; ends at ``sigma_end``.

    Raises :class:`UnknownSpacing` for a spacing or sigma schedule that does not exist.
    """
    length = int(train_sigmas.size)
    timesteps = pick_timesteps(family, spacing, num_steps, length, steps_offset, distillation_steps)
    index = np.arange(length, dtype=np.float64)
    if sigma_schedule is None:
        sigmas = np.interp(timesteps, index, train_sigmas)
    elif sigma_schedule in RAMPS:
        spaced = np.interp(timesteps, index, train_sigmas)
        ends = (spaced[0], spaced[-1]) if family == "k" else (train_sigmas[-1], train_sigmas[0])
        sigmas = _spread(sigma_schedule, float(ends[0]), float(ends[1]), num_steps, train_sigmas)
        timesteps = timesteps_of_sigmas(sigmas, train_sigmas)
        if family == "dpm":
            timesteps = timesteps.round() if sigma_schedule == "karras" else _truncate(timesteps, train_sigmas)
    elif sigma_schedule in SIGMA_SCHEDULES:
        timesteps = _even_timesteps(sigma_schedule, num_steps, length)
        sigmas = np.exp(np.interp(timesteps, index, np.log(train_sigmas)))
    else:
        raise UnknownSpacing(f"sigma_schedule is {sigma_schedule!r}; known are {', '.join(SIGMA_SCHEDULES)}.")
    last = min(sigma_end, float(sigmas[-1]))
    return Grid(np.append(sigmas, last), timesteps, start, train_sigmas)


def _truncate(timesteps: FloatArray, train_sigmas: FloatArray) -> FloatArray:
    """Cut timesteps to whole ones as diffusers does, where float32 leaves the last one just below a whole number.

    On Stable Diffusion's betas it is 998.99999 instead of 999, and so becomes 998. Pure noise keeps its own timestep.
    """
    timesteps = np.floor(timesteps)
    is_pure_noise = train_sigmas[-1] > PURE_NOISE_SIGMA
    return timesteps if is_pure_noise else np.minimum(timesteps, max(train_sigmas.size - 2.0, 0.0))


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

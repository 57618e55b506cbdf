"""Statistical power of paired comparisons, and intervals that stay valid when the data are analyzed several times.

The unit is the prompt: the differences of a prompt's image pairs are averaged first, because they are correlated. A
sweep that runs until it is decided looks at the data several times. Its intervals use the group-sequential bounds of
Lan and DeMets (1983, "Discrete sequential boundaries for clinical trials", Biometrika 70) with a spending function like
O'Brien and Fleming's (1979), so that all looks together have the level of 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np

from diffserve.experiments.estimates import MODEL_MEASURES, Measure
from diffserve.experiments.intervals import LEVEL, Floats

POWER: Final = 0.8
ASSUMED_DEVIATIONS: Final = {
    Measure.EXACT: 0.45,
    Measure.LATENT_RMSE: 0.2,
    Measure.PSNR_DB: 5.0,
    Measure.SSIM: 0.1,
}
"""Standard deviation of a prompt's mean difference if there are no data yet: that of ddim and ddpm with 4 and 10 steps
on 8 prompts with 3 seeds of the embedded model, rounded up."""

DETECTABLE: Final = (*ASSUMED_DEVIATIONS, *MODEL_MEASURES)
"""Measures whose differences of interest can be stated."""

DIFFERENCES: Final = {Measure.EXACT.value: 0.05, Measure.PSNR_DB.value: 1.0}
"""Differences that a sweep should detect by default, by name of the measure."""

LARGEST: Final = {Measure.EXACT: 1.0, Measure.SSIM: 2.0}
"""Largest possible difference of a measure."""

LEAST_UNITS: Final = 3
"""Smallest number of prompts, or of seeds of a single prompt, whose means have a deviation to rely on."""

NORMAL: Final = NormalDist()
Z_LEVEL: Final = NORMAL.inv_cdf((1 + LEVEL) / 2)
Z_POWER: Final = NORMAL.inv_cdf(POWER)
GRID_POINTS: Final = 1501
GRID_SPREAD: Final = 8.0
"""The grid of the numerical integration ends at this many standard deviations."""


def detectable_difference(deviation: float, num_units: int) -> float:
    """Return the smallest mean difference that a paired test detects with a power of 80 % at a level of 5 %.

    The normal approximation is corrected for the unknown deviation as in Guenther (1981), "Sample size formulas for
    normal theory t tests".

    Args:
        deviation: Standard deviation of the differences of units.
        num_units: Number of units; fewer than 3 detect nothing.
    """
    effective = num_units - Z_LEVEL**2 / 2
    return math.inf if effective <= 1 else (Z_LEVEL + Z_POWER) * deviation / math.sqrt(effective)


def needed_units(deviation: float, difference: float) -> int:
    """Return the number of units that detect ``difference``; the inverse of :func:`detectable_difference`."""
    return math.ceil(((Z_LEVEL + Z_POWER) * deviation / difference) ** 2 + Z_LEVEL**2 / 2)


def describe_power(
    comparisons: Sequence[tuple[str, Measure, float | None]],
    num_prompts: int,
    num_seeds: int,
    differences: Mapping[str, float],
) -> Iterator[str]:
    """Yield one sentence per measure and deviation: what can be detected, and the images needed to detect more.

    Args:
        comparisons: Name, measure and known deviation of each comparison; ``None``: the assumed deviation. Measures by
            networks of the user have none, and their sentence says how to measure it.
        num_prompts: Prompts of the plan.
        num_seeds: Seeds per prompt.
        differences: Differences of interest by name of the measure.
    """
    names: dict[tuple[Measure, float | None], list[str]] = {}
    for name, measure, deviation in comparisons:
        names.setdefault((measure, deviation), []).append(name)
    for (measure, measured), group in names.items():
        subject = group[0] if len(group) == 1 else f"each of {len(group)} comparisons"
        deviation = ASSUMED_DEVIATIONS.get(measure) if measured is None else measured
        if deviation is None:
            yield f"{subject}: the spread of {measure.short_title} is unknown; --previous DIR takes it from a report"
            continue
        num_units = num_prompts if num_prompts > 1 else num_seeds
        detectable, difference = detectable_difference(deviation, num_units), differences[measure.value]
        needed = needed_units(deviation, difference)
        unit = "prompts" if num_prompts > 1 else "seeds"
        units = "1 seed detects" if num_units == 1 else f"{num_units} {unit} detect"
        images = needed * num_seeds if num_prompts > 1 else needed
        finds = (
            "no difference"
            if math.isinf(detectable) or detectable > LARGEST.get(measure, detectable)
            else f"a difference of {measure.write_difference(detectable)}"
        )
        yield (
            f"{subject}: {units} {finds} in {measure.short_title} (80 % power, 5 % level, standard "
            f"deviation {measure.write_difference(deviation)}{' assumed' if measured is None else ''}); "
            f"{measure.write_difference(difference)} needs {needed} {unit}, {images:,} images per cell"
        )


def unit_means(values: Floats, groups: Sequence[Hashable]) -> Floats:
    """Return the mean of the values (N,) of each group, (G,)."""
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(group, len(numbers)) for group in groups]
    means: Floats = np.bincount(index, weights=values) / np.bincount(index)
    return means


def mean_interval(values: Floats, groups: Sequence[Hashable], bound: float) -> tuple[float, float]:
    """Return Student's interval of the mean of ``values``, infinite for fewer than ``LEAST_UNITS`` groups.

    With the bound of a look it is the repeated confidence interval (Jennison and Turnbull 1989). A bootstrap interval
    would be too narrow for few groups.

    Args:
        values: Paired differences (N,).
        groups: The group of each value.
        bound: Bound of the look for normal statistics; it is widened for the unknown deviation.
    """
    means = unit_means(values, groups)
    if len(means) < LEAST_UNITS:
        return -math.inf, math.inf
    half = student_quantile(bound, len(means) - 1) * float(means.std(ddof=1)) / math.sqrt(len(means))
    return float(means.mean()) - half, float(means.mean()) + half


def student_quantile(z: float, freedom: int) -> float:
    """Return the quantile of Student's t that has the tail of ``z`` (Abramowitz and Stegun 1964, 26.7.5)."""
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def spent_level(fraction: float) -> float:
    """Return the part of the level that is spent up to this fraction of the data, 0 to 1."""
    return 4 * (1 - NORMAL.cdf(NORMAL.inv_cdf((3 + LEVEL) / 4) / math.sqrt(fraction)))


@cache
def look_bounds(looks: tuple[int, ...]) -> tuple[float, ...]:
    """Return the bound of the normal statistic at each look, by numerical integration (Armitage et al. 1969).

    Args:
        looks: Amount of data at each look, increasing; the last is the planned end.
    """
    bounds: list[float] = []
    grid, density = np.zeros(1), np.ones(1)  # of the sum of the data under no difference, not stopped before
    spent, before = 0.0, 0.0
    for look in looks:
        fraction = look / looks[-1]
        step = math.sqrt(fraction - before)
        new_grid = np.linspace(-GRID_SPREAD, GRID_SPREAD, GRID_POINTS) * math.sqrt(fraction)
        kernel = np.exp(-(((new_grid[:, None] - grid) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
        new_density = kernel @ density
        width = new_grid[1] - new_grid[0]
        tail = np.cumsum(new_density[::-1])[::-1] * width  # at each point the probability of this or a larger value
        target = (spent_level(fraction) - spent) / 2
        if bounds:
            end = float(np.interp(-math.log(target), -np.log(tail + 1e-300), new_grid))
            bound = (end - float(width) / 2) / math.sqrt(fraction)
        else:
            bound = -NORMAL.inv_cdf(target)
        is_inside = np.abs(new_grid) < bound * math.sqrt(fraction)
        grid, density = new_grid[is_inside], new_density[is_inside] * width
        spent, before = spent_level(fraction), fraction
        bounds.append(bound)
    return tuple(bounds)

"""The plots of a sweep, as PNG, and the only place in ``diffserve.experiments`` that loads matplotlib.

    curves     measures over steps, with intervals
    time       quality against the seconds of one image, with the Pareto front and its knee
    strips     the same seed with growing steps
    overview   one picture of it all, small enough for a README
    drawing    what they share: colours, light and dark, axes, PNG

Which cells make a line, and what they are called, is :mod:`diffserve.experiments.series`.
"""

from diffserve.experiments.plots.curves import curves
from diffserve.experiments.plots.overview import overview
from diffserve.experiments.plots.strips import strip
from diffserve.experiments.plots.time import quality_against_time
from diffserve.experiments.series import measured, points_of, series_of, time_measures

__all__ = [
    "curves",
    "measured",
    "overview",
    "points_of",
    "quality_against_time",
    "series_of",
    "strip",
    "time_measures",
]

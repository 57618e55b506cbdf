"""The plots of an experiment as PNG, and the only place in ``diffserve.experiments`` that loads matplotlib.

    curves     measures over steps and over the seconds of one picture, with intervals; the same seed with growing steps
    sheets     one picture of it all

What a chart holds is :mod:`diffserve.experiments.charts`.
"""

from diffserve.experiments.plots.curves import curves, quality_against_time, strip
from diffserve.experiments.plots.sheets import contact_sheet, overview

__all__ = ["contact_sheet", "curves", "overview", "quality_against_time", "strip"]

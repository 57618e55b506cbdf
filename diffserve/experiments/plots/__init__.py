"""The plots of an experiment as PNG, and the only place in ``diffserve.experiments`` that loads matplotlib.

    curves     the charts: measures over steps and over the seconds of one picture, with intervals
    strips     the same seed with growing steps
    sheets     one picture of it all
    drawing    what they share: colours, legend, PNG

What a chart holds is :mod:`diffserve.experiments.charts`.
"""

from diffserve.experiments.plots.curves import curves, quality_against_time
from diffserve.experiments.plots.sheets import contact_sheet, overview
from diffserve.experiments.plots.strips import strip

__all__ = ["contact_sheet", "curves", "overview", "quality_against_time", "strip"]

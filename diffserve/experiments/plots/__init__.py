"""The plots of an experiment as PNG, and the only place in ``diffserve.experiments`` that loads matplotlib.

What a chart holds is :mod:`diffserve.experiments.charts`.
"""

from diffserve.experiments.plots.curves import contact_sheet, curves, overview, quality_against_time, strip

__all__ = ["contact_sheet", "curves", "overview", "quality_against_time", "strip"]

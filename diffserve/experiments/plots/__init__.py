"""PNG plots of :mod:`diffserve.experiments.charts`; the only package in experiments that imports matplotlib."""

from diffserve.experiments.plots.curves import contact_sheet, curves, overview, quality_against_time, strip

__all__ = ["contact_sheet", "curves", "overview", "quality_against_time", "strip"]

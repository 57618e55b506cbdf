"""One picture that says what a sweep found: up to three measures over steps, and the same seed with growing steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell
from diffserve.experiments.plots.curves import draw_curve
from diffserve.experiments.plots.drawing import LIGHT, name_lines, png, style
from diffserve.experiments.plots.strips import CELL_INCHES, draw_strip
from diffserve.experiments.series import measured, strip_grid
from diffserve.experiments.summary import CellSummary

WANTED = (Measure.EXACT, Measure.FRECHET, Measure.LATENT_RMSE, Measure.FRECHET_CONVERGED, Measure.PSNR_DB)
MOST_PANELS = 3
WIDTH_INCHES, PANEL_INCHES = 10.5, 3.1
NUM_COLORS = 256


def overview(summaries: Sequence[CellSummary], prompt: str, thumbnails: Mapping[Cell, bytes]) -> bytes:
    """Curves above, the strip of one prompt below where there are ``thumbnails``; a PNG of 256 colours."""
    shown = [measure for measure in WANTED if measure in measured(summaries)][:MOST_PANELS]
    grid = strip_grid(thumbnails)
    strip_inches = min(WIDTH_INCHES, CELL_INCHES * len(grid.heads) + 0.5)
    heights = [PANEL_INCHES, *([CELL_INCHES * len(grid.rows) + 0.5] if grid.rows else [])]
    widths = [WIDTH_INCHES - strip_inches + 1e-3, 2 * strip_inches, WIDTH_INCHES - strip_inches + 1e-3]
    with style():
        figure = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
        places = figure.add_gridspec(len(heights), 3, height_ratios=heights, width_ratios=widths)
        above = figure.add_subfigure(places[0, :])
        axes = above.subplots(1, max(1, len(shown)), squeeze=False).ravel()
        for place, measure in zip(axes, shown, strict=False):
            draw_curve(place, measure, summaries, LIGHT, is_narrow=True)
        name_lines(above, axes)
        if grid.rows:
            draw_strip(figure.add_subfigure(places[1, 1]), f"“{prompt}”, the same seed", grid)
        return png(figure, num_colors=NUM_COLORS)

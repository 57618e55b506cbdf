"""Measures over steps: one panel each, one line for each sampler and guidance, shaded by its intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffserve.experiments.estimates import Measure
from diffserve.experiments.plots.drawing import DARK, LIGHT, Look, log_steps, name_lines, name_measure, png, style
from diffserve.experiments.series import belongs, measured, series_of
from diffserve.experiments.summary import CellSummary


def curves(
    summaries: Sequence[CellSummary], measures: Sequence[Measure] | None = None, *, is_dark: bool = False
) -> bytes:
    """``measures``, or all there are, over steps on a logarithmic axis with 95 % intervals; two panels in a row."""
    shown = measured(summaries) if measures is None else measures
    columns = 2 if len(shown) > 1 else 1
    rows = -(-len(shown) // columns)
    look = DARK if is_dark else LIGHT
    with style(look):
        figure = Figure(figsize=(5.2 * columns, 3.1 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for place, measure in zip(axes, shown, strict=False):
            draw_curve(place, measure, summaries, look)
        for spare in axes[len(shown) :]:
            spare.set_visible(False)
        name_lines(figure, axes)
        return png(figure)


def draw_curve(
    axes: Axes, measure: Measure, summaries: Sequence[CellSummary], look: Look, *, is_narrow: bool = False
) -> None:
    """One panel."""
    for number, (key, name) in enumerate(series_of([one.cell for one in summaries]).items()):
        _draw_line(axes, measure, [one for one in summaries if belongs(one.cell, key)], name, look.line(number))
    _draw_converged(axes, measure, summaries, look)
    name_measure(axes, measure, is_narrow=is_narrow)
    log_steps(axes, sorted({one.cell.num_steps for one in summaries if not one.cell.is_reference}))


def _draw_line(
    axes: Axes, measure: Measure, cells: Sequence[CellSummary], name: str, drawn_as: tuple[str, str]
) -> None:
    found = [(one.cell.num_steps, value) for one in cells if (value := one.value(measure)) is not None]
    points = sorted(found, key=lambda point: point[0])
    steps, values = [n for n, _ in points], [value.value for _, value in points]
    color, marker = drawn_as
    axes.plot(steps, values, color=color, marker=marker, markersize=4, linewidth=1.4, label=name)
    low = [value.value if value.low is None else value.low for _, value in points]
    high = [value.value if value.high is None else value.high for _, value in points]
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def _draw_converged(axes: Axes, measure: Measure, summaries: Sequence[CellSummary], look: Look) -> None:
    """Where the converged pictures themselves stand, if that can be said and is one value."""
    values = [value for one in summaries if one.cell.is_reference and (value := one.value(measure)) is not None]
    if len(values) == 1:
        axes.axhline(values[0].value, color=look.faint, linewidth=1, linestyle=":", zorder=0, label="converged")

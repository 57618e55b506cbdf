"""Charts as PNG: one panel each, one line for each sampler and guidance, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from diffserve.experiments.charts import Chart, ChartLine, common_measures, over_seconds, over_steps, time_measures
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plots.drawing import COLORS, FAINT, INK, MARKERS, name_lines, png, style
from diffserve.experiments.summary import CellSummary


def curves(summaries: Sequence[CellSummary]) -> bytes:
    """All measures over steps on a logarithmic axis with 95 % intervals; two panels in a row."""
    return panels(over_steps(summaries, common_measures(summaries)), height_inches=3.1)


def quality_against_time(summaries: Sequence[CellSummary]) -> bytes:
    """The measures of quality over seconds on a logarithmic axis, with the Pareto front and its knee."""
    return panels(over_seconds(summaries, time_measures(summaries)), height_inches=3.8)


def panels(charts: Sequence[Chart], *, height_inches: float, width_inches: float = 5.2, num_columns: int = 2) -> bytes:
    """``charts`` side by side in rows of ``num_columns``, each of this size, under one legend."""
    columns = max(1, min(num_columns, len(charts)))
    rows = max(1, -(-len(charts) // columns))
    with style():
        figure = Figure(figsize=(width_inches * columns, height_inches * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for place, chart in zip(axes, charts, strict=False):
            _draw_chart(place, chart, is_narrow=num_columns > 2)
        for spare in axes[len(charts) :]:
            spare.set_visible(False)
        name_lines(figure, axes)
        return png(figure)


def _draw_chart(axes: Axes, chart: Chart, *, is_narrow: bool) -> None:
    """One panel: the measure above it, and which way is better, in two lines where it is narrow."""
    better = "higher" if chart.measure.more_is_better else "lower"
    axes.set_title(f"{chart.measure.title}{chr(10) if is_narrow else ' '}({better} is better)", fontsize=9)
    if chart.measure is Measure.EXACT:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}" if share < 1.001 else "")  # there is no more
    for line in chart.lines:
        _draw_line(axes, line, is_joined=chart.is_joined)
    if chart.level is not None:
        axes.axhline(chart.level, color=FAINT, linewidth=1, linestyle=":", zorder=0, label="converged")
    _draw_front(axes, chart)
    _scale_x(axes, chart)


def _draw_line(axes: Axes, line: ChartLine, *, is_joined: bool) -> None:
    color, marker = COLORS[line.number % len(COLORS)], MARKERS[line.number % len(MARKERS)]
    x, values = [dot.x for dot in line.dots], [dot.value for dot in line.dots]
    low = [one.value if one.low is None else one.low for one in values]
    high = [one.value if one.high is None else one.high for one in values]
    if is_joined:
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    else:
        axes.vlines(x, low, high, color=color, linewidth=1, alpha=0.35)
    axes.plot(
        x, [one.value for one in values], color=color, marker=marker, markersize=4 if is_joined else 5,
        linewidth=1.4, linestyle="-" if is_joined else "", label=line.name,
    )  # fmt: skip


def _draw_front(axes: Axes, chart: Chart) -> None:
    """The front as a staircase with the steps of its cells, the knee ringed."""
    if chart.is_joined:
        return
    sign = 1 if chart.measure.more_is_better else -1
    axes.plot(
        [dot.x for dot in chart.front], [dot.value.value for dot in chart.front],
        color=INK, linewidth=1, linestyle="--", drawstyle="steps-post", label="Pareto front", zorder=0,
    )  # fmt: skip
    for dot in chart.front:
        axes.annotate(
            str(dot.summary.cell.num_steps), (dot.x, dot.value.value), (0, 9 * sign), textcoords="offset points",
            fontsize=8, ha="center", va="bottom" if sign > 0 else "top",
        )  # fmt: skip
    axes.margins(x=0.08, y=0.12)
    if chart.knee is not None:
        axes.plot(
            [chart.knee.x], [chart.knee.value.value], marker="o", markersize=13, markerfacecolor="none",
            markeredgecolor=INK, linestyle="", label="its knee",
        )  # fmt: skip


def _scale_x(axes: Axes, chart: Chart) -> None:
    """A logarithmic axis that names the steps there are, or round seconds."""
    axes.set_xscale("log")
    if chart.is_joined:
        axes.xaxis.set_major_locator(FixedLocator(sorted({dot.x for dot in chart.dots})))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(chart.x_title)

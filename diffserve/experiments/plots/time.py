"""Quality against the seconds of one image: every cell with its interval, the Pareto front and its knee."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from diffserve.experiments.estimates import Measure
from diffserve.experiments.front import knee, pareto_front
from diffserve.experiments.plots.drawing import DARK, LIGHT, Look, name_lines, name_measure, png, style
from diffserve.experiments.series import belongs, points_of, series_of, time_measures
from diffserve.experiments.summary import CellSummary


def quality_against_time(
    summaries: Sequence[CellSummary], measures: Sequence[Measure] | None = None, *, is_dark: bool = False
) -> bytes:
    """``measures``, or those of quality, over seconds on a logarithmic axis, side by side."""
    shown = time_measures(summaries) if measures is None else measures
    columns = max(1, len(shown))
    look = DARK if is_dark else LIGHT
    with style(look):
        figure = Figure(figsize=(5.2 * columns, 3.8), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False).ravel()
        for place, measure in zip(axes, shown, strict=False):
            _draw(place, measure, summaries, look)
        name_lines(figure, axes)
        return png(figure)


def _draw(axes: Axes, measure: Measure, summaries: Sequence[CellSummary], look: Look) -> None:
    for number, (key, name) in enumerate(series_of([one.cell for one in summaries]).items()):
        color, marker = look.line(number)
        cells = [(one, value) for one in summaries if belongs(one.cell, key) and (value := one.value(measure))]
        for one, value in cells:
            ends = [value.value if end is None else end for end in (value.low, value.high)]
            axes.plot([one.alone_s] * 2, ends, color=color, linewidth=1, alpha=0.35)
        seconds, values = [one.alone_s for one, _ in cells], [value.value for _, value in cells]
        axes.plot(seconds, values, color=color, marker=marker, linestyle="", markersize=5, label=name)
    _draw_front(axes, measure, summaries, look)
    _log_seconds(axes)
    name_measure(axes, measure)


def _log_seconds(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("seconds of one image, alone")


def _draw_front(axes: Axes, measure: Measure, summaries: Sequence[CellSummary], look: Look) -> None:
    """The front as a staircase with the steps of its cells, the knee ringed."""
    sign = 1 if measure.more_is_better else -1
    front = pareto_front(points_of(summaries, measure))
    axes.plot(
        [point.seconds for point in front], [sign * point.quality for point in front],
        color=look.ink, linewidth=1, linestyle="--", drawstyle="steps-post", label="Pareto front", zorder=0,
    )  # fmt: skip
    steps = {one.cell.slug: str(one.cell.num_steps) for one in summaries}
    for point in front:
        axes.annotate(
            steps[point.name], (point.seconds, sign * point.quality), (0, 9 * sign), textcoords="offset points",
            fontsize=8, ha="center", va="bottom" if sign > 0 else "top",
        )  # fmt: skip
    axes.margins(x=0.08, y=0.12)
    if (best := knee(front)) is not None:
        axes.plot(
            [best.seconds], [sign * best.quality], marker="o", markersize=13, markerfacecolor="none",
            markeredgecolor=look.ink, linestyle="", label="its knee",
        )  # fmt: skip

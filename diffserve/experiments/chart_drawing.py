"""Draws a chart into a matplotlib figure: lines, Pareto front, and labels that do not overlap."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from diffserve.experiments.charts import MAX_COLORED, Chart
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.labels import Box, choose_place, spread
from diffserve.experiments.series import ChartDot, ChartLine, steps_text

INK, FAINT = "#1b1d21", "#70757d"
COLORS = ("#8a1700", "#2994ff", "#ad9100", "#6a0e7c", "#ff528b", "#4700d6", INK)
"""Colors of lines on white: contrast of at least 3, distinguishable with each form of color blindness."""
assert len(COLORS) == MAX_COLORED

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

MIN_TICK_DISTANCE = 0.08
"""Smallest distance of labels at the axis of steps, as a share of its length."""

LABEL_PT, GRAY_LABEL_PT = 8.5, 7.0
LABEL_GAP_PT = 12.0
"""Distance between the axes and the labels in the right margin."""

KNEE_PT = 11.0
LABEL_CHARS = 24
LINE_SPACING = 1.3
MARGIN_LABEL_FROM = 0.7
"""Share of the x axis from which the label of a line's end is in the right margin."""

LEFT_IN, RIGHT_IN, BOTTOM_IN, LINE_IN, TOP_IN, TITLE_IN = 0.55, 0.15, 0.48, 0.14, 0.12, 0.45
"""Margins around the axes: right without labels, bottom and each further line of its title, top without and with title.
"""

X_TITLE_CHARS = 60

HINT = "hint: "
"""Start of the SVG group ids that become tooltips."""


class _Label(NamedTuple):
    """Text of a label, its size in points, and its color."""

    text: str
    size_pt: float
    color: str

    @property
    def width_pt(self) -> float:
        font = FontProperties(size=self.size_pt)
        return float(max(TextPath((0, 0), part, prop=font).get_extents().width for part in self.text.split("\n")))

    @property
    def height_pt(self) -> float:
        return self.size_pt * LINE_SPACING * (self.text.count("\n") + 1)


def _label(line: ChartLine) -> _Label:
    text = textwrap.fill(line.name, LABEL_CHARS, break_long_words=False, break_on_hyphens=False)
    return _Label(text, LABEL_PT if line.color is not None else GRAY_LABEL_PT, _color(line))


def _color(line: ChartLine) -> str:
    return FAINT if line.color is None else COLORS[line.color]


def add_chart(figure: Figure, chart: Chart, box: Box, *, has_title: bool) -> None:
    """Draw a chart into ``box``, in inches, with space for the labels of lines at the right."""
    labels = [(line, _label(line)) for line in chart.lines]
    label_inches = RIGHT_IN
    if not chart.is_over_time:
        label_inches = (max((label.width_pt for _, label in labels), default=0) + LABEL_GAP_PT + 4) / 72
    x_title = "\n".join(textwrap.fill(part, X_TITLE_CHARS) for part in chart.x_title.split("\n"))
    left, bottom = box.left + LEFT_IN, box.bottom + BOTTOM_IN + LINE_IN * x_title.count("\n")
    top = box.top - (TITLE_IN if has_title else TOP_IN)
    width, height = figure.get_size_inches()
    axes = figure.add_axes(
        (left / width, bottom / height, (box.right - label_inches - left) / width, (top - bottom) / height)
    )
    if has_title:
        axes.set_title(f"{chart.title}\n({chart.measure.direction})", fontsize=9, loc="left")
    if chart.measure is Measure.EXACT:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}" if share < 1.001 else "")  # no label above 100 %
    for line in chart.lines:
        _draw_line(axes, line, chart)
    if chart.level is not None:
        axes.axhline(chart.level, color=FAINT, linewidth=1, linestyle=":", zorder=0, gid="level")
    _scale_x(axes, chart)
    axes.set_xlabel(x_title, loc="left")
    axes.margins(y=0.15 if chart.is_over_time else 0.06)
    if chart.is_over_time:
        _draw_front(axes, chart)
        _leave_out_outliers(axes, chart)
        _label_dots(labels, chart, _Placer(figure, axes, chart))
    else:
        _label_lines(axes, labels, _Placer(figure, axes, chart))


def _draw_line(axes: Axes, line: ChartLine, chart: Chart) -> None:
    """Draw a line: colored with its 95 % intervals, or thin and gray. Over time, draw dots only."""
    color, is_gray = _color(line), line.color is None
    zorder = 2.0 if line.color is None else 4.0 - line.color / MAX_COLORED
    x, values = [dot.x for dot in line.dots], [dot.value for dot in line.dots]
    if not chart.is_over_time:
        width, alpha = (0.7, 0.55) if is_gray else (1.8, 1.0)
        axes.plot(x, [value.value for value in values], color=color, linewidth=width, alpha=alpha, zorder=zorder)
        if not is_gray:
            axes.fill_between(x, *_bounds(values), color=color, alpha=0.1, linewidth=0, zorder=1)
    for index, dot in enumerate(line.dots):
        axes.plot(
            dot.x, dot.value.value, color=color, zorder=zorder, alpha=0.55 if is_gray else 1.0, markeredgewidth=0,
            marker="o" if line.color is None else MARKERS[line.color], markersize=2.5 if is_gray else 5,
            gid=HINT + _hint(line, index, chart.measure),
        )  # fmt: skip


def _bounds(values: Sequence[Estimate]) -> tuple[list[float], list[float]]:
    """Return the lower and the upper ends of the intervals, the value itself without an interval."""
    low = [estimate.value if estimate.low is None else estimate.low for estimate in values]
    return low, [estimate.value if estimate.high is None else estimate.high for estimate in values]


def _leave_out_outliers(axes: Axes, chart: Chart) -> None:
    """Limit the y axis to 1.5 interquartile ranges beyond the quartile of worse values, and to the whole front.

    Tukey 1977, "Exploratory Data Analysis". The number of cells outside is written on the chart.
    """
    values, sign = np.array([dot.value.value for dot in chart.dots]), 1 if chart.measure.more_is_better else -1
    quartiles = np.quantile(sign * values, [0.25, 0.75])
    fence = float(min(2.5 * quartiles[0] - 1.5 * quartiles[1], *(sign * dot.value.value for dot in chart.front)))
    inside = values[sign * values >= fence]
    if num_outside := len(values) - len(inside):
        margin = 0.15 * (inside.max() - inside.min()) or 0.05
        axes.set_ylim(inside.min() - margin, inside.max() + margin)
        direction, limit = ("below", inside.min()) if sign > 0 else ("above", inside.max())
        cells = "1 cell" if num_outside == 1 else f"{num_outside} cells"
        text = f"not shown: {cells} {direction} {chart.measure.write(float(limit))}"
        axes.text(0.99, 0.01, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color=FAINT)


class _Placer:
    """Places labels next to the dots of a chart; all coordinates are in points from the lower left of the axes.

    The limits of the axes must not change any more.
    """

    def __init__(self, figure: Figure, axes: Axes, chart: Chart) -> None:
        self._axes = axes
        self._sign = 1 if chart.measure.more_is_better else -1
        points_per_pixel = 72 / figure.dpi
        self.width, self.height = axes.bbox.width * points_per_pixel, axes.bbox.height * points_per_pixel
        (self._left, right), (self._low, high) = np.log(axes.get_xlim()), axes.get_ylim()
        self._scale = self.width / (right - self._left), self.height / (high - self._low)
        self._obstacles: list[Box] = []
        for line in chart.lines:
            if line.color is not None:
                points = [self.point(dot) for dot in line.dots]
                self._avoid(points, 4)
                if not chart.is_over_time:
                    self._avoid_path(points)
        if chart.knee is not None:
            self._avoid([self.point(chart.knee)], KNEE_PT / 2)
        stairs = [self.point(dot) for dot in chart.front]
        self._avoid_path([corner for a, b in pairwise(stairs) for corner in (a, (b[0], a[1]), b)])

    def point(self, dot: ChartDot) -> tuple[float, float]:
        """Return the position of a dot."""
        x, y = float(np.log(dot.x)) - self._left, dot.value.value - self._low
        return x * self._scale[0], y * self._scale[1]

    def _avoid(self, points: Iterable[tuple[float, float]], radius: float) -> None:
        """Add squares around points to the obstacles."""
        self._obstacles += [Box(x - radius, y - radius, x + radius, y + radius) for x, y in points]

    def _avoid_path(self, points: Sequence[tuple[float, float]]) -> None:
        """Add the lines between consecutive points to the obstacles."""
        for start, end in pairwise(np.array(points)):
            self._avoid((start + (end - start) * share for share in np.linspace(0, 1, 12)), 1)

    def write(self, dot: ChartDot, label: _Label, *, is_optional: bool = False) -> None:
        """Write a label next to a dot, on the better side if possible, joined to it by a thin line.

        An optional label is left out if there is no free place.
        """
        x, y = self.point(dot)
        half = (label.width_pt / 2 + 1, label.height_pt / 2)
        sides = ((-1, 1), (0, 1), (1, 1), (-1, 0), (1, 0), (1, -1), (0, -1), (-1, -1))
        centers = (
            (x + side_x * (half[0] + gap * (1 if side_y == 0 else 0.5)), y + self._sign * side_y * (half[1] + gap))
            for gap in (4, 10, 18, 28, 40)
            for side_x, side_y in sides
        )
        boxes = (Box(a - half[0], b - half[1], a + half[0], b + half[1]) for a, b in centers)
        frame = Box(0, 0, self.width, self.height)
        box = choose_place(boxes, self._obstacles, frame)
        if is_optional and (box.area_outside(frame) or any(map(box.overlap, self._obstacles))):
            return
        self._obstacles.append(box)
        center = ((box.left + box.right) / 2, (box.bottom + box.top) / 2)
        _annotate(self._axes, dot, label, center, align="center")


def _annotate(axes: Axes, dot: ChartDot, label: _Label, position: tuple[float, float], *, align: str) -> None:
    """Write a label at ``position``, in points from the lower left of the axes, with a thin line to its dot."""
    axes.annotate(
        label.text, (dot.x, dot.value.value), position, textcoords="axes points", ha=align, va="center",
        fontsize=label.size_pt, color=label.color, annotation_clip=False, linespacing=1.1, zorder=6,
        arrowprops={
            "arrowstyle": "-", "color": label.color, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3,
            "relpos": (0 if align == "left" else 0.5, 0.5),
        },
    )  # fmt: skip


def _label_dots(labels: Sequence[tuple[ChartLine, _Label]], chart: Chart, placer: _Placer) -> None:
    """Write sampler and steps at the points of the front, and names of other colored samplers at their best dots."""
    for dot in chart.front_labels():
        line = next(line for line in chart.lines if dot in line.dots)
        placer.write(dot, _Label(line.name_at(dot.summary.cell.num_steps), LABEL_PT, _color(line)))
    for line, label in labels:
        if line.color is not None and not any(dot in chart.front for dot in line.dots):
            placer.write(chart.best(line.dots), label._replace(size_pt=GRAY_LABEL_PT), is_optional=True)


def _label_lines(axes: Axes, labels: Sequence[tuple[ChartLine, _Label]], placer: _Placer) -> None:
    """Write the name of each line at its end: in the right margin, or next to the last dot of a line that ends early.

    Gray lines have no labels if there is not enough space for all.
    """
    at_margin = []
    for line, label in labels:
        if placer.point(line.dots[-1])[0] >= MARGIN_LABEL_FROM * placer.width:
            at_margin.append((line, label))
        elif line.color is not None:
            placer.write(line.dots[-1], label)
    if sum(label.height_pt for _, label in at_margin) > placer.height + 12:
        at_margin = [(line, label) for line, label in at_margin if line.color is not None]
    ends = [placer.point(line.dots[-1])[1] for line, _ in at_margin]
    centers = spread(ends, [label.height_pt for _, label in at_margin], -6, placer.height + 6)
    for (line, label), center in zip(at_margin, centers, strict=True):
        _annotate(axes, line.dots[-1], label, (placer.width + LABEL_GAP_PT, center), align="left")


def _draw_front(axes: Axes, chart: Chart) -> None:
    """Draw the Pareto front as a staircase with 95 % intervals, and a ring around the knee."""
    for dot in chart.front:
        axes.vlines(dot.x, *_bounds([dot.value]), color=FAINT, linewidth=1, alpha=0.6, zorder=1)
    axes.plot(
        [dot.x for dot in chart.front], [dot.value.value for dot in chart.front],
        color=INK, linewidth=1, linestyle="--", drawstyle="steps-post", zorder=1,
    )  # fmt: skip
    if chart.knee is not None:
        axes.plot(
            [chart.knee.x], [chart.knee.value.value], marker="o", markersize=KNEE_PT, markerfacecolor="none",
            markeredgecolor=INK, linestyle="", zorder=5,
        )  # fmt: skip


def _scale_x(axes: Axes, chart: Chart) -> None:
    """Set a logarithmic x axis with ticks at the existing step counts or at round seconds."""
    low, high = min(dot.x for dot in chart.dots), max(dot.x for dot in chart.dots)
    margin = max(1.02, (high / low) ** (0.12 if chart.is_over_time else 0.04))
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    if chart.is_over_time:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(FixedLocator(_ticks([dot.x for line in chart.lines for dot in line.dots])))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _ticks(positions: Sequence[float]) -> list[float]:
    """Choose ticks from the positions of dots: the ends, then the common ones that have enough distance.

    Positions that fewer than a third as many lines have as the most common one are those of few samplers.
    """
    counts = Counter(positions)
    ends = (min(positions), max(positions))
    min_ratio = (ends[1] / ends[0]) ** MIN_TICK_DISTANCE
    ticks: list[float] = []
    common = [x for x in counts if x in ends or 3 * counts[x] >= max(counts.values())]
    for x in sorted(common, key=lambda x: (x not in ends, -counts[x], x)):
        if all(max(x / tick, tick / x) >= min_ratio for tick in ticks):
            ticks.append(x)
    return sorted(ticks)


def _hint(line: ChartLine, index: int, measure: Measure) -> str:
    """Return the tooltip of a dot, with all cells that are drawn there."""
    return "; ".join(_describe_dot(dot, measure) for dot in line.cells_at(index))


def _describe_dot(dot: ChartDot, measure: Measure) -> str:
    interval, value = "", dot.value
    if value.low is not None and value.high is not None:
        interval = f" (95 % interval {measure.write_range(value.low, value.high)})"
    steps, seconds = dot.summary.cell.num_steps, dot.summary.alone_s
    return f"{dot.name}, {steps_text(steps)}: {measure.write(value.value)}{interval}, {seconds:.2g} s"

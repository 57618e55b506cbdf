"""Renders charts as PNG and as inline SVG, and image strips as PNG; the only module that imports matplotlib."""

from __future__ import annotations

import re
import textwrap
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from io import BytesIO, StringIO
from itertools import pairwise
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator
from PIL import Image

from diffserve.experiments.charts import (
    MAX_COLORED,
    Chart,
    color_numbers,
    common_measures,
    headline,
    over_seconds,
    over_steps,
    strip_grid,
    time_measures,
)
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.labels import Box, choose_place, spread
from diffserve.experiments.plan import Cell
from diffserve.experiments.series import ChartDot, ChartLine
from diffserve.experiments.summary import CellSummary

DPI = 110
NUM_COLORS = 256  # palette size of a PNG; lines on a plain background look the same in a third of the file size

_plotting = threading.Lock()  # matplotlib keeps its style for the whole process

INK, FAINT = "#1b1d21", "#70757d"
COLORS = ("#8a1700", "#2994ff", "#ad9100", "#6a0e7c", "#ff528b", "#4700d6", INK)
"""Colors of lines on white: contrast of at least 3, and apart with each form of color blindness; see the tests."""
assert len(COLORS) == MAX_COLORED

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

MAX_TITLE_CHARS = 90
CELL_INCHES = 1.15

MIN_TICK_DISTANCE = 0.08
"""Smallest distance of labels at the axis of steps, as a share of its length."""

LABEL_PT, GRAY_LABEL_PT = 8.5, 7.0
LABEL_GAP_PT = 12.0
LABEL_CHARS = 24
LINE_SPACING = 1.3
MARGIN_LABEL_FROM = 0.7
"""Share of the x axis from which the label of a line's end is in the right margin."""

LEFT_IN, RIGHT_IN, BOTTOM_IN, TOP_IN, TITLE_IN = 0.55, 0.15, 0.5, 0.12, 0.45
PANEL_INCHES = (5.4, 3.7)
HEADLINE_INCHES = (4.6, 4.1)
SVG_INCHES = (5.0, 3.4)

HINT = "hint: "
"""Start of the SVG group ids that become tooltips."""


@contextmanager
def style() -> Iterator[None]:
    """Apply the plot style in one thread at a time and suppress warnings about missing glyphs."""
    with _plotting, matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rc("font", size=9)
        matplotlib.rc("axes", grid=True, edgecolor=FAINT, labelcolor=INK)
        matplotlib.rc("axes.spines", top=False, right=False)
        matplotlib.rc("grid", alpha=0.25, color=FAINT)
        matplotlib.rc("svg", fonttype="none")
        matplotlib.rc("text", parse_math=False, color=INK)  # a prompt may contain dollar signs
        matplotlib.rc("xtick", color=FAINT, labelcolor=INK)
        matplotlib.rc("ytick", color=FAINT, labelcolor=INK)
        yield


def png(figure: Figure, *, num_colors: int | None = NUM_COLORS) -> bytes:
    """Encode the figure as PNG with a palette of ``num_colors``, or with full colors if that is ``None``."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": "diffserve"})
    if num_colors is None:
        return file.getvalue()
    return to_palette(Image.open(file).convert("RGB"), num_colors)


def to_palette(image: Image.Image, num_colors: int) -> bytes:
    """Encode ``image`` as PNG with a palette of ``num_colors``."""
    file = BytesIO()
    image.quantize(num_colors, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def figure_html(charts: Sequence[Chart]) -> str:
    """Render all charts as inline SVG, next to each other if there is space.

    The page must include :data:`diffserve.experiments.charts.STYLE` and define the CSS variables of its light or dark
    colors. All text from outside is escaped.
    """
    return f'<div class="charts">{"".join(map(_figure_html, charts))}</div>' if charts else ""


def _figure_html(chart: Chart) -> str:
    title = escape(chart.title)
    return (
        f"<figure><figcaption>{title} <small>({chart.measure.direction})</small></figcaption>"
        f"{_svg(chart, title)}</figure>"
    )


def _svg(chart: Chart, label: str) -> str:
    """Render a chart as an SVG element that takes its colors from the page; ``label`` is for screen readers."""
    file = StringIO()
    with style():
        figure = Figure(figsize=SVG_INCHES)
        _add_chart(figure, chart, Box(0, 0, *SVG_INCHES), has_title=False)
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = file.getvalue()
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)  # it would apply to the page
    svg = re.sub(r"<svg[^>]*(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img" aria-label="{label}">', svg)
    svg = re.sub(rf'<g id="{HINT}([^"]*)">', r'<g class="dot"><title>\1</title>', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("xlink:href", "href")
    svg = re.sub(r"font-family: [^;]*; ", "", svg)  # inherited from the page
    return _page_colors(svg)


def _page_colors(text: str) -> str:
    """Replace the colors in ``text`` by CSS variables of the page."""
    for number, color in enumerate(COLORS[:-1]):
        text = text.replace(color, f"var(--chart-{number})")
    return text.replace(INK, "var(--body-text-color)").replace(FAINT, "var(--body-text-color-subdued)")


def _hint(line: ChartLine, index: int, measure: Measure) -> str:
    """Return the tooltip of a dot, with all cells that are drawn there."""
    return "; ".join(_describe_dot(dot, measure) for dot in line.cells_at(index))


def _describe_dot(dot: ChartDot, measure: Measure) -> str:
    interval, value = "", dot.value
    if value.low is not None and value.high is not None:
        interval = f" (95 % interval {measure.write_range(value.low, value.high)})"
    steps, seconds = dot.summary.cell.num_steps, dot.summary.alone_s
    return f"{dot.name}, {steps} steps: {measure.write(value.value)}{interval}, {seconds:.2g} s"


def curves(summaries: Sequence[CellSummary]) -> bytes:
    """Plot all measures over steps on a logarithmic axis with 95 % intervals, two panels per row."""
    return panels(over_steps(summaries, common_measures(summaries)))


def quality_against_time(summaries: Sequence[CellSummary]) -> bytes:
    """Plot quality measures over seconds on a logarithmic axis, with the Pareto front and its knee."""
    return panels(over_seconds(summaries, time_measures(summaries)))


def overview(summaries: Sequence[CellSummary]) -> bytes:
    """Plot the headline charts; the PNG is small enough to commit."""
    return panels(headline(summaries), inches=HEADLINE_INCHES)


def panels(charts: Sequence[Chart], *, inches: tuple[float, float] = PANEL_INCHES) -> bytes:
    """Plot ``charts`` in panels of the given width and height, two per row."""
    num_columns = max(1, min(2, len(charts)))
    num_rows = max(1, -(-len(charts) // num_columns))
    width, height = inches
    with style():
        figure = Figure(figsize=(width * num_columns, height * num_rows))
        for index, chart in enumerate(charts):
            left, bottom = width * (index % num_columns), height * (num_rows - 1 - index // num_columns)
            _add_chart(figure, chart, Box(left, bottom, left + width, bottom + height), has_title=True)
        return png(figure)


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


def _add_chart(figure: Figure, chart: Chart, box: Box, *, has_title: bool) -> None:
    """Draw a chart into ``box``, in inches, with space for the labels of lines at the right."""
    labels = [(line, _label(line)) for line in chart.lines]
    label_inches = RIGHT_IN
    if not chart.is_over_time:
        label_inches = (max((label.width_pt for _, label in labels), default=0) + LABEL_GAP_PT + 4) / 72
    left, bottom, top = box.left + LEFT_IN, box.bottom + BOTTOM_IN, box.top - (TITLE_IN if has_title else TOP_IN)
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
    axes.margins(y=0.15 if chart.is_over_time else 0.06)
    if chart.is_over_time:
        _draw_front(axes, chart)
        _leave_out_outliers(axes, chart)
        placer = _Placer(axes, chart)
        for dot in chart.front_labels():
            line = next(line for line in chart.lines if dot in line.dots)
            placer.write(dot, _Label(f"{line.name} {dot.summary.cell.num_steps}", LABEL_PT, _color(line)))
        for line, label in labels:
            if line.color is not None and not any(dot in chart.front for dot in line.dots):
                placer.write(chart.best(line.dots), label._replace(size_pt=GRAY_LABEL_PT), is_optional=True)
    else:
        _draw_labels(axes, labels, _Placer(axes, chart))


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
        margin = 0.15 * (inside.max() - inside.min())
        axes.set_ylim(inside.min() - margin, inside.max() + margin)
        direction, limit = ("below", inside.min()) if sign > 0 else ("above", inside.max())
        text = f"not shown: {num_outside} cells {direction} {chart.measure.write(float(limit))}"
        axes.text(0.99, 0.01, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=7, color=FAINT)


class _Placer:
    """Places labels next to the dots of a chart; all coordinates are in points from the lower left of the axes.

    The limits of the axes must not change any more.
    """

    def __init__(self, axes: Axes, chart: Chart) -> None:
        self._axes = axes
        self._sign = 1 if chart.measure.more_is_better else -1
        size = axes.get_position().size * axes.get_figure().get_size_inches() * 72
        self.width, self.height = map(float, size)
        (self._left, right), (self._low, high) = np.log(axes.get_xlim()), axes.get_ylim()
        self._scale = self.width / (right - self._left), self.height / (high - self._low)
        self._obstacles: list[Box] = []
        for line in chart.lines:
            if line.color is not None:
                points = [self.point(dot) for dot in line.dots]
                self._avoid(points, 4)
                if not chart.is_over_time:
                    self._avoid_path(points)
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
        fontsize=label.size_pt, color=label.color, annotation_clip=False, linespacing=1.0, zorder=6,
        arrowprops={
            "arrowstyle": "-", "color": label.color, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3,
            "relpos": (0 if align == "left" else 0.5, 0.5),
        },
    )  # fmt: skip


def _draw_labels(axes: Axes, labels: Sequence[tuple[ChartLine, _Label]], placer: _Placer) -> None:
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
            [chart.knee.x], [chart.knee.value.value], marker="o", markersize=11, markerfacecolor="none",
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
    axes.set_xlabel(chart.x_title)


def _ticks(positions: Sequence[float]) -> list[float]:
    """Choose ticks from the positions of dots: the ends, then the most common ones that have enough distance."""
    counts = Counter(positions)
    ends = (min(positions), max(positions))
    least = (ends[1] / ends[0]) ** MIN_TICK_DISTANCE
    ticks: list[float] = []
    for x in sorted(counts, key=lambda x: (x not in ends, -counts[x], x)):
        if all(max(x / tick, tick / x) >= least for tick in ticks):
            ticks.append(x)
    return sorted(ticks)


def strip(title: str, thumbnails: Mapping[Cell, bytes], summaries: Sequence[CellSummary] = ()) -> bytes:
    """Combine the encoded images of ``thumbnails`` into one full-color PNG, the rows of colored lines first."""
    grid = strip_grid(thumbnails, color_numbers(summaries))
    with style():
        size = (CELL_INCHES * len(grid.heads) + 0.9, 1.2 * len(grid.rows) + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        shown_title = title if len(title) <= MAX_TITLE_CHARS else f"{title[: MAX_TITLE_CHARS - 3]}..."
        figure.suptitle(shown_title, fontsize=9)
        axes_rows = figure.subplots(len(grid.rows), len(grid.heads), squeeze=False)
        for axes, head in zip(axes_rows[0], grid.heads, strict=True):
            axes.set_title(head, fontsize=8)
        for row, name, pictures in zip(axes_rows, grid.names, grid.rows, strict=True):
            row[0].set_ylabel(name, fontsize=8)
            for axes, picture in zip(row, pictures, strict=True):
                _show(axes, picture)
        return png(figure, num_colors=None)


def _show(axes: Axes, picture: bytes | None) -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if picture is not None:
        axes.imshow(Image.open(BytesIO(picture)).convert("RGB"), interpolation="lanczos")


def contact_sheet(summaries: Sequence[CellSummary], prompt: str, thumbnails: Mapping[Cell, bytes]) -> bytes:
    """Combine the strip of one prompt and all charts of measured values into one full-color PNG."""
    parts = [strip(prompt, thumbnails)]
    if common_measures(summaries):
        parts += [curves(summaries), quality_against_time(summaries)]
    file = BytesIO()
    _stack(parts).save(file, "PNG")
    return file.getvalue()


def _stack(parts: Sequence[bytes]) -> Image.Image:
    """Stack images vertically on white."""
    images = [Image.open(BytesIO(part)).convert("RGB") for part in parts]
    sheet = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        sheet.paste(image, ((sheet.width - image.width) // 2, top))
        top += image.height
    return sheet

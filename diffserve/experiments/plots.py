"""Renders charts as PNG and as inline SVG, and image strips as PNG; the only module that imports matplotlib."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from io import BytesIO, StringIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator
from PIL import Image

from diffserve.experiments.charts import (
    Chart,
    ChartDot,
    ChartLine,
    common_measures,
    over_seconds,
    over_steps,
    strip_grid,
    time_measures,
)
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell
from diffserve.experiments.summary import CellSummary

DPI = 110
NUM_COLORS = 128  # palette size of a PNG; lines on a plain background look the same in a third of the file size
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}
"""Matplotlib's markers, and the characters that stand for them in the legend of an HTML page."""

_plotting = threading.Lock()  # matplotlib keeps its style for the whole process

INK, FAINT = "#1b1d21", "#70757d"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)  # palette by Okabe and Ito

MAX_TITLE_CHARS = 90
CELL_INCHES = 1.15

MIN_TICK_DISTANCE = 0.06
"""Smallest distance of labels at the axis of steps, as a share of its length."""

LARGER_PT = 3.0  # added width per line that covers a line

OVERVIEW_MEASURES = (Measure.EXACT, Measure.FRECHET, Measure.LATENT_RMSE, Measure.FRECHET_CONVERGED, Measure.PSNR_DB)
MAX_PANELS = 3
SHEET_COLORS = 256

HINT = "hint: "
"""Start of the SVG group ids that become tooltips."""

SVG_INCHES = (4.2, 2.7)
UPON = "Equal lines overlap, the wider one below."


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


def name_lines(figure: Figure, axes: Iterable[Axes]) -> None:
    """Add one legend above all axes with every name once."""
    legends = [panel.get_legend_handles_labels() for panel in axes]
    handles = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper center", ncols=5, frameon=False, fontsize=8,
        columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip


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
    """Render all charts as inline SVG under one legend, next to each other if there is space.

    The page must include :data:`diffserve.experiments.charts.STYLE` and define the CSS variables of its light or dark
    colors. All text from outside is escaped.
    """
    if not charts:
        return ""
    names = dict(sorted((line.number, line.name) for chart in charts for line in chart.lines))
    items = [
        f'<li><span aria-hidden="true" style="color: {_page_color(_color(number))}">{MARKERS[_marker(number)]}</span> '
        f"{escape(name)}</li>"
        for number, name in names.items()
    ]
    if any(chart.num_upon(line, dot) for chart in charts for line in chart.lines for dot in line.dots):
        items.append(f"<li>{UPON}</li>")
    return f'<ul class="legend">{"".join(items)}</ul><div class="charts">{"".join(map(_figure_html, charts))}</div>'


def _figure_html(chart: Chart) -> str:
    title = escape(f"{chart.measure.title[0].upper()}{chart.measure.title[1:]}")
    return (
        f"<figure><figcaption>{title} <small>({chart.measure.direction})</small></figcaption>"
        f"{_svg(chart, f'{title} over {escape(chart.x_title)}')}</figure>"
    )


def _svg(chart: Chart, label: str) -> str:
    """Render a chart as an SVG element that takes its text colors from the page; ``label`` is for screen readers."""
    file = StringIO()
    with style():
        figure = Figure(figsize=SVG_INCHES)
        figure.subplots_adjust(left=0.14, right=0.99, bottom=0.18, top=0.97)
        _draw_chart(figure.subplots(), chart)
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = file.getvalue()
    svg = re.sub(r"<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)  # it would apply to the page
    svg = re.sub(r"<svg[^>]*(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img" aria-label="{label}">', svg)
    svg = re.sub(rf'<g id="{HINT}([^"]*)">', r'<g class="dot"><title>\1</title>', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("xlink:href", "href")
    svg = re.sub(r"font-family: [^;]*; ", "", svg)  # inherited from the page
    return _page_color(svg)


def _page_color(text: str) -> str:
    """Replace the text colors in ``text`` by CSS variables of the page."""
    return text.replace(INK, "var(--body-text-color)").replace(FAINT, "var(--body-text-color-subdued)")


def _hint(name: str, dot: ChartDot, measure: Measure) -> str:
    """Return the tooltip of a dot."""
    interval, value = "", dot.value
    if value.low is not None and value.high is not None:
        interval = f" (95 % interval {measure.write_range(value.low, value.high)})"
    steps, seconds = dot.summary.cell.num_steps, dot.summary.alone_s
    return f"{name}, {steps} steps: {measure.write(value.value)}{interval}, {seconds:.2g} s"


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _marker(number: int) -> str:
    return list(MARKERS)[number % len(MARKERS)]


def curves(summaries: Sequence[CellSummary]) -> bytes:
    """Plot all measures over steps on a logarithmic axis with 95 % intervals, two panels per row."""
    return panels(over_steps(summaries, common_measures(summaries)), height_inches=3.1)


def quality_against_time(summaries: Sequence[CellSummary]) -> bytes:
    """Plot quality measures over seconds on a logarithmic axis, with the Pareto front and its knee."""
    return panels(over_seconds(summaries, time_measures(summaries)), height_inches=3.8)


def panels(charts: Sequence[Chart], *, height_inches: float, width_inches: float = 5.2, num_columns: int = 2) -> bytes:
    """Plot ``charts`` in rows of ``num_columns`` panels of the given size, under one legend."""
    columns = max(1, min(num_columns, len(charts)))
    rows = max(1, -(-len(charts) // columns))
    with style():
        figure = Figure(figsize=(width_inches * columns, height_inches * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for place, chart in zip(axes, charts, strict=False):
            separator = "\n" if num_columns > 2 else " "
            place.set_title(f"{chart.measure.title}{separator}({chart.measure.direction})", fontsize=9)
            _draw_chart(place, chart)
        for spare in axes[len(charts) :]:
            spare.set_visible(False)
        name_lines(figure, axes)
        return png(figure)


def _draw_chart(axes: Axes, chart: Chart) -> None:
    if chart.measure is Measure.EXACT:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}" if share < 1.001 else "")  # no label above 100 %
    for line in chart.lines:
        _draw_line(axes, line, chart)
    if chart.level is not None:
        axes.axhline(chart.level, color=FAINT, linewidth=1, linestyle=":", zorder=0, label="converged", gid="level")
    _draw_front(axes, chart)
    _scale_x(axes, chart)


def _draw_line(axes: Axes, line: ChartLine, chart: Chart) -> None:
    """Draw a line, wider where later lines cover it, so that it stays visible."""
    color, marker = _color(line.number), _marker(line.number)
    x, values = [dot.x for dot in line.dots], [dot.value for dot in line.dots]
    low = [estimate.value if estimate.low is None else estimate.low for estimate in values]
    high = [estimate.value if estimate.high is None else estimate.high for estimate in values]
    if chart.is_joined:
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    else:
        axes.vlines(x, low, high, color=color, linewidth=1, alpha=0.35)
    upon = [chart.num_upon(line, dot) for dot in line.dots]
    y, size = [estimate.value for estimate in values], 4 if chart.is_joined else 5
    for index, num_upon in enumerate(upon):
        axes.plot(
            x[index], y[index], color=color, marker=marker, markersize=size + LARGER_PT * num_upon, zorder=3,
            gid=HINT + _hint(line.name, line.dots[index], chart.measure),
        )  # fmt: skip
        if chart.is_joined and num_upon and min(upon[index : index + 2]) and index + 1 < len(upon):
            axes.plot(x[index : index + 2], y[index : index + 2], color=color, linewidth=1.4 + LARGER_PT * num_upon)
    axes.plot(
        x, y, color=color, marker=marker, markersize=size, linewidth=1.4, linestyle="-" if chart.is_joined else "",
        label=line.name,
    )  # fmt: skip


def _draw_front(axes: Axes, chart: Chart) -> None:
    """Draw the Pareto front as a staircase labeled with step counts, with a ring around the knee."""
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
    """Set a logarithmic x axis with ticks at the existing step counts or at round seconds."""
    axes.set_xscale("log")
    if chart.is_joined:
        steps = sorted({dot.x for dot in chart.dots})
        ticks = steps[:1]
        for x in steps:
            if x >= ticks[-1] * (steps[-1] / steps[0]) ** MIN_TICK_DISTANCE and x > ticks[-1]:
                ticks.append(x)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(chart.x_title)


def strip(title: str, thumbnails: Mapping[Cell, bytes]) -> bytes:
    """Combine the encoded images of ``thumbnails`` into one full-color PNG."""
    grid = strip_grid(thumbnails)
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


def overview(summaries: Sequence[CellSummary], prompt: str, thumbnails: Mapping[Cell, bytes]) -> bytes:
    """Plot up to three measures over steps, with the strip of one prompt below if there are ``thumbnails``.

    The PNG has 256 colors and is small enough to commit.
    """
    shown = [measure for measure in OVERVIEW_MEASURES if measure in common_measures(summaries)][:MAX_PANELS]
    width_inches = 10.5 / max(1, len(shown))
    parts = [panels(over_steps(summaries, shown), height_inches=3.1, width_inches=width_inches, num_columns=3)]
    parts += [strip(f"“{prompt}”, the same seed", thumbnails)] if thumbnails else []
    return to_palette(_stack(parts), SHEET_COLORS)


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

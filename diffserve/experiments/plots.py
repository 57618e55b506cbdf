"""Renders charts as PNG and as inline SVG, and image strips as PNG; ``chart_drawing`` draws a single chart."""

from __future__ import annotations

import re
import textwrap
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from io import BytesIO, StringIO
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from diffserve.experiments.chart_drawing import COLORS, FAINT, HINT, INK, add_chart
from diffserve.experiments.charts import (
    Chart,
    color_numbers,
    common_measures,
    headline,
    over_seconds,
    over_steps,
    strip_grid,
    time_measures,
)
from diffserve.experiments.labels import Box
from diffserve.experiments.plan import Cell
from diffserve.experiments.summary import CellSummary

DPI = 110
NUM_COLORS = 256  # palette size of a PNG; lines on a plain background look the same in a third of the file size

_plotting = threading.Lock()  # matplotlib keeps its style for the whole process

MAX_TITLE_CHARS = 90
CELL_INCHES = 1.15

PANEL_INCHES = (5.4, 3.7)
HEADLINE_INCHES = (4.6, 4.1)
SVG_INCHES = (5.0, 3.4)


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
        add_chart(figure, chart, Box(0, 0, *SVG_INCHES), has_title=False)
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
            add_chart(figure, chart, Box(left, bottom, left + width, bottom + height), has_title=True)
        return png(figure)


ROW_LINE_CHARS: Final = 20
ROW_CHARS: Final = 3 * ROW_LINE_CHARS
"""Characters of the label of a row of images, on up to three lines."""


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
            label = textwrap.shorten(name, ROW_CHARS, placeholder="…")
            row[0].set_ylabel(textwrap.fill(label, ROW_LINE_CHARS), fontsize=8)
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

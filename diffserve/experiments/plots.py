"""The plots of a sweep, as PNG: curves over steps, quality against time, and the same seed with growing steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator, PercentFormatter
from PIL import Image

from diffserve.experiments.estimates import Measure
from diffserve.experiments.front import Point, knee, pareto_front
from diffserve.experiments.plan import Cell
from diffserve.experiments.summary import CellSummary

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DPI = 110

Series = tuple[str, float]
"""(sampler, guidance): one line of a plot."""


@contextmanager
def style() -> Iterator[None]:
    """Our style and no other; characters that the font lacks are drawn as boxes without a word."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rc("font", size=9)
        matplotlib.rc("axes", grid=True)
        matplotlib.rc("axes.spines", top=False, right=False)
        matplotlib.rc("grid", alpha=0.3)
        matplotlib.rc("text", parse_math=False)  # a prompt may hold dollars
        yield


def curves(summaries: Sequence[CellSummary]) -> bytes:
    """Every measure over steps on a logarithmic axis, one line for each sampler and guidance, with 95 % intervals."""
    measures = measured(summaries)
    columns = 2 if len(measures) > 1 else 1
    rows = -(-len(measures) // columns)
    with style():
        figure = Figure(figsize=(5.2 * columns, 3.1 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for place, measure in zip(axes, measures, strict=False):
            _curve(place, measure, summaries)
        for spare in axes[len(measures) :]:
            spare.set_visible(False)
        _legend(figure, axes)
        return _png(figure)


def measured(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """The measures that every cell has; converged cells, which have no distance to themselves, do not count."""
    cells = [one for one in summaries if not one.cell.is_reference]
    return tuple(measure for measure in Measure if all(one.value(measure) for one in cells))


def series_of(cells: Sequence[Cell]) -> dict[Series, str]:
    """Every line and its name, which says the guidance only where there are several."""
    several = len({cell.guidance_scale for cell in cells}) > 1
    keys = dict.fromkeys((cell.sampler, cell.guidance_scale) for cell in cells if not cell.is_reference)
    return {key: f"{key[0]}, guidance {key[1]:g}" if several else key[0] for key in keys}


def _curve(axes: Axes, measure: Measure, summaries: Sequence[CellSummary]) -> None:
    lines = series_of([one.cell for one in summaries])
    for number, (key, name) in enumerate(lines.items()):
        found = [(one.cell.num_steps, one.value(measure)) for one in summaries if _belongs(one, key)]
        points = sorted((steps, value) for steps, value in found if value is not None)
        steps, values = [n for n, _ in points], [value.value for _, value in points]
        color, marker = _look(number)
        axes.plot(steps, values, color=color, marker=marker, markersize=4, linewidth=1.4, label=name)
        low = [value.value if value.low is None else value.low for _, value in points]
        high = [value.value if value.high is None else value.high for _, value in points]
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    _converged_line(axes, measure, summaries)
    _quality_axis(axes, measure)
    _log_steps(axes, sorted({one.cell.num_steps for one in summaries if not one.cell.is_reference}))
    axes.set_xlabel("steps")


def _quality_axis(axes: Axes, measure: Measure) -> None:
    better = "higher" if measure.more_is_better else "lower"
    axes.set_title(f"{measure.title} ({better} is better)", fontsize=9)
    if measure is Measure.EXACT:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))


def _converged_line(axes: Axes, measure: Measure, summaries: Sequence[CellSummary]) -> None:
    """Where the converged pictures themselves stand, if that can be said and is one value."""
    values = [value for one in summaries if one.cell.is_reference and (value := one.value(measure)) is not None]
    if len(values) == 1:
        axes.axhline(values[0].value, color="0.5", linewidth=1, linestyle=":", zorder=0)


def _log_steps(axes: Axes, steps: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")


def time_measures(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """The measures of quality that are drawn against time: at most two, of the pictures themselves if that is known."""
    wanted = (Measure.EXACT, Measure.FRECHET, Measure.PSNR_DB, Measure.FRECHET_CONVERGED)
    return tuple(measure for measure in wanted if measure in measured(summaries))[:2]


def points_of(summaries: Sequence[CellSummary], measure: Measure) -> tuple[Point, ...]:
    """Every cell as a time (one image alone, seconds) and a quality (more is better)."""
    sign = 1 if measure.more_is_better else -1
    found = ((one, one.value(measure)) for one in summaries if not one.cell.is_reference)
    return tuple(Point(one.cell.slug, one.alone_s, sign * value.value) for one, value in found if value is not None)


def quality_against_time(summaries: Sequence[CellSummary]) -> bytes:
    """Quality over the seconds of one image, every cell with its interval, the Pareto front and its knee."""
    measures = time_measures(summaries)
    with style():
        figure = Figure(figsize=(5.6 * max(1, len(measures)), 4.2), layout="constrained")
        axes = figure.subplots(1, max(1, len(measures)), squeeze=False).ravel()
        for place, measure in zip(axes, measures, strict=False):
            _against_time(place, measure, summaries)
        _legend(figure, axes)
        return _png(figure)


def _against_time(axes: Axes, measure: Measure, summaries: Sequence[CellSummary]) -> None:
    for number, (key, name) in enumerate(series_of([one.cell for one in summaries]).items()):
        color, marker = _look(number)
        for index, one in enumerate(one for one in summaries if _belongs(one, key)):
            value = one.value(measure)
            if value is None:
                continue
            low, high = (value.value if end is None else end for end in (value.low, value.high))
            axes.plot([one.alone_s] * 2, [low, high], color=color, linewidth=1, alpha=0.5)
            label = name if index == 0 else None
            axes.plot([one.alone_s], [value.value], color=color, marker=marker, linestyle="", markersize=5, label=label)
            axes.annotate(
                str(one.cell.num_steps), (one.alone_s, value.value), (4, 3), textcoords="offset points", fontsize=7
            )
    _front(axes, measure, summaries)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("seconds of one image, alone; the numbers are steps")
    _quality_axis(axes, measure)


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend above all axes, every name once."""
    named: dict[str, Artist] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(list(named.values()), list(named), loc="outside upper center", ncols=5, frameon=False)


def _front(axes: Axes, measure: Measure, summaries: Sequence[CellSummary]) -> None:
    sign = 1 if measure.more_is_better else -1
    front = pareto_front(points_of(summaries, measure))
    axes.plot(
        [point.seconds for point in front], [sign * point.quality for point in front],
        color="0.3", linewidth=1, linestyle="--", drawstyle="steps-post", label="Pareto front", zorder=0,
    )  # fmt: skip
    if (best := knee(front)) is not None:
        axes.plot(
            [best.seconds], [sign * best.quality], marker="o", markersize=14, markerfacecolor="none",
            markeredgecolor="0.2", linestyle="", label="its knee",
        )  # fmt: skip


def strip(prompt: str, thumbnails: Mapping[Cell, bytes]) -> bytes:
    """One prompt and seed with growing steps: a row for each sampler and guidance, the converged picture at its end."""
    lines = series_of(list(thumbnails))
    steps = sorted({cell.num_steps for cell in thumbnails if not cell.is_reference})
    with style():
        figure = Figure(figsize=(1.15 * (len(steps) + 1) + 0.9, 1.2 * len(lines) + 0.5), layout="constrained")
        figure.suptitle(prompt if len(prompt) < 90 else f"{prompt[:87]}...", fontsize=9)
        grid = figure.subplots(len(lines), len(steps) + 1, squeeze=False)
        for axes, heading in zip(grid[0], _headings(steps, thumbnails), strict=True):
            axes.set_title(heading, fontsize=7)
        for row, (key, name) in zip(grid, lines.items(), strict=True):
            cells = {cell.num_steps: cell for cell in thumbnails if _is_of(cell, key)}
            for axes, n in zip(row, steps, strict=False):
                _show(axes, thumbnails.get(cells[n]) if n in cells else None)
            row[0].set_ylabel(name, fontsize=8)
            _show_converged(row[-1], key[1], thumbnails)
        return _png(figure)


def _headings(steps: Sequence[int], thumbnails: Mapping[Cell, bytes]) -> list[str]:
    converged = [cell.num_steps for cell in thumbnails if cell.is_reference]
    return [*(f"{n} steps" for n in steps), f"converged ({converged[0]})" if converged else ""]


def _show_converged(axes: Axes, scale: float, thumbnails: Mapping[Cell, bytes]) -> None:
    found = [cell for cell in thumbnails if cell.is_reference and cell.guidance_scale == scale]
    _show(axes, thumbnails[found[0]] if found else None)


def _show(axes: Axes, png: bytes | None) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if png is not None:
        axes.imshow(Image.open(BytesIO(png)).convert("RGB"), interpolation="lanczos")


def _belongs(one: CellSummary, key: Series) -> bool:
    return _is_of(one.cell, key)


def _is_of(cell: Cell, key: Series) -> bool:
    return not cell.is_reference and (cell.sampler, cell.guidance_scale) == key


def _look(number: int) -> tuple[str, str]:
    """Colour and marker of a line."""
    return COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]


def _png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": "diffserve"})
    return file.getvalue()

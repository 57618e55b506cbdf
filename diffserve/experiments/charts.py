"""Chart data of an experiment: charts over steps, evaluations and seconds, Pareto front, knee, and image grids.

:mod:`diffserve.experiments.plots` renders charts as PNG and as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Final, NamedTuple

from diffserve.experiments.estimates import PROMPT_MEASURES, Measure
from diffserve.experiments.plan import Cell, CellLine
from diffserve.experiments.series import (
    NEAR,
    NO_NAMES,
    ChartDot,
    ChartLine,
    Names,
    line_names,
    line_of,
    lines_of,
    merge,
    steps_text,
    value_range,
)
from diffserve.experiments.summary import CellSummary

MAX_COLORED: Final = 7
"""Number of colors; all further lines are gray."""

LEAST_SLOW: Final = 1.4
"""Evaluations per step from which a sampler counts as one with two; Heun has 1.5 with four steps."""

RANKING: Final = (Measure.PSNR_DB, Measure.LATENT_RMSE, Measure.EXACT, *PROMPT_MEASURES, Measure.FRECHET)
"""Measures that may decide which lines are colored; the first that exists does."""

HEADLINE_QUALITY: Final = (Measure.EXACT, *PROMPT_MEASURES, Measure.PSNR_DB)
LEAST_FRONT: Final = 3
"""Number of points of a Pareto front that is worth showing first."""

STYLE: Final = Path(__file__).with_name("charts.css")
"""CSS of charts in an HTML page, which must define the variables that it uses."""


class Chart(NamedTuple):
    """One measure over steps or network evaluations (dots joined by lines), or over seconds.

    Attributes:
        measure: The measure on the y axis.
        axis: The quantity on the x axis, for the title.
        x_title: Title of the x axis.
        lines: The lines, merged where they coincide.
        is_over_time: Whether the x axis has seconds.
        level: Value of the converged images, drawn across the chart.
        front: Pareto front of quality and time, the fastest first.
        knee: Point of the front after which more time has the smallest benefit.
    """

    measure: Measure
    axis: str
    x_title: str
    lines: tuple[ChartLine, ...]
    is_over_time: bool = False
    level: float | None = None
    front: tuple[ChartDot, ...] = ()
    knee: ChartDot | None = None

    @property
    def dots(self) -> list[ChartDot]:
        """The dots of all drawn lines."""
        return [dot for line in self.lines for dot in line.dots]

    def best(self, dots: Sequence[ChartDot]) -> ChartDot:
        """Return the dot with the best value, the fastest of equal ones."""
        sign = 1 if self.measure.more_is_better else -1
        return max(dots, key=lambda dot: (sign * dot.value.value, -dot.x))

    def front_labels(self) -> list[ChartDot]:
        """Return the points of the front to label, without those whose gain over the one before cannot be seen."""
        shown: list[ChartDot] = []
        for dot in self.front:
            gain = math.inf if not shown else abs(dot.value.value - shown[-1].value.value)
            if gain > NEAR * value_range(self.lines, self.measure) or dot == self.knee:
                shown.append(dot)
        return shown

    @property
    def title(self) -> str:
        """Title with the measure, its unit, and the x axis."""
        unit = " (dB)" if self.measure is Measure.PSNR_DB else ""
        return f"{self.measure.title[0].upper()}{self.measure.title[1:]}{unit} over {self.axis}"


def over_steps(
    summaries: Sequence[CellSummary], measures: Iterable[Measure], names: Names = NO_NAMES
) -> tuple[Chart, ...]:
    """Build a chart over steps for each of ``measures`` that some cell has."""
    colors = color_numbers(summaries)
    charts = []
    for measure in measures:
        lines = lines_of(summaries, measure, names, lambda summary: float(summary.cell.num_steps), colors)
        lines = merge(lines, measure)
        level = _level(summaries, measure)
        charts.append(Chart(measure, "steps", "steps" + _level_note(level), lines, level=level))
    return tuple(chart for chart in charts if chart.lines)


def over_evaluations(
    summaries: Sequence[CellSummary], measures: Iterable[Measure], names: Names = NO_NAMES
) -> tuple[Chart, ...]:
    """Build a chart over network evaluations per image for each of ``measures`` that some cell has.

    With guidance, an evaluation is a pair of UNet rows. Cells with more evaluations than some sampler reaches are left
    out, so that all lines of built-in samplers have the same end.
    """
    colors, title = color_numbers(summaries), "network evaluations per image"
    slow = [name for line, name in line_names((s.cell for s in summaries), names).items() if _is_slow(summaries, line)]
    x_title = f"{title}\n(two per step: {', '.join(slow)})" if slow else title
    charts = []
    for measure in measures:
        lines = lines_of(summaries, measure, names, num_evaluations, colors)
        lines = tuple(_up_to(_common_end(lines), lines))
        lines = merge(lines, measure)
        level = _level(summaries, measure)
        charts.append(Chart(measure, "network evaluations", x_title + _level_note(level), lines, level=level))
    return tuple(chart for chart in charts if chart.lines)


def over_seconds(
    summaries: Sequence[CellSummary], measures: Iterable[Measure], names: Names = NO_NAMES
) -> tuple[Chart, ...]:
    """Build a chart over the seconds per image for each of ``measures`` that some cell has."""
    colors = color_numbers(summaries)
    charts = []
    for measure in measures:
        lines = lines_of(summaries, measure, names, lambda summary: summary.alone_s, colors)
        front = pareto_front([dot for line in lines for dot in line.dots], more_is_better=measure.more_is_better)
        title = "seconds per image"
        x_title = f"{title} (dashed: Pareto front{'; circle: knee' if knee(front) else ''})"
        charts.append(Chart(measure, title, x_title, lines, is_over_time=True, front=front, knee=knee(front)))
    return tuple(chart for chart in charts if chart.lines)


def headline(summaries: Sequence[CellSummary], names: Names = NO_NAMES) -> tuple[Chart, ...]:
    """Build the charts that summarize a sweep: closeness over network evaluations, and quality over seconds.

    Quality is the first measure of which the Pareto front has some points; where the fastest cell already has the best
    value, it tells nothing.
    """
    common = common_measures(summaries)
    closeness = [measure for measure in (*RANKING, *common) if measure in common][:1]
    quality = over_seconds(summaries, [measure for measure in HEADLINE_QUALITY if measure in common], names)
    informative = [chart for chart in quality if len(chart.front) >= LEAST_FRONT] or quality
    return (*over_evaluations(summaries, closeness, names), *informative[:1])


def color_numbers(summaries: Sequence[CellSummary]) -> dict[CellLine, int]:
    """Choose the lines to color and number their colors.

    Learned samplers come first, then lines on a Pareto front, then those with the best mean over the step counts. Lines
    that coincide have the same color.
    """
    measure = next((measure for measure in RANKING if any(summary.value(measure) for summary in summaries)), None)
    if measure is None:
        return {}
    sign = 1 if measure.more_is_better else -1
    lines = lines_of(summaries, measure, NO_NAMES, lambda summary: float(summary.cell.num_steps))
    on_front = {
        line_of(dot.summary.cell)
        for front_measure in (measure, *time_measures(summaries)[:1])
        for dot in _front(summaries, front_measure)
    }

    def rank(line: ChartLine) -> tuple[bool, bool, float]:
        is_on_front = any(line_of(dot.summary.cell) in on_front for dot in line.cells_at(0))
        return not line.is_learned, not is_on_front, -sign * fmean(dot.value.value for dot in line.dots)

    ranked = sorted(merge(lines, measure), key=rank)
    return {
        line_of(dot.summary.cell): number
        for number, line in enumerate(ranked[:MAX_COLORED])
        for dot in line.cells_at(0)
    }


def _front(summaries: Sequence[CellSummary], measure: Measure) -> tuple[ChartDot, ...]:
    """Return the Pareto front of a measure and the seconds per image."""
    lines = lines_of(summaries, measure, NO_NAMES, lambda summary: summary.alone_s)
    return pareto_front([dot for line in lines for dot in line.dots], more_is_better=measure.more_is_better)


def num_evaluations(summary: CellSummary) -> float:
    """Return the network evaluations per image, which are pairs of rows with guidance."""
    return summary.evaluations / (2 if summary.cell.guidance_scale > 1 else 1)


def _is_slow(summaries: Sequence[CellSummary], line: CellLine) -> bool:
    """Return whether a sampler evaluates the network about twice per step."""
    cells = [summary for summary in summaries if not summary.cell.is_reference and line_of(summary.cell) == line]
    return fmean(num_evaluations(summary) / summary.cell.num_steps for summary in cells) > LEAST_SLOW


def _common_end(lines: Sequence[ChartLine]) -> float:
    """Return the largest x that every line reaches, apart from lines of learned samplers, which end early.

    It is not smaller than the start of any line, so that each line has a dot.
    """
    ends = [line.dots[-1].x for line in lines if not line.is_learned]
    return max(min(ends, default=0.0), max((line.dots[0].x for line in lines), default=0.0))


def _up_to(end: float, lines: Iterable[ChartLine]) -> Iterable[ChartLine]:
    """Leave out dots with an x larger than ``end``, and lines without other dots."""
    for line in lines:
        if dots := tuple(dot for dot in line.dots if dot.x <= end):
            yield line._replace(dots=dots)


def _level(summaries: Sequence[CellSummary], measure: Measure) -> float | None:
    """Return the value of the converged images if there is a single set of them."""
    levels = [
        estimate.value for summary in summaries if summary.cell.is_reference and (estimate := summary.value(measure))
    ]
    return levels[0] if len(levels) == 1 else None


def _level_note(level: float | None) -> str:
    return "" if level is None else " (dotted: converged images)"


def common_measures(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """Return the measures that every cell has, apart from converged cells, which have no distance to themselves."""
    cells = [summary for summary in summaries if not summary.cell.is_reference]
    return tuple(measure for measure in Measure if all(summary.value(measure) for summary in cells))


def time_measures(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """Return at most two quality measures to plot against time, preferring those of the images themselves."""
    candidates = (Measure.EXACT, *PROMPT_MEASURES, Measure.FRECHET, Measure.PSNR_DB, Measure.FRECHET_CONVERGED)
    return tuple(measure for measure in candidates if measure in common_measures(summaries))[:2]


def pareto_front(dots: Iterable[ChartDot], *, more_is_better: bool) -> tuple[ChartDot, ...]:
    """Return the Pareto-optimal dots, the fastest first; of identical dots only the first is included."""
    sign = 1 if more_is_better else -1
    front: list[ChartDot] = []
    for dot in sorted(dots, key=lambda dot: (dot.x, -sign * dot.value.value)):
        if not front or sign * dot.value.value > sign * front[-1].value.value:
            front.append(dot)
    return tuple(front)


def knee(front: Sequence[ChartDot]) -> ChartDot | None:
    """Return the knee of a Pareto front: the dot farthest on the better side of the line between its ends.

    Time is on a logarithmic axis and both axes are scaled to 0..1, following Satopaa et al. 2011, "Finding a Kneedle in
    a Haystack".

    Returns:
        The knee, or ``None`` for fewer than three dots or if no dot is on the better side of the line.
    """
    if len(front) < 3:
        return None
    first, last = front[0], front[-1]
    width = math.log(last.x / first.x)
    height = last.value.value - first.value.value  # negative if less is better

    def distance(dot: ChartDot) -> float:
        return (dot.value.value - first.value.value) / height - math.log(dot.x / first.x) / width

    best = max(front[1:-1], key=distance)
    return best if distance(best) > 0 else None


class StripGrid(NamedTuple):
    """Image grid of one prompt and seed.

    There is a row for each combination of settings, a column for each step count, and a last column for the converged
    image if there is one. An entry is ``None`` if its cell has no image.

    Attributes:
        heads: Titles of the columns.
        names: Titles of the rows.
        rows: Encoded images by row and column.
        num_first: Number of rows to show at first; a page folds the others.
        differences: Encoded difference maps in the order of ``rows``, empty without converged images.
    """

    heads: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[bytes | None, ...], ...]
    num_first: int
    differences: tuple[tuple[bytes | None, ...], ...] = ()


def strip_grid(
    thumbnails: Mapping[Cell, bytes | None], colors: Mapping[CellLine, int] = MappingProxyType({})
) -> StripGrid:
    """Arrange ``thumbnails`` by increasing steps, with the converged image at the end of each row.

    Args:
        thumbnails: Encoded images; ``None`` stays in the grid.
        colors: Color numbers of the lines whose rows come first; empty if all rows are equally important.
    """
    lines = line_names(thumbnails)
    order = sorted(lines, key=lambda line: colors.get(line, len(colors)))
    steps = sorted({cell.num_steps for cell in thumbnails if not cell.is_reference})
    converged = {cell.target: cell for cell in thumbnails if cell.is_reference}
    by_line = {(line_of(cell), cell.num_steps): cell for cell in thumbnails if not cell.is_reference}
    rows = []
    for line in order:
        cells = [by_line.get((line, n)) for n in steps]
        images = (None if cell is None else thumbnails[cell] for cell in cells)
        reference = next((converged.get(cell.target) for cell in cells if cell is not None), None)
        rows.append((*images, *([thumbnails[reference] if reference else None] if converged else [])))
    heads = [steps_text(n) for n in steps]
    heads += [f"converged ({next(iter(converged.values())).num_steps})"] if converged else []
    num_first = sum(line in colors for line in order) or len(order)
    return StripGrid(tuple(heads), tuple(lines[line] for line in order), tuple(rows), num_first)

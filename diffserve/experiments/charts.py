"""Chart data of an experiment: lines, Pareto front, knee point, and the layout of image grids.

:mod:`diffserve.experiments.plots` renders charts as PNG and as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from diffserve.experiments.axes import write_settings
from diffserve.experiments.estimates import PROMPT_MEASURES, Estimate, Measure
from diffserve.experiments.plan import Cell, CellLine
from diffserve.experiments.summary import CellSummary

Names = Mapping[str, str]
"""Display names by canonical sampler name."""

NO_NAMES: Names = MappingProxyType({})

NEAR: Final = 0.01
"""Dots within this distance hide each other: a share of the chart's height, and a log ratio of seconds or steps."""

STYLE: Final = Path(__file__).with_name("charts.css")
"""CSS of charts in an HTML page, which must define the variables that it uses."""


class ChartDot(NamedTuple):
    """A cell's position on a chart."""

    x: float
    value: Estimate
    summary: CellSummary


class ChartLine(NamedTuple):
    """The dots of the cells that differ in their steps only, ordered by steps; ``number`` selects color and marker."""

    number: int
    name: str
    dots: tuple[ChartDot, ...]


class Chart(NamedTuple):
    """One measure over steps (dots joined by lines) or over seconds.

    Attributes:
        level: Value of the converged images, drawn across the chart.
        front: Pareto front of quality and time, the fastest first.
        knee: Point of the front after which more time has the smallest benefit.
    """

    measure: Measure
    x_title: str
    lines: tuple[ChartLine, ...]
    is_joined: bool
    level: float | None = None
    front: tuple[ChartDot, ...] = ()
    knee: ChartDot | None = None

    @property
    def dots(self) -> list[ChartDot]:
        """The dots of all lines."""
        return [dot for line in self.lines for dot in line.dots]

    def num_upon(self, line: ChartLine, dot: ChartDot) -> int:
        """Count the lines drawn after ``line`` that have a dot close enough to hide ``dot``."""
        values = [chart_dot.value.value for chart_dot in self.dots]
        height = 1.0 if self.measure is Measure.EXACT else max(values) - min(values)
        later = self.lines[self.lines.index(line) + 1 :]
        return sum(any(_overlaps(other, dot, height) for other in later_line.dots) for later_line in later)


def _overlaps(dot: ChartDot, other: ChartDot, height: float) -> bool:
    """Return whether two dots look like one in a chart whose values span ``height``."""
    return abs(math.log(dot.x / other.x)) <= NEAR and abs(dot.value.value - other.value.value) <= NEAR * height


def over_steps(
    summaries: Sequence[CellSummary], measures: Iterable[Measure], names: Names = NO_NAMES
) -> tuple[Chart, ...]:
    """Build a chart over steps for each of ``measures`` that some cell has."""
    charts = []
    for measure in measures:
        lines = _lines(summaries, measure, names, lambda summary: float(summary.cell.num_steps))
        levels = [
            estimate.value
            for summary in summaries
            if summary.cell.is_reference and (estimate := summary.value(measure))
        ]
        level = levels[0] if len(levels) == 1 else None
        charts.append(Chart(measure, "steps", lines, is_joined=True, level=level))
    return tuple(chart for chart in charts if chart.lines)


def over_seconds(
    summaries: Sequence[CellSummary], measures: Iterable[Measure], names: Names = NO_NAMES
) -> tuple[Chart, ...]:
    """Build a chart over the seconds per image for each of ``measures`` that some cell has."""
    charts = []
    for measure in measures:
        lines = _lines(summaries, measure, names, lambda summary: summary.alone_s)
        front = pareto_front([dot for line in lines for dot in line.dots], more_is_better=measure.more_is_better)
        title = "seconds per image (numbers: steps)"
        charts.append(Chart(measure, title, lines, is_joined=False, front=front, knee=knee(front)))
    return tuple(chart for chart in charts if chart.lines)


def common_measures(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """Return the measures that every cell has, apart from converged cells, which have no distance to themselves."""
    cells = [summary for summary in summaries if not summary.cell.is_reference]
    return tuple(measure for measure in Measure if all(summary.value(measure) for summary in cells))


def time_measures(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """Return at most two quality measures to plot against time, preferring those of the images themselves."""
    candidates = (Measure.EXACT, *PROMPT_MEASURES, Measure.FRECHET, Measure.PSNR_DB, Measure.FRECHET_CONVERGED)
    return tuple(measure for measure in candidates if measure in common_measures(summaries))[:2]


def line_names(cells: Iterable[Cell], names: Names = NO_NAMES) -> dict[CellLine, str]:
    """Return the lines of ``cells`` with their names, which include the guidance only if there are several."""
    cells = list(cells)
    several = len({cell.guidance_scale for cell in cells}) > 1
    keys = dict.fromkeys(cell.line for cell in cells if not cell.is_reference)
    return {
        (sampler, scale, settings): names.get(sampler, sampler)
        + (f", guidance {scale:g}" if several else "")
        + write_settings(settings)
        for sampler, scale, settings in keys
    }


def _lines(
    summaries: Sequence[CellSummary], measure: Measure, names: Names, x: Callable[[CellSummary], float]
) -> tuple[ChartLine, ...]:
    lines = []
    for number, (key, name) in enumerate(line_names((summary.cell for summary in summaries), names).items()):
        compared = (summary for summary in summaries if not summary.cell.is_reference)
        line_summaries = [summary for summary in compared if summary.cell.line == key]
        dots = [
            ChartDot(x(summary), value, summary)
            for summary in sorted(line_summaries, key=lambda summary: summary.cell.num_steps)
            if (value := summary.value(measure)) is not None
        ]
        if dots:
            lines.append(ChartLine(number, name, tuple(dots)))
    return tuple(lines)


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
    """

    heads: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[bytes | None, ...], ...]


def strip_grid(thumbnails: Mapping[Cell, bytes]) -> StripGrid:
    """Arrange ``thumbnails`` by increasing steps, with the converged image at the end of each row."""
    lines = line_names(thumbnails)
    steps = sorted({cell.num_steps for cell in thumbnails if not cell.is_reference})
    converged = {cell.target: cell for cell in thumbnails if cell.is_reference}
    by_line = {(cell.line, cell.num_steps): cell for cell in thumbnails if not cell.is_reference}
    rows = []
    for line in lines:
        cells = [by_line.get((line, n)) for n in steps]
        images = (None if cell is None else thumbnails[cell] for cell in cells)
        reference = next((converged.get(cell.target) for cell in cells if cell is not None), None)
        rows.append((*images, *([thumbnails[reference] if reference else None] if converged else [])))
    heads = [f"{n} steps" if n > 1 else "1 step" for n in steps]
    heads += [f"converged ({next(iter(converged.values())).num_steps})"] if converged else []
    return StripGrid(tuple(heads), tuple(lines.values()), tuple(rows))

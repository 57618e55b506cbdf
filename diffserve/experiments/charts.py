"""The charts of an experiment as data, the front of a chart and its knee, and its pictures in rows and columns.

Drawn as SVG by :mod:`diffserve.experiments.svg` and as PNG by ``plots``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.plan import Cell
from diffserve.experiments.summary import CellSummary

Names = Mapping[str, str]
"""From a sampler as cells write it to what people read."""

NO_NAMES: Names = MappingProxyType({})

NEAR: Final = 0.01
"""Dots that are no farther apart hide each other: a share of the height, and of the seconds or steps."""

CellLine = tuple[str, float]
"""(sampler, guidance): one line of a chart, one row of a grid of pictures."""


class ChartDot(NamedTuple):
    """A cell on a chart."""

    x: float
    value: Estimate
    summary: CellSummary


class ChartLine(NamedTuple):
    """A sampler at one guidance: its dots in the order of steps, and its number, which decides how it looks."""

    number: int
    name: str
    dots: tuple[ChartDot, ...]


class Chart(NamedTuple):
    """One measure over steps, joined, or over seconds.

    level  where the converged pictures stand, across the chart
    front  what cannot be had both better and faster, the fastest first
    knee   after which time buys least
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
        """Of all lines."""
        return [dot for line in self.lines for dot in line.dots]

    def num_upon(self, line: ChartLine, dot: ChartDot) -> int:
        """How many of the lines after ``line``, which are drawn upon it, have a dot so near to ``dot`` that it would be
        hidden."""
        values = [each.value.value for each in self.dots]
        height = 1.0 if self.measure is Measure.EXACT else max(values) - min(values)
        later = self.lines[self.lines.index(line) + 1 :]
        return sum(any(_is_upon(other, dot, height) for other in one.dots) for one in later)


def _is_upon(one: ChartDot, other: ChartDot, height: float) -> bool:
    """Whether both stand in one place of a chart whose values span ``height``, as far as can be seen."""
    return abs(math.log(one.x / other.x)) <= NEAR and abs(one.value.value - other.value.value) <= NEAR * height


def over_steps(
    summaries: Sequence[CellSummary], measures: Iterable[Measure], names: Names = NO_NAMES
) -> tuple[Chart, ...]:
    """A chart over steps for each of ``measures`` that anything has."""
    charts = []
    for measure in measures:
        lines = _lines(summaries, measure, names, lambda one: float(one.cell.num_steps))
        levels = [found.value for one in summaries if one.cell.is_reference and (found := one.value(measure))]
        level = levels[0] if len(levels) == 1 else None
        charts.append(Chart(measure, "steps", lines, is_joined=True, level=level))
    return tuple(chart for chart in charts if chart.lines)


def over_seconds(
    summaries: Sequence[CellSummary], measures: Iterable[Measure], names: Names = NO_NAMES
) -> tuple[Chart, ...]:
    """A chart over the seconds of one picture for each of ``measures`` that anything has."""
    charts = []
    for measure in measures:
        lines = _lines(summaries, measure, names, lambda one: one.alone_s)
        dots = {dot.summary.cell.slug: dot for line in lines for dot in line.dots}
        sign = 1 if measure.more_is_better else -1
        front = pareto_front([Point(name, dot.x, sign * dot.value.value) for name, dot in dots.items()])
        best = knee(front)
        charts.append(
            Chart(
                measure,
                "seconds of one picture (numbers: steps)",
                lines,
                is_joined=False,
                front=tuple(dots[point.name] for point in front),
                knee=None if best is None else dots[best.name],
            )
        )
    return tuple(chart for chart in charts if chart.lines)


def common_measures(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """The measures that every cell has; converged cells, which have no distance to themselves, do not count."""
    cells = [one for one in summaries if not one.cell.is_reference]
    return tuple(measure for measure in Measure if all(one.value(measure) for one in cells))


def time_measures(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """The measures of quality that are drawn against time: at most two, of the pictures themselves if that is known."""
    wanted = (Measure.EXACT, Measure.FRECHET, Measure.PSNR_DB, Measure.FRECHET_CONVERGED)
    return tuple(measure for measure in wanted if measure in common_measures(summaries))[:2]


def line_names(cells: Iterable[Cell], names: Names = NO_NAMES) -> dict[CellLine, str]:
    """Every line of ``cells`` and its name, which says the guidance only where there are several."""
    cells = list(cells)
    several = len({cell.guidance_scale for cell in cells}) > 1
    keys = dict.fromkeys((cell.sampler, cell.guidance_scale) for cell in cells if not cell.is_reference)
    return {key: names.get(key[0], key[0]) + (f", guidance {key[1]:g}" if several else "") for key in keys}


def _lines(
    summaries: Sequence[CellSummary], measure: Measure, names: Names, x: Callable[[CellSummary], float]
) -> tuple[ChartLine, ...]:
    lines = []
    for number, (key, name) in enumerate(line_names((one.cell for one in summaries), names).items()):
        cells = (one for one in summaries if not one.cell.is_reference)
        own = [one for one in cells if (one.cell.sampler, one.cell.guidance_scale) == key]
        dots = [
            ChartDot(x(one), value, one)
            for one in sorted(own, key=lambda one: one.cell.num_steps)
            if (value := one.value(measure)) is not None
        ]
        if dots:
            lines.append(ChartLine(number, name, tuple(dots)))
    return tuple(lines)


class Point(NamedTuple):
    """Something with a time and a quality; more quality is better."""

    name: str
    seconds: float
    quality: float


def pareto_front(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other beats in one and equals in the other, the fastest first.

    Of points equal in both, the first is taken.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.seconds, -point.quality)):
        if not front or point.quality > front[-1].quality:
            front.append(point)
    return tuple(front)


def knee(front: Sequence[Point]) -> Point | None:
    """The point of a front after which time buys least: farthest above the line between its ends.

    Time is taken as its logarithm and both axes are scaled to 0..1 (the idea of Satopaa et al. 2011, "Finding a Kneedle
    in a Haystack"). ``None`` for fewer than three points, or when none lies above the line.
    """
    if len(front) < 3:
        return None
    first, last = front[0], front[-1]
    width = math.log(last.seconds / first.seconds)
    height = last.quality - first.quality

    def above(point: Point) -> float:
        return (point.quality - first.quality) / height - math.log(point.seconds / first.seconds) / width

    best = max(front[1:-1], key=above)
    return best if above(best) > 0 else None


class StripGrid(NamedTuple):
    """Pictures of one prompt and seed: a row for each sampler and guidance, a column for each number of steps, and one
    for the converged picture where there is any. ``None`` where a cell has no picture."""

    heads: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[bytes | None, ...], ...]


def strip_grid(thumbnails: Mapping[Cell, bytes]) -> StripGrid:
    """Lay ``thumbnails`` out with growing steps, the converged picture at the end of every row."""
    lines = line_names(thumbnails)
    steps = sorted({cell.num_steps for cell in thumbnails if not cell.is_reference})
    converged = {cell.guidance_scale: cell for cell in thumbnails if cell.is_reference}
    rows = []
    for sampler, scale in lines:
        own = (thumbnails.get(Cell(sampler, n, scale)) for n in steps)
        end = converged.get(scale)
        rows.append((*own, *([thumbnails[end] if end else None] if converged else [])))
    heads = [f"{n} steps" if n > 1 else "1 step" for n in steps]
    heads += [f"converged ({next(iter(converged.values())).num_steps})"] if converged else []
    return StripGrid(tuple(heads), tuple(lines.values()), tuple(rows))

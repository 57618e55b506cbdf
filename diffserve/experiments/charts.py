"""The charts of an experiment as data, drawn as SVG by :mod:`diffserve.experiments.svg` and as PNG by ``plots``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.front import Point, knee, pareto_front
from diffserve.experiments.plan import Cell
from diffserve.experiments.summary import CellSummary

Names = Mapping[str, str]
"""From a sampler as cells write it to what people read."""

NO_NAMES: Names = MappingProxyType({})

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

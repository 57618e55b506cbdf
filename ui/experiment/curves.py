"""The curves of an experiment as data: from the rows of its table to charts, not yet drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.front import knee, pareto_front
from diffserve.experiments.series import points_of
from diffserve.experiments.summary import CellSummary

MEASURES: Final = (Measure.EXACT, Measure.PSNR_DB)
"""More is better in both."""

Names = Mapping[str, str]
"""From a sampler as cells write it to what people read."""


class Dot(NamedTuple):
    """A cell on a chart; ``label`` stands beside it, ``hint`` is told when it is pointed at."""

    x: float
    value: Estimate
    label: str
    hint: str


class Line(NamedTuple):
    """One sampler: its dots in the order of steps, and its number, which decides how it looks."""

    number: int
    dots: tuple[Dot, ...]


class Chart(NamedTuple):
    """One measure. ``level``: a dotted line across; ``front``: a dashed stair; ``knee``: ringed."""

    measure: Measure
    x_title: str
    lines: tuple[Line, ...]
    x_ticks: tuple[float, ...] | None = None
    is_joined: bool = True
    level: float | None = None
    front: tuple[tuple[float, float], ...] = ()
    knee: tuple[float, float] | None = None


def over_steps(summaries: Sequence[CellSummary], names: Names) -> tuple[Chart, ...]:
    """Every measure over steps; none where nothing is measured."""
    steps = tuple(sorted({float(one.cell.num_steps) for one in _compared(summaries)}))
    return tuple(
        Chart(measure, "steps", lines, x_ticks=steps, level=_level(summaries, measure))
        for measure in MEASURES
        if (lines := _lines(summaries, measure, names, lambda one: float(one.cell.num_steps), has_labels=False))
    )


def over_seconds(summaries: Sequence[CellSummary], names: Names) -> tuple[Chart, ...]:
    """Every measure over the seconds of one picture, with the Pareto front and its knee."""
    charts = []
    for measure in MEASURES:
        lines = _lines(summaries, measure, names, lambda one: one.alone_s, has_labels=True)
        front = pareto_front(points_of(summaries, measure))
        best = knee(front)
        charts.append(
            Chart(
                measure,
                "seconds of one picture (numbers: steps)",
                lines,
                is_joined=False,
                front=tuple((point.seconds, point.quality) for point in front),
                knee=None if best is None else (best.seconds, best.quality),
            )
        )
    return tuple(chart for chart in charts if chart.lines)


def samplers_of(summaries: Sequence[CellSummary]) -> tuple[str, ...]:
    """The lines of every chart, by their numbers."""
    return tuple(dict.fromkeys(one.cell.sampler for one in _compared(summaries)))


def knee_sentence(summaries: Sequence[CellSummary], names: Names) -> str:
    """Beyond which cell time buys little, by the first measure whose front has a knee; empty where none has."""
    cells = {one.cell.slug: one for one in summaries}
    for measure in MEASURES:
        if (best := knee(pareto_front(points_of(summaries, measure)))) is not None:
            one = cells[best.name]
            return (
                f"Dashed: what cannot be had both better and faster. Ringed, its knee: {_name(one, names)} with "
                f"{one.cell.num_steps} steps; beyond {best.seconds:.2g} s and {measure.write(best.quality)} "
                f"({measure.title}) time buys less."
            )
    return ""


def _compared(summaries: Sequence[CellSummary]) -> list[CellSummary]:
    return [one for one in summaries if not one.cell.is_reference]


def _level(summaries: Sequence[CellSummary], measure: Measure) -> float | None:
    """Where the converged pictures stand."""
    values = [value.value for one in summaries if one.cell.is_reference and (value := one.value(measure))]
    return values[0] if values else None


def _name(one: CellSummary, names: Names) -> str:
    return names.get(one.cell.sampler, one.cell.sampler)


def _lines(
    summaries: Sequence[CellSummary],
    measure: Measure,
    names: Names,
    x: Callable[[CellSummary], float],
    *,
    has_labels: bool,
) -> tuple[Line, ...]:
    lines = []
    for number, sampler in enumerate(samplers_of(summaries)):
        found = [(one, one.value(measure)) for one in _compared(summaries) if one.cell.sampler == sampler]
        dots = [
            Dot(x(one), value, str(one.cell.num_steps) if has_labels else "", _hint(one, measure, value, names))
            for one, value in sorted(found, key=lambda pair: pair[0].cell.num_steps)
            if value is not None
        ]
        if dots:
            lines.append(Line(number, tuple(dots)))
    return tuple(lines)


def _hint(one: CellSummary, measure: Measure, value: Estimate, names: Names) -> str:
    interval = ""
    if value.low is not None and value.high is not None:
        interval = f" (95 % interval {measure.write_range(value.low, value.high)})"
    return (
        f"{_name(one, names)}, {one.cell.num_steps} steps: {measure.write(value.value)}{interval}, {one.alone_s:.2g} s"
    )

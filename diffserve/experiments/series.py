"""Lines of a chart: learned samplers of one family as one line, and lines that coincide as one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from diffserve.experiments.axes import write_settings
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.plan import Cell, CellLine
from diffserve.experiments.summary import CellSummary
from schedulers.learned import is_learned

Names = Mapping[str, str]
"""Display names by canonical sampler name."""

NO_NAMES: Names = MappingProxyType({})

NEAR: Final = 0.015
"""Largest distance of lines that look like one, as a share of the chart's height."""

LEARNED: Final = "learned"
FAMILY: Final = re.compile(r"-\d+$")
"""End of a learned sampler's name that gives its steps, as in ``learned:embedded-4``."""


class ChartDot(NamedTuple):
    """A cell's position on a chart; ``name`` is the display name of its sampler and settings."""

    x: float
    value: Estimate
    summary: CellSummary
    name: str = ""


class ChartLine(NamedTuple):
    """Dots of cells that differ in their steps only, ordered by steps.

    Attributes:
        name: Label of the line, with the names of all lines that coincide with it.
        dots: The dots.
        color: Number of its color, ``None`` for a gray line.
        coinciding: Lines that coincide with this one; they are not drawn.
    """

    name: str
    dots: tuple[ChartDot, ...]
    color: int | None = None
    coinciding: tuple[ChartLine, ...] = ()

    @property
    def is_learned(self) -> bool:
        """Whether its cells have learned samplers."""
        return is_learned(self.dots[0].summary.cell.sampler)

    def name_at(self, num_steps: int) -> str:
        """Return the label of the dot with ``num_steps``: "DDIM 5", or "DDIM, guidance 3: 5 steps"."""
        return f"{self.name}: {steps_text(num_steps)}" if "," in self.name else f"{self.name} {num_steps}"

    def cells_at(self, index: int) -> list[ChartDot]:
        """Return the dots that are drawn at the position of dot ``index``: its own, then those of ``coinciding``."""
        return [self.dots[index], *(line.dots[index] for line in self.coinciding)]


def steps_text(num_steps: int) -> str:
    """Return a number of steps in words, such as "1 step"."""
    return "1 step" if num_steps == 1 else f"{num_steps} steps"


def line_of(cell: Cell) -> CellLine:
    """Return the line that a cell belongs to; the samplers of a learned family belong to one."""
    sampler, scale, settings = cell.line
    return FAMILY.sub("", sampler) if is_learned(sampler) else sampler, scale, settings


def line_names(cells: Iterable[Cell], names: Names = NO_NAMES) -> dict[CellLine, str]:
    """Return the lines of ``cells`` with their names, which include the guidance only if there are several."""
    cells = list(cells)
    several = len({cell.guidance_scale for cell in cells}) > 1
    samplers: dict[CellLine, set[str]] = {}
    for cell in cells:
        if not cell.is_reference:
            samplers.setdefault(line_of(cell), set()).add(cell.sampler)
    families = {family for family, _, _ in samplers if is_learned(family)}

    def base_name(line: CellLine) -> str:
        if len(samplers[line]) == 1:
            (sampler,) = samplers[line]
            return names.get(sampler, sampler)
        return LEARNED if len(families) == 1 else line[0]

    return {
        line: base_name(line) + (f", guidance {line[1]:g}" if several else "") + write_settings(line[2])
        for line in samplers
    }


def lines_of(
    summaries: Sequence[CellSummary],
    measure: Measure,
    names: Names,
    x: Callable[[CellSummary], float],
    colors: Mapping[CellLine, int] = MappingProxyType({}),
) -> tuple[ChartLine, ...]:
    """Build the lines of a chart, without cells that lack the measure.

    Args:
        summaries: The cells; converged cells are not part of a line.
        measure: The measure of the chart.
        names: Display names of samplers.
        x: Position of a cell on the x axis.
        colors: Color numbers of the colored lines.
    """
    lines = []
    for key, name in line_names((summary.cell for summary in summaries), names).items():
        members = [summary for summary in summaries if not summary.cell.is_reference and line_of(summary.cell) == key]
        dots = [
            ChartDot(x(summary), value, summary, _cell_name(summary.cell, key, name, names))
            for summary in sorted(members, key=lambda summary: summary.cell.num_steps)
            if (value := summary.value(measure)) is not None
        ]
        if dots:
            lines.append(ChartLine(name, tuple(dots), colors.get(key)))
    return tuple(lines)


def _cell_name(cell: Cell, line: CellLine, line_name: str, names: Names) -> str:
    """Return the name of a cell without its steps: that of its line, but each learned sampler has its own."""
    return line_name if cell.sampler == line[0] else names.get(cell.sampler, cell.sampler)


def value_range(lines: Iterable[ChartLine], measure: Measure) -> float:
    """Return the range of the values on the y axis."""
    values = [dot.value.value for line in lines for dot in line.dots]
    return 1.0 if measure is Measure.EXACT else max(values, default=0.0) - min(values, default=0.0)


def merge(lines: Sequence[ChartLine], measure: Measure) -> tuple[ChartLine, ...]:
    """Merge lines that look like one and whose values are within the 95 % intervals of each other at every position.

    Args:
        lines: The lines; the one with the first color is drawn for all that coincide.
        measure: The measure of the chart.
    """
    groups: list[list[ChartLine]] = []
    height = value_range(lines, measure)
    for line in sorted(lines, key=lambda line: math.inf if line.color is None else line.color):
        group = next((group for group in groups if _coincide(group[0], line, height)), None)
        if group is None:
            groups.append([line])
        else:
            group.append(line)
    return tuple(_merged(group) for group in groups)


def _merged(group: Sequence[ChartLine]) -> ChartLine:
    names = [line.name for line in group]
    separator = "; " if any("," in name for name in names) else ", "
    return group[0]._replace(name=separator.join(names), coinciding=tuple(group[1:]))


def _coincide(line: ChartLine, other: ChartLine, height: float) -> bool:
    if len(line.dots) != len(other.dots):
        return False
    return all(
        math.isclose(a.x, b.x)
        and abs(a.value.value - b.value.value) <= NEAR * height
        and _holds(a.value, b.value.value)
        and _holds(b.value, a.value.value)
        for a, b in zip(line.dots, other.dots, strict=True)
    )


def _holds(estimate: Estimate, value: float) -> bool:
    """Return whether the interval of ``estimate`` holds ``value``; without an interval every value is possible."""
    return estimate.low is None or estimate.high is None or estimate.low <= value <= estimate.high

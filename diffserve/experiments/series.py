"""The lines of a plot and the rows of a strip: which cells belong together, and what they are called. No drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diffserve.experiments.estimates import Measure
from diffserve.experiments.front import Point
from diffserve.experiments.plan import Cell
from diffserve.experiments.summary import CellSummary

Series = tuple[str, float]
"""(sampler, guidance): one line of a plot, one row of a strip."""


class StripGrid(NamedTuple):
    """Pictures of one prompt and seed: a row for each sampler and guidance, a column for each number of steps, and one
    for the converged picture where there is any. ``None`` where a cell has no picture."""

    heads: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[bytes | None, ...], ...]


def series_of(cells: Sequence[Cell]) -> dict[Series, str]:
    """Every line and its name, which says the guidance only where there are several."""
    several = len({cell.guidance_scale for cell in cells}) > 1
    keys = dict.fromkeys((cell.sampler, cell.guidance_scale) for cell in cells if not cell.is_reference)
    return {key: f"{key[0]}, guidance {key[1]:g}" if several else key[0] for key in keys}


def belongs(cell: Cell, key: Series) -> bool:
    """Whether a cell is of this line."""
    return not cell.is_reference and (cell.sampler, cell.guidance_scale) == key


def measured(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """The measures that every cell has; converged cells, which have no distance to themselves, do not count."""
    cells = [one for one in summaries if not one.cell.is_reference]
    return tuple(measure for measure in Measure if all(one.value(measure) for one in cells))


def time_measures(summaries: Sequence[CellSummary]) -> tuple[Measure, ...]:
    """The measures of quality that are drawn against time: at most two, of the pictures themselves if that is known."""
    wanted = (Measure.EXACT, Measure.FRECHET, Measure.PSNR_DB, Measure.FRECHET_CONVERGED)
    return tuple(measure for measure in wanted if measure in measured(summaries))[:2]


def points_of(summaries: Sequence[CellSummary], measure: Measure) -> tuple[Point, ...]:
    """Every cell as a time (one image alone, seconds) and a quality (more is better)."""
    sign = 1 if measure.more_is_better else -1
    found = ((one, one.value(measure)) for one in summaries if not one.cell.is_reference)
    return tuple(Point(one.cell.slug, one.alone_s, sign * value.value) for one, value in found if value is not None)


def strip_grid(thumbnails: Mapping[Cell, bytes]) -> StripGrid:
    """Lay ``thumbnails`` out with growing steps, the converged picture at the end of every row."""
    lines = series_of(list(thumbnails))
    steps = sorted({cell.num_steps for cell in thumbnails if not cell.is_reference})
    converged = {cell.guidance_scale: cell for cell in thumbnails if cell.is_reference}
    rows = []
    for key in lines:
        own = {cell.num_steps: thumbnails[cell] for cell in thumbnails if belongs(cell, key)}
        end = converged.get(key[1])
        rows.append((*(own.get(n) for n in steps), *([thumbnails[end] if end else None] if converged else [])))
    heads = [f"{n} steps" if n > 1 else "1 step" for n in steps]
    heads += [f"converged ({next(iter(converged.values())).num_steps})"] if converged else []
    return StripGrid(tuple(heads), tuple(lines.values()), tuple(rows))

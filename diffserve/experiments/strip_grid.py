"""The same prompt and seed in every cell, laid out in rows and columns. No drawing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from diffserve.experiments.charts import line_names
from diffserve.experiments.plan import Cell


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

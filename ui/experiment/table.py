"""The grid of an experiment as HTML: samplers as rows, steps as columns. All text from outside is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from diffserve.experiments.charts import line_names
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell
from ui.experiment.board import SHOWN, Board, Square

Address = Callable[[Path], str]
"""Returns the URL of a file."""


def grid(board: Board, names: Mapping[str, str], address: Address) -> str:
    """Return the table as HTML; ``names`` has the labels of the samplers."""
    plan, num_hidden = board.plan, len(board.plan.places) - 1
    hidden_note = f"; {num_hidden} more for each, not shown" if num_hidden else ""
    caption = f"“{escape(plan.prompts[SHOWN[0]])}”, seed {plan.seed_of(SHOWN)}{hidden_note}"
    steps = dict.fromkeys(cell.num_steps for cell in plan.cells)
    heads = "".join(f'<th scope="col">{n}</th>' for n in steps)
    for reference in plan.references:
        heads += f'<th scope="col" class="converged">converged<small>DDIM {reference.num_steps}</small></th>'
    rows = []
    for (sampler, scale), name in line_names(plan.cells, names).items():
        cells = (*(Cell(sampler, n, scale) for n in steps), *plan.references)
        squares = "".join(_square(board, cell, names, address) for cell in cells)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{squares}</tr>')
    return (
        f'<div class="exp-scroll" tabindex="0" role="region" aria-label="images by sampler and steps"><table>'
        f"<caption>{caption}</caption>"
        f'<thead><tr><th scope="col" class="corner">steps</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div>"
    )


def _square(board: Board, cell: Cell, names: Mapping[str, str], address: Address) -> str:
    square = board.squares[cell]
    name = f"{names.get(cell.sampler, cell.sampler)}, {cell.num_steps} steps"
    if square.trouble is not None:
        return f'<td class="trouble" title="{escape(square.trouble)}">not generated</td>'
    share = sum(square.fractions.values()) / len(board.plan.places)
    bar = f'<div class="bar"><i style="width:{100 * share:.0f}%"></i></div>'
    return f"<td>{_look(square, name, address)}{bar}<small>{_worth(board, square)}</small></td>"


def _look(square: Square, name: str, address: Address) -> str:
    if square.look is None:
        return '<div class="blank"></div>'
    source = escape(address(square.look))
    if not square.is_shown_whole:
        return f'<img class="preview" src="{source}" alt="{escape(name)}, in progress">'
    return f'<a href="{source}" target="_blank" rel="noopener"><img src="{source}" alt="{escape(name)}"></a>'


def _worth(board: Board, square: Square) -> str:
    """Return the measurements of a cell in a few characters."""
    records = list(square.records.values())
    hits = [record.parts.exact for record in records if record.parts is not None]
    if len(hits) == 1 and len(board.plan.places) == 1:
        parts = ["✓" if hits[0] else "✗"]
    else:
        parts = [f"{sum(hits)}/{len(hits)} ✓"] if hits else []
    distances = [record.distance for record in records if record.distance is not None]
    near = [distance.psnr_db for distance in distances if distance.psnr_db is not None]
    parts += [Measure.PSNR_DB.write(sum(near) / len(near))] if near else []
    return " · ".join(parts) or "&nbsp;"

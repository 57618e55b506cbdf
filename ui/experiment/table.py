"""The grid of an experiment as HTML: samplers as rows, steps as columns, in each square the picture as it comes about.

Everything that comes from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell
from ui.experiment.board import SHOWN, Board, Square

Address = Callable[[Path], str]
"""Where a browser finds a file."""


def grid(board: Board, names: Mapping[str, str], address: Address) -> str:
    """The table; ``names`` says how samplers are called."""
    plan = board.plan
    heads = "".join(f'<th scope="col">{steps}</th>' for steps in plan.steps)
    if plan.reference is not None:
        heads += f'<th scope="col" class="converged">converged<small>DDIM {plan.reference.num_steps}</small></th>'
    scale = plan.sweep.guidance[0]
    rows = []
    for sampler in plan.samplers:
        cells = [_square(board, Cell(sampler, steps, scale), names, address) for steps in plan.steps]
        if plan.reference is not None:
            cells.append(_square(board, plan.reference, names, address))
        name = escape(names.get(sampler, sampler))
        rows.append(f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="exp-scroll" tabindex="0" role="region" aria-label="pictures by sampler and steps"><table>'
        f"<caption>{_caption(board)}</caption>"
        f'<thead><tr><th scope="col" class="corner">steps</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div>"
    )


def _caption(board: Board) -> str:
    sweep = board.plan.sweep
    more = len(sweep.places) - 1
    rest = f"; {more} more for each, not shown" if more else ""
    return f"“{escape(sweep.prompts[SHOWN[0]])}”, seed {sweep.seed_of(SHOWN)}{rest}"


def _square(board: Board, cell: Cell, names: Mapping[str, str], address: Address) -> str:
    square = board.squares[cell]
    name = f"{names.get(cell.sampler, cell.sampler)}, {cell.num_steps} steps"
    if square.trouble is not None:
        return f'<td class="trouble" title="{escape(square.trouble)}">not painted</td>'
    return f"<td>{_look(square, name, address)}{_bar(board, square)}<small>{_worth(board, square)}</small></td>"


def _look(square: Square, name: str, address: Address) -> str:
    if square.look is None:
        return '<div class="blank"></div>'
    source = escape(address(square.look))
    if not square.is_shown_whole:
        return f'<img class="preview" src="{source}" alt="{escape(name)}, being painted">'
    return f'<a href="{source}" target="_blank" rel="noopener"><img src="{source}" alt="{escape(name)}"></a>'


def _bar(board: Board, square: Square) -> str:
    """How far all pictures of the square are."""
    share = sum(square.fractions.values()) / len(board.plan.sweep.places)
    return f'<div class="bar"><i style="width:{100 * share:.0f}%"></i></div>'


def _worth(board: Board, square: Square) -> str:
    """What is known of its pictures, in a few characters."""
    hits = [picture.is_exact for picture in square.painted.values() if picture.is_exact is not None]
    if len(hits) == 1 and len(board.plan.sweep.places) == 1:
        parts = ["✓" if hits[0] else "✗"]
    else:
        parts = [f"{sum(hits)}/{len(hits)} ✓"] if hits else []
    near = list(square.psnr_db.values())
    parts += [Measure.PSNR_DB.write(sum(near) / len(near))] if near else []
    return " · ".join(parts) or "&nbsp;"

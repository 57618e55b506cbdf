"""An experiment as files: the table as CSV, grid and curves as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diffserve.experiments.measure import thumbnail
from diffserve.experiments.summary import CellSummary, write_csv
from diffserve.images import decode_image
from ui.experiment.board import Board

SECONDS_ARE: Final = "evaluations times the measured time of one alone"
THUMBNAIL_PX: Final = 256


def table(summaries: Sequence[CellSummary]) -> str:
    """CSV, one line a square, with the names of ``diffserve sweep``; ``seconds_are`` says where seconds come from."""
    return write_csv([one for one in summaries if not one.cell.is_reference], seconds_are=SECONDS_ARE)


def picture(summaries: Sequence[CellSummary], board: Board) -> bytes:
    """The grid and the curves below it, as PNG. Takes a second or two: call it in a thread."""
    from diffserve.experiments import plots

    looks = {cell: square.look for cell, square in board.squares.items() if square.look is not None}
    small = {cell: thumbnail(decode_image(look.read_bytes()).array, THUMBNAIL_PX) for cell, look in looks.items()}
    return plots.contact_sheet(summaries, board.plan.prompts[0], small)

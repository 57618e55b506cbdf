"""An experiment as files: the table as CSV, grid and curves as one PNG."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Final

from PIL import Image

from diffserve.experiments.plan import Cell
from diffserve.experiments.summary import CellSummary, write_csv
from ui.experiment.board import Board

UNKNOWN: Final = ("engine_seconds", "images_per_s")
"""What only the engine itself could say, and a client cannot."""

SECONDS_ARE: Final = "evaluations times the measured time of one alone"
THUMBNAIL_PX: Final = 256
_plotting = threading.Lock()  # matplotlib keeps its style for the whole process


def table(summaries: Sequence[CellSummary]) -> str:
    """CSV, one line a square, with the names of ``diffserve sweep``; ``seconds_are`` says where seconds come from."""
    cells = [one for one in summaries if not one.cell.is_reference]
    rows = list(csv.DictReader(io.StringIO(write_csv(cells))))
    for row in rows:
        for name in UNKNOWN:
            del row[name]
        row["seconds_are"] = SECONDS_ARE
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def picture(summaries: Sequence[CellSummary], board: Board) -> bytes:
    """The grid and the curves below it, as PNG. Takes a second or two: call it in a thread."""
    from diffserve.experiments import plots

    with _plotting:
        parts = [plots.strip(board.plan.sweep.prompts[0], _thumbnails(board))]
        if plots.measured(summaries):
            parts += [plots.curves(summaries), plots.quality_against_time(summaries)]
    return _stacked(parts)


def _thumbnails(board: Board) -> dict[Cell, bytes]:
    return {cell: _thumbnail(square.look) for cell, square in board.squares.items() if square.look is not None}


def _thumbnail(file: Path) -> bytes:
    with Image.open(file) as image:
        small = image.convert("RGB")
    small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.LANCZOS)
    data = BytesIO()
    small.save(data, "PNG")
    return data.getvalue()


def _stacked(parts: Sequence[bytes]) -> bytes:
    """Pictures below each other on white, as PNG."""
    images = [Image.open(BytesIO(part)).convert("RGB") for part in parts]
    sheet = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        sheet.paste(image, ((sheet.width - image.width) // 2, top))
        top += image.height
    data = BytesIO()
    sheet.save(data, "PNG")
    return data.getvalue()

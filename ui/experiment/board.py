"""What is painted of an experiment so far, square by square, and its files. No gradio, no server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.painter import FinishedImage, PaintEvent, PreviewImage, RefusedImage, RowsDone
from diffserve.experiments.plan import Cell, Place, SweepPlan
from diffserve.experiments.records import ImageRecord, StoredImage
from diffserve.experiments.summary import CellSummary, summarise
from diffserve.media.images import decode_image
from ui.experiment.speed import Timing

SHOWN: Final[Place] = (0, 0)
"""The picture that stands in the grid: of the first prompt and the first seed."""

LEAST_GROUPS: Final = 5
"""Of fewer prompts, or seeds of an only one, a bootstrap interval says nothing."""


@dataclass
class Square:
    """A cell of the grid on its way.

    look       newest file of the shown picture, a preview at first
    trouble    why it cannot be painted
    fractions  how far each picture is, 0 to 1
    """

    cell: Cell
    look: Path | None = None
    trouble: str | None = None
    records: dict[Place, ImageRecord] = field(default_factory=dict)
    fractions: dict[Place, float] = field(default_factory=dict)

    @property
    def is_shown_whole(self) -> bool:
        """Whether the picture in the grid is finished."""
        return SHOWN in self.records

    @property
    def measured_places(self) -> set[Place]:
        """Which pictures have been held against their converged ones."""
        return {place for place, record in self.records.copy().items() if record.distance is not None}


class Board:
    """All squares of a plan, the converged one included, and a file in ``folder`` for every picture.

    version  grows with every change
    timing   seconds of a picture alone, ``None`` until that is measured
    """

    def __init__(self, plan: SweepPlan, folder: Path) -> None:
        self.plan = plan
        self.squares = {cell: Square(cell) for cell in plan.all_cells}
        self.timing: Timing | None = None
        self.version = 0
        self._folder = folder

    def save(self, finished: FinishedImage) -> None:
        """Keep a picture as the server sent it."""
        self.file_of(finished.image.cell, finished.image.place).write_bytes(finished.file)

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """The pixels of a picture, once it is painted."""
        if place not in self.squares[cell].records:
            return None
        return StoredImage(decode_image(self.file_of(cell, place).read_bytes()).array, None)

    def records(self, cell: Cell) -> dict[Place, ImageRecord]:
        """What is known of a cell's pictures."""
        return self.squares[cell].records

    def add(self, cell: Cell, record: ImageRecord) -> None:
        """A picture is finished, or was held against its converged one."""
        square = self.squares[cell]
        square.records[record.place] = record
        square.fractions[record.place] = 1.0
        if record.place == SHOWN:
            square.look = self.file_of(cell, SHOWN)
        self.version += 1

    def handle(self, event: PaintEvent) -> None:
        """What a painter says of pictures that are on their way."""
        match event:
            case RowsDone():
                for image, rows in event.rows.items():
                    fractions = self.squares[image.cell].fractions
                    fractions[image.place] = min(1.0, fractions.get(image.place, 0.0) + rows / image.cell.rows)
            case PreviewImage():
                look = self.file_of(event.image.cell, event.image.place, f"preview-{event.number}")
                look.write_bytes(event.file)
                self.squares[event.image.cell].look = look
            case RefusedImage():
                self.squares[event.image.cell].trouble = event.reason
        self.version += 1

    def set_timing(self, timing: Timing) -> None:
        """All is painted, and it is measured how long a picture takes alone."""
        self.timing = timing
        self.version += 1

    def file_of(self, cell: Cell, place: Place, what: str = "picture") -> Path:
        """Where a picture or a preview of it is kept."""
        return self._folder / f"{cell.slug}-p{place[0] + 1}-s{place[1] + 1}-{what}.png"

    def tidy(self) -> None:
        """Remove every file that the grid does not show."""
        shown = {square.look for square in self.squares.values()}
        for file in set(self._folder.iterdir()) - shown:
            file.unlink()

    @property
    def num_painted(self) -> int:
        """Finished pictures, the converged ones included."""
        return sum(len(square.records) for square in self.squares.values())

    @property
    def rows_done(self) -> float:
        """UNet rows of what is painted together, unfinished pictures by their share; refused cells count as done."""
        num_places = len(self.plan.places)
        shares = (
            (square.cell.rows, num_places if square.trouble else sum(square.fractions.values()))
            for square in self.squares.values()
        )
        return sum(rows * share for rows, share in shares)

    @property
    def fair_places(self) -> tuple[Place, ...]:
        """Where every cell that has any picture has one: comparing other pictures would not be paired.

        Where some of these pictures have been held against their converged ones in every cell, only they count. A cell
        that was given up takes no part in this, unless all were.
        """
        begun = [square for cell in self.plan.cells if (square := self.squares[cell]).records]
        whole = [square for square in begun if square.trouble is None] or begun
        common = _in_all(square.records.copy() for square in whole)
        measured = common & _in_all(square.measured_places for square in whole)
        return tuple(place for place in self.plan.places if place in (measured or common))

    def summaries(self, guess: Timing) -> tuple[CellSummary, ...]:
        """A row for each cell with pictures at the fair places, the converged one last. Seconds of a picture alone are
        its UNet rows times what one takes, by ``guess`` until that is measured; of the engine's own time nothing is
        known here.
        """
        places, timing = self.fair_places, self.timing or guess
        records = {cell: square.records.copy() for cell, square in self.squares.items()}
        whole = {cell: known for cell, known in records.items() if places and set(places) <= set(known)}
        analysis = Analysis(self.plan, whole, places=places, least_groups=LEAST_GROUPS)
        return tuple(summarise(analysis, cell, timing.of_cell(analysis.records(cell), cell)) for cell in whole)


def _in_all(found: Iterable[Iterable[Place]]) -> set[Place]:
    """The places that are in each of ``found``."""
    sets = [set(places) for places in found]
    return set.intersection(*sets) if sets else set()

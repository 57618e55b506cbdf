"""Images and measurements of an experiment so far, by grid cell. Uses neither gradio nor a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.plan import Cell, Place, SweepPlan
from diffserve.experiments.records import (
    FinishedImage,
    GenerationEvent,
    ImageRecord,
    PreviewImage,
    RefusedImage,
    RowsDone,
    StoredImage,
)
from diffserve.experiments.summary import CellSummary, summarise
from diffserve.media.images import decode_image
from ui.experiment.speed import Timing

SHOWN: Final[Place] = (0, 0)
"""The image in the grid: that of the first prompt and seed."""

LEAST_GROUPS: Final = 5
"""Fewest prompts, or seeds of a single prompt, for a bootstrap interval."""


@dataclass
class Square:
    """Progress of one grid cell.

    Attributes:
        cell: The sampler settings.
        look: The newest file of the shown image, a preview at first.
        trouble: Why the cell cannot be generated.
        records: The finished images.
        fractions: The progress of each image, 0 to 1.
    """

    cell: Cell
    look: Path | None = None
    trouble: str | None = None
    records: dict[Place, ImageRecord] = field(default_factory=dict)
    fractions: dict[Place, float] = field(default_factory=dict)

    @property
    def is_shown_whole(self) -> bool:
        """Whether the image in the grid is finished."""
        return SHOWN in self.records

    @property
    def measured_places(self) -> set[Place]:
        """The images that were compared with their references."""
        return {place for place, record in self.records.copy().items() if record.distance is not None}


class Board:
    """All cells of a plan, including the reference, with a file in ``folder`` for each image.

    Attributes:
        version: A counter that grows with every change.
        timing: Time of a single image, None until it is measured.
    """

    def __init__(self, plan: SweepPlan, folder: Path) -> None:
        self.plan = plan
        self.squares = {cell: Square(cell) for cell in plan.all_cells}
        self.timing: Timing | None = None
        self.version = 0
        self._folder = folder

    def save(self, finished: FinishedImage) -> None:
        """Store an image as the server sent it."""
        self.file_of(finished.image.cell, finished.image.place).write_bytes(finished.file)

    def load(self, cell: Cell, place: Place) -> StoredImage | None:
        """Return the pixels of an image, or None if it is not finished."""
        if place not in self.squares[cell].records:
            return None
        return StoredImage(decode_image(self.file_of(cell, place).read_bytes()).array, None)

    def records(self, cell: Cell) -> dict[Place, ImageRecord]:
        """Return the finished images of ``cell``."""
        return self.squares[cell].records

    def add(self, cell: Cell, record: ImageRecord) -> None:
        """Add a finished image, or its measurements."""
        square = self.squares[cell]
        square.records[record.place] = record
        square.fractions[record.place] = 1.0
        if record.place == SHOWN:
            square.look = self.file_of(cell, SHOWN)
        self.version += 1

    def handle(self, event: GenerationEvent) -> None:
        """Record the progress, preview or refusal in ``event``."""
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
        """Set the measured time of a single image."""
        self.timing = timing
        self.version += 1

    def file_of(self, cell: Cell, place: Place, what: str = "picture") -> Path:
        """Return the path of an image or of a preview."""
        return self._folder / f"{cell.slug}-p{place[0] + 1}-s{place[1] + 1}-{what}.png"

    def tidy(self) -> None:
        """Delete all files that the grid does not show."""
        shown = {square.look for square in self.squares.values()}
        for file in set(self._folder.iterdir()) - shown:
            file.unlink()

    @property
    def num_painted(self) -> int:
        """The number of finished images, references included."""
        return sum(len(square.records) for square in self.squares.values())

    @property
    def rows_done(self) -> float:
        """UNet rows done so far, with the share of unfinished images; refused cells count as done."""
        num_slots = len(self.plan.places)
        shares = (
            (square.cell.rows, num_slots if square.trouble else sum(square.fractions.values()))
            for square in self.squares.values()
        )
        return sum(rows * share for rows, share in shares)

    @property
    def fair_places(self) -> tuple[Place, ...]:
        """The prompts and seeds for which every started cell has an image, so that comparisons are paired.

        If some of them are measured in every cell, only those count. Refused cells are ignored unless all were refused.
        """
        started = [square for cell in self.plan.cells if (square := self.squares[cell]).records]
        accepted = [square for square in started if square.trouble is None] or started
        common = _in_all(square.records.copy() for square in accepted)
        measured = common & _in_all(square.measured_places for square in accepted)
        return tuple(place for place in self.plan.places if place in (measured or common))

    def summaries(self, guess: Timing) -> tuple[CellSummary, ...]:
        """Return one row for each cell with images at all fair places, the reference last.

        Args:
            guess: The time of a single image until it is measured.
        """
        places, timing = self.fair_places, self.timing or guess
        records = {cell: square.records.copy() for cell, square in self.squares.items()}
        complete = {
            cell: cell_records for cell, cell_records in records.items() if places and set(places) <= set(cell_records)
        }
        analysis = Analysis(self.plan, complete, places=places, least_groups=LEAST_GROUPS)
        return tuple(summarise(analysis, cell, timing.of_cell(analysis.records(cell), cell)) for cell in complete)


def _in_all(groups: Iterable[Iterable[Place]]) -> set[Place]:
    """Return the places that are in all ``groups``."""
    sets = [set(places) for places in groups]
    return set.intersection(*sets) if sets else set()

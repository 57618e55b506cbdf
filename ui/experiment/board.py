"""What is painted of an experiment so far: square by square, and as the rows of a table. No gradio, no server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.intervals import bootstrap_interval, share_of
from diffserve.experiments.plan import Cell, Job
from diffserve.experiments.summary import CellSummary
from ui.experiment.pace import Timing
from ui.experiment.plan import GridPlan, Place

SHOWN: Final[Place] = (0, 0)
"""The picture that stands in the grid: of the first prompt and the first seed."""

LEAST_GROUPS: Final = 5
"""Of fewer prompts, or seeds of an only one, a bootstrap interval says nothing."""


class Painted(NamedTuple):
    """A finished picture; ``is_exact`` is ``None`` where it cannot be checked."""

    file: Path
    evaluations: int
    spacing: str
    is_exact: bool | None = None


@dataclass
class Square:
    """A cell of the grid on its way.

    look     newest file of the shown picture, a preview at first
    trouble  why it cannot be painted
    """

    cell: Cell
    look: Path | None = None
    trouble: str | None = None
    painted: dict[Place, Painted] = field(default_factory=dict)
    psnr_db: dict[Place, float] = field(default_factory=dict)
    fractions: dict[Place, float] = field(default_factory=dict)

    @property
    def is_shown_whole(self) -> bool:
        """Whether the picture in the grid is finished."""
        return SHOWN in self.painted


class Board:
    """All squares of a plan, the converged one included; changed by named verbs, read by those who draw.

    version  grows with every change
    timing   seconds of a picture alone, ``None`` until that is measured
    """

    def __init__(self, plan: GridPlan) -> None:
        self.plan = plan
        self.squares = {cell: Square(cell) for cell in plan.all_cells}
        self.timing: Timing | None = None
        self.version = 0

    def progress(self, job: Job, fraction: float) -> None:
        """A picture is so far, 0 to 1."""
        self.squares[job.cell].fractions[job.place] = fraction
        self.version += 1

    def look(self, job: Job, file: Path) -> None:
        """A preview of the shown picture."""
        self.squares[job.cell].look = file
        self.version += 1

    def paint(self, job: Job, painted: Painted) -> None:
        """A picture is finished."""
        square = self.squares[job.cell]
        square.painted[job.place] = painted
        square.fractions[job.place] = 1.0
        if job.place == SHOWN:
            square.look = painted.file
        self.version += 1

    def measure(self, cell: Cell, place: Place, psnr_db: float) -> None:
        """A picture was held against its converged one."""
        self.squares[cell].psnr_db[place] = psnr_db
        self.version += 1

    def refuse(self, cell: Cell, why: str) -> None:
        """No picture of a cell will be painted any more."""
        self.squares[cell].trouble = why
        self.version += 1

    def time(self, timing: Timing) -> None:
        """All is painted, and it is measured how long a picture takes alone."""
        self.timing = timing
        self.version += 1

    @property
    def num_painted(self) -> int:
        """Finished pictures, the converged ones included."""
        return sum(len(square.painted) for square in self.squares.values())

    @property
    def rows_done(self) -> float:
        """UNet rows of what is painted together, unfinished pictures by their share; refused cells count as done."""
        num_places = len(self.plan.sweep.places)
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
        begun = [square for cell in self.plan.cells if (square := self.squares[cell]).painted]
        whole = [square for square in begun if square.trouble is None] or begun
        common = _in_all(square.painted for square in whole)
        measured = common & _in_all(square.psnr_db for square in whole)
        return tuple(place for place in self.plan.sweep.places if place in (measured or common))

    def summaries(self, guess: Timing) -> tuple[CellSummary, ...]:
        """A row for each cell with pictures at the fair places, the converged one last. Seconds of a picture alone are
        its UNet rows times what one takes, by ``guess`` until that is measured; of the engine's own time nothing is
        known here."""
        places, timing = self.fair_places, self.timing or guess
        return tuple(_summary(square, places, timing) for square in self.squares.values() if _is_at(square, places))


def _in_all(found: Iterable[Iterable[Place]]) -> set[Place]:
    """The places that are in each of ``found``."""
    sets = [set(places) for places in found]
    return set.intersection(*sets) if sets else set()


def _is_at(square: Square, places: Sequence[Place]) -> bool:
    """Whether it has a picture at all ``places``, and there are any."""
    return bool(places) and all(place in square.painted for place in places)


def _summary(square: Square, places: Sequence[Place], timing: Timing) -> CellSummary:
    pictures = [square.painted[place] for place in places]
    evaluations = fmean(picture.evaluations for picture in pictures)
    return CellSummary(
        cell=square.cell,
        num_images=len(pictures),
        measures=_measures(square, places),
        parts={},
        spacing=pictures[0].spacing,
        evaluations=evaluations,
        step_ms=Estimate(1000 * timing.row_s * evaluations / square.cell.num_steps),
        alone_s=timing.seconds(evaluations),
        engine_s=0.0,
    )


def _measures(square: Square, places: Sequence[Place]) -> dict[str, Estimate]:
    """Those that every picture has."""
    found = {}
    hits = [hit for place in places if (hit := square.painted[place].is_exact) is not None]
    if len(hits) == len(places):
        found[Measure.EXACT.value] = _share(hits, places)
    near = [square.psnr_db[place] for place in places if place in square.psnr_db]
    if len(near) == len(places):
        found[Measure.PSNR_DB.value] = _mean(near, places)
    return found


def _share(hits: Sequence[bool], places: Sequence[Place]) -> Estimate:
    groups = _groups(places)
    share = share_of(hits, groups)
    return Estimate(share.share) if groups is None else Estimate(share.share, share.low, share.high)


def _mean(values: Sequence[float], places: Sequence[Place]) -> Estimate:
    groups = _groups(places)
    return Estimate(fmean(values)) if groups is None else Estimate(fmean(values), *bootstrap_interval(values, groups))


def _groups(places: Sequence[Place]) -> list[int] | None:
    """What is resampled: prompts, or the seeds of an only one; ``None`` where that is too few to say anything."""
    prompts, seeds = [place[0] for place in places], [place[1] for place in places]
    groups = prompts if len(set(prompts)) > 1 else seeds
    return groups if len(set(groups)) >= LEAST_GROUPS else None

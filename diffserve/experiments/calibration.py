"""Measurements of a calibration, and the choice of a quality profile from them, without torch or an engine.

The cells lie on the front of PSNR to the converged image against seconds. ``max`` is the closest one. ``auto`` is the
fastest whose exact prompt match is equivalent to that of ``max``; for prompts that cannot be checked it is the knee.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import msgspec

from diffserve.experiments.axes import request_fields
from diffserve.experiments.charts import knee, pareto_front
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.plan import Cell, SweepPlan
from diffserve.experiments.series import ChartDot
from diffserve.experiments.summary import CellSummary
from diffserve.experiments.verdicts import BETTER, EQUIVALENT
from diffserve.settings.quality_profile import QualityPoint, QualityPoints, QualityProfile
from schedulers.learned import is_learned

LEAST_GAIN_DB: Final = 2.0
"""A slower cell is on the front only if it is closer to the converged image by at least this much."""

DRAFT_SHARE: Final = 0.5
"""``draft`` takes at most this share of the time of ``auto``, if there is such a cell."""

SHARES: Final = {"standard": 1 / 3, "fine": 2 / 3}
"""Part of the way from the time of ``auto`` to that of ``max``, on a logarithmic axis."""


class CellPlan(SweepPlan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sweep of listed cells instead of all combinations; each is compared with the last one."""

    listed: tuple[Cell, ...]

    @classmethod
    def of(cls, cells: Sequence[Cell], prompts: Sequence[str], **fields: Any) -> CellPlan:
        """Return a plan of ``cells``, which share their guidance scale."""
        steps = tuple(sorted({cell.num_steps for cell in cells}))
        return cls(
            samplers=("ddim",), steps=steps, guidance=(cells[0].guidance_scale,), prompts=tuple(prompts),
            listed=tuple(cells), **fields,
        )  # fmt: skip

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The listed cells."""
        return self.listed

    @property
    def comparisons(self) -> tuple[tuple[Cell, Cell], ...]:
        """(cell, last cell) for every other cell."""
        return tuple((cell, self.listed[-1]) for cell in self.listed[:-1])


class MeasuredCell(msgspec.Struct, frozen=True, kw_only=True):
    """Measured values of a cell.

    Attributes:
        cell: The settings.
        seconds: Seconds of an image generated alone, including decoding.
        psnr_db: Mean PSNR to the converged image.
        exact: Share of images that match their prompts; None: not measured.
        difference: That share minus the share of the closest cell, paired; None for the closest cell itself.
        verdict: Verdict on ``difference``; "" without one.
    """

    cell: Cell
    seconds: float
    psnr_db: float
    exact: Estimate | None = None
    difference: Estimate | None = None
    verdict: str = ""

    @property
    def point(self) -> QualityPoint:
        """The settings as a point of a quality profile."""
        return QualityPoint(
            sampler=self.cell.sampler,
            num_steps=self.cell.num_steps,
            **request_fields(self.cell.settings)[0],
            seconds=round(self.seconds, 4),
            psnr_db=round(self.psnr_db, 2),
            exact=None if self.exact is None else round(self.exact.value, 4),
        )


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements from which a quality profile follows.

    Attributes:
        model: Name of the model.
        digest: Beginning of the digest of its weights.
        guidance_scale: Guidance scale of all cells.
        measured_on: Machine, precision, version and date.
        reference: Settings of the converged images.
        num_screened: Images of each cell that PSNR is measured on.
        num_prompts: Prompts of the exact match; 0: the prompts cannot be checked.
        num_seeds: Images per prompt of the exact match.
        margin: Difference of exact match that counts as equivalent, in 0..1.
        why_not: Why prompts cannot be checked; "" if they can.
        cells: Cells of the fronts with and without learned samplers, the fastest first.
        screened: All cells that were screened, with estimated seconds.
    """

    model: str
    digest: str
    guidance_scale: float
    measured_on: str
    reference: str
    num_screened: int
    num_prompts: int
    num_seeds: int
    margin: float
    why_not: str
    cells: tuple[MeasuredCell, ...]
    screened: tuple[MeasuredCell, ...] = ()

    @property
    def measure(self) -> str:
        """One sentence about how ``auto`` was chosen."""
        if not self.num_prompts:
            return (
                f"auto is the knee of PSNR to the converged image ({self.reference}, {self.num_screened} images) "
                f"against seconds; exact match was not measured: {self.why_not}"
            )
        margin = Measure.EXACT.write_difference(self.margin)
        return (
            f"auto is the fastest setting whose exact prompt match is equivalent to that of max within {margin} "
            f"(paired, 95 % interval, {self.num_prompts} prompts, {self.num_seeds} seeds of each); PSNR is to the "
            f"converged image ({self.reference}, {self.num_screened} images)"
        )

    def profile(self) -> QualityProfile:
        """Choose the point of each quality word."""
        built_in = [cell for cell in self.cells if not is_learned(cell.cell.sampler)]
        return QualityProfile(
            model=self.model,
            digest=self.digest,
            guidance_scale=self.guidance_scale,
            measure=self.measure,
            measured_on=self.measured_on,
            points=_points(choose(self.cells)),
            built_in=None if len(built_in) == len(self.cells) else _points(choose(built_in)),
        )


def front(cells: Iterable[MeasuredCell]) -> list[MeasuredCell]:
    """Return the cells of the front of PSNR against seconds, the fastest first.

    Each is closer to the converged image than the one before by at least ``LEAST_GAIN_DB``.
    """
    front_cells: list[MeasuredCell] = []
    for dot in pareto_front(_dots(cells), more_is_better=True):
        cell = cast(MeasuredCell, dot.summary)
        if not front_cells or cell.psnr_db >= front_cells[-1].psnr_db + LEAST_GAIN_DB:
            front_cells.append(cell)
    return front_cells


def choose(cells: Iterable[MeasuredCell]) -> dict[str, MeasuredCell]:
    """Return the cell of each quality word."""
    line = front(cells)
    best = line[-1]
    if any(cell.verdict for cell in line):
        auto = next((cell for cell in line if cell.verdict in (EQUIVALENT, BETTER)), best)
    else:
        dot = knee(_dots(line))
        auto = best if dot is None else cast(MeasuredCell, dot.summary)
    fast = [cell for cell in line if cell.seconds <= DRAFT_SHARE * auto.seconds]
    cell_by_word = {"draft": fast[-1] if fast else line[0], "max": best, "auto": auto}
    for name, share in SHARES.items():
        seconds = auto.seconds ** (1 - share) * best.seconds**share
        cell_by_word[name] = _nearest(line, seconds)
    return cell_by_word


def _nearest(line: Iterable[MeasuredCell], seconds: float) -> MeasuredCell:
    """Return the cell whose time has the smallest ratio to ``seconds``."""
    return min(line, key=lambda cell: abs(math.log(cell.seconds / seconds)))


def _points(cell_by_word: dict[str, MeasuredCell]) -> QualityPoints:
    return QualityPoints(**{name: cell.point for name, cell in cell_by_word.items()})


def _dots(cells: Iterable[MeasuredCell]) -> tuple[ChartDot, ...]:
    return tuple(ChartDot(cell.seconds, Estimate(cell.psnr_db), cast(CellSummary, cell)) for cell in cells)

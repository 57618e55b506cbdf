"""A sweep's table: one row for each cell, as CSV and JSON. No torch, no engine: a page reads and writes it too."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.plan import Cell

if TYPE_CHECKING:
    from diffserve.experiments.analysis import Analysis
    from diffserve.experiments.records import SoloTime

PART_NAMES = ("background", "objects", "relation", "size")


class CellSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    measures      by the name of the :class:`Measure`; those that could not be measured are missing
    parts         share of pictures that are right in each part, where prompts can be checked
    spacing       of the timesteps, as the engine resolved it
    evaluations   UNet rows an image took, two a step under guidance
    step_ms       a step of one image alone: median, least and most of the timed rounds
    alone_s       the whole image alone, steps and decoding, median
    engine_s      mean share of an image in the engine's time while all cells shared it, 0 where that is not known
    """

    cell: Cell
    num_images: int
    measures: dict[str, Estimate]
    parts: dict[str, float]
    spacing: str
    evaluations: float
    step_ms: Estimate
    alone_s: float
    engine_s: float

    @property
    def images_per_s(self) -> float:
        """Images a second when the engine is full, by the time that these images took of it."""
        return 1 / self.engine_s if self.engine_s else 0.0

    def value(self, measure: Measure) -> Estimate | None:
        """A measure, or ``None``."""
        return self.measures.get(measure.value)


def summarise(analysis: Analysis, cell: Cell, time: SoloTime) -> CellSummary:
    """The row of one complete cell."""
    records = analysis.records(cell)
    rounds = (min(time.step_ms), max(time.step_ms)) if len(time.step_ms) > 1 else ()
    measures = {measure.value: found for measure in Measure if (found := analysis.estimate(cell, measure)) is not None}
    verdicts = [record.parts for record in records if record.parts is not None]
    return CellSummary(
        cell=cell,
        num_images=len(records),
        measures=measures,
        parts={name: statistics.fmean(getattr(one, name) for one in verdicts) for name in PART_NAMES if verdicts},
        spacing=records[0].spacing,
        evaluations=statistics.fmean(record.evaluations for record in records),
        step_ms=Estimate(statistics.median(time.step_ms), *rounds),
        alone_s=statistics.median(time.image_s),
        engine_s=statistics.fmean(record.engine_s for record in records),
    )


def write_csv(summaries: Sequence[CellSummary], *, seconds_are: str | None = None) -> str:
    """The table as CSV, one line a cell; a measure that is missing is an empty field.

    Where the engine's own time is not known its columns are missing. ``seconds_are`` says on every line where seconds
    come from.
    """
    measures = [measure for measure in Measure if any(one.value(measure) for one in summaries)]
    more = {} if seconds_are is None else {"seconds_are": seconds_are}
    rows = [dict(_fields(one, measures)) | more for one in summaries]
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _fields(one: CellSummary, measures: Iterable[Measure]) -> Iterator[tuple[str, object]]:
    cell = one.cell
    yield from {"sampler": cell.sampler, "steps": cell.num_steps, "guidance": f"{cell.guidance_scale:g}"}.items()
    yield from {"converged": int(cell.is_reference), "spacing": one.spacing, "images": one.num_images}.items()
    yield "evaluations", f"{one.evaluations:g}"
    for measure in measures:
        yield from _with_interval(measure.value, one.value(measure))
    yield from ((f"{name}_right", f"{share:.6g}") for name, share in one.parts.items())
    yield from _with_interval("ms_per_step_alone", one.step_ms)
    yield "seconds_alone", f"{one.alone_s:.6g}"
    if one.engine_s:
        yield "engine_seconds", f"{one.engine_s:.6g}"
        yield "images_per_s", f"{one.images_per_s:.6g}"


def _with_interval(name: str, found: Estimate | None) -> Iterator[tuple[str, str]]:
    values: Mapping[str, float | None] = {name: None, f"{name}_low": None, f"{name}_high": None}
    if found is not None:
        values = {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    yield from ((key, "" if value is None else f"{value:.6g}") for key, value in values.items())

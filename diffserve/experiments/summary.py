"""Summary table of a sweep with one row per cell, as CSV and JSON, without torch or an engine."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from diffserve.experiments.estimates import CheckerError, Estimate, Measure
from diffserve.experiments.plan import Cell

if TYPE_CHECKING:
    from diffserve.experiments.analysis import Analysis
    from diffserve.experiments.records import SoloTime

PART_NAMES = ("background", "objects", "relation", "size")


class CellSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one cell.

    Attributes:
        cell: Sampler, steps and guidance.
        num_images: Number of images.
        measures: Estimates by the name of the :class:`Measure`, without those that could not be measured.
        parts: Share of correct images for each part, if prompts can be checked.
        spacing: Timestep spacing that the engine used.
        evaluations: UNet rows per image, two per step with guidance.
        step_ms: Milliseconds per step of an image generated alone: median, minimum and maximum of the rounds.
        alone_s: Median seconds of an image generated alone, including decoding.
        engine_s: Mean share of an image in the engine's time while cells shared it, 0 if unknown.
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
        """Images per second of a fully loaded engine, derived from ``engine_s``."""
        return 1 / self.engine_s if self.engine_s else 0.0

    def value(self, measure: Measure) -> Estimate | None:
        """Return the estimate of a measure, or ``None``."""
        return self.measures.get(measure.value)


def summarise(analysis: Analysis, cell: Cell, time: SoloTime) -> CellSummary:
    """Summarize a complete cell."""
    records = analysis.records(cell)
    rounds = (min(time.step_ms), max(time.step_ms)) if len(time.step_ms) > 1 else ()
    measures = {
        measure.value: estimate for measure in Measure if (estimate := analysis.estimate(cell, measure)) is not None
    }
    verdicts = [record.parts for record in records if record.parts is not None]
    return CellSummary(
        cell=cell,
        num_images=len(records),
        measures=measures,
        parts={
            name: statistics.fmean(getattr(verdict, name) for verdict in verdicts) for name in PART_NAMES if verdicts
        },
        spacing=records[0].spacing,
        evaluations=statistics.fmean(record.evaluations for record in records),
        step_ms=Estimate(statistics.median(time.step_ms), *rounds),
        alone_s=statistics.median(time.image_s),
        engine_s=statistics.fmean(record.engine_s for record in records),
    )


def write_csv(
    summaries: Sequence[CellSummary], checker: CheckerError | None = None, *, seconds_are: str | None = None
) -> str:
    """Format the table as CSV with one line per cell.

    Missing measures are empty fields. Columns of engine time are omitted if it is unknown.

    Args:
        summaries: The rows.
        checker: The checker's own error, added as columns if it was measured.
        seconds_are: Origin of the seconds, added as a column if set.
    """
    measures = [measure for measure in Measure if any(summary.value(measure) for summary in summaries)]
    extra: dict[str, object] = {} if seconds_are is None else {"seconds_are": seconds_are}
    if checker is not None:
        extra |= {"checker_missed": f"{checker.missed:.6g}"}
        extra |= {"checker_wrong": "" if checker.wrong is None else f"{checker.wrong:.6g}"}
    names = dict.fromkeys(name for summary in summaries for name, _ in summary.cell.settings)
    rows = [dict(_fields(summary, measures, names)) | extra for summary in summaries]
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _fields(summary: CellSummary, measures: Iterable[Measure], names: Iterable[str]) -> Iterator[tuple[str, object]]:
    cell = summary.cell
    yield from {"sampler": cell.sampler, "steps": cell.num_steps, "guidance": f"{cell.guidance_scale:g}"}.items()
    settings = dict(cell.settings)
    yield from ((name, settings.get(name, "")) for name in names)
    yield from {"converged": int(cell.is_reference), "spacing": summary.spacing, "images": summary.num_images}.items()
    yield "evaluations", f"{summary.evaluations:g}"
    for measure in measures:
        yield from _with_interval(measure.value, summary.value(measure))
    yield from ((f"{name}_right", f"{share:.6g}") for name, share in summary.parts.items())
    yield from _with_interval("ms_per_step_alone", summary.step_ms)
    yield "seconds_alone", f"{summary.alone_s:.6g}"
    if summary.engine_s:
        yield "engine_seconds", f"{summary.engine_s:.6g}"
        yield "images_per_s", f"{summary.images_per_s:.6g}"


def _with_interval(name: str, estimate: Estimate | None) -> Iterator[tuple[str, str]]:
    values: Mapping[str, float | None] = {name: None, f"{name}_low": None, f"{name}_high": None}
    if estimate is not None:
        values = {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    yield from ((key, "" if value is None else f"{value:.6g}") for key, value in values.items())

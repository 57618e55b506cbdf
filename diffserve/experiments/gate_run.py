"""Runs a precision gate: generates images with one precision after the other and evaluates the candidates.

Engines are opened one at a time, the reference first, so only one model is in memory. Results are stored under
``parts/<precision>``, and an interrupted gate resumes there.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from diffserve.experiments import provenance
from diffserve.experiments.engine_painter import EnginePainter, request_for
from diffserve.experiments.estimates import Estimate
from diffserve.experiments.experiment import complete
from diffserve.experiments.folder import PARTS, refuse_folder
from diffserve.experiments.gate import RESULTS, GateLimits, GateReport, GateRow, PrecisionGate, broken
from diffserve.experiments.gate_report import write_gate
from diffserve.experiments.intervals import bootstrap_interval
from diffserve.experiments.measure import ImageMeasures, PromptCheck
from diffserve.experiments.painter import FinishedImage
from diffserve.experiments.plan import Cell, PlannedImage, SweepPlan
from diffserve.experiments.records import ImageRecord, features_of
from diffserve.experiments.run import setup_of
from diffserve.experiments.store import Store

if TYPE_CHECKING:
    from diffserve.engine import Engine


@dataclass(frozen=True)
class GateProgress:
    """Progress of one precision: ``num_done`` of ``num_images`` images are finished."""

    precision: str
    num_done: int
    num_images: int


def run_gate(
    gate: PrecisionGate,
    plan: SweepPlan,
    limits: GateLimits,
    folder: Path,
    open_engine: Callable[[str], Engine],
    on_progress: Callable[[GateProgress], None] = lambda _: None,
) -> GateReport:
    """Generate the cells of ``plan`` in every precision, evaluate the candidates, and write the files of the gate.

    Args:
        gate: Reference and candidate precisions.
        plan: Cells, prompts and seeds.
        limits: Limits for the candidates.
        folder: Output folder.
        open_engine: Opens the model in a precision.
        on_progress: Called after each image.

    Raises:
        InvalidRequest: The folder cannot be used, or an engine rejects the plan.
    """
    refuse_folder(folder, RESULTS)
    initial_machine = provenance.machine()
    painted: dict[str, _Painted] = {}
    for name in gate.names:
        painted[name] = _paint(name, plan, folder, open_engine, painted.get(gate.reference), on_progress)
        gc.collect()  # engine and model form reference cycles; free their memory for the next ones
    rows = tuple(
        judge(painted[name], cell, painted[gate.reference], limits) for name in gate.names for cell in plan.cells
    )
    report = GateReport(gate, limits, rows, folder)
    _write(report, plan, painted, initial_machine)
    return report


@dataclass(frozen=True)
class _Painted:
    """Results of one precision, with its records by cell in the order of the places."""

    precision: str
    model: Mapping[str, Any]
    unet_bytes: int
    why_not: str | None
    store: Store
    records: Mapping[Cell, Sequence[ImageRecord]]


def _paint(
    name: str,
    plan: SweepPlan,
    folder: Path,
    open_engine: Callable[[str], Engine],
    reference: _Painted | None,
    on_progress: Callable[[GateProgress], None],
) -> _Painted:
    from diffserve.experiments.metrics.feature_network import FeatureNetwork

    engine = open_engine(name)
    for cell in plan.cells:
        engine.check(request_for(plan, cell, plan.places[0]))
    check = PromptCheck(engine.info.family, plan.prompts)
    measures = ImageMeasures(check, FeatureNetwork())
    setup = setup_of(engine, plan, is_checked=check.wishes is not None)
    with Store(folder / PARTS / name, setup, results=()) as store:
        missing = [image for image in plan.images() if not _is_done(image, store, is_reference=reference is None)]

        async def paint() -> None:
            painter, num_done = EnginePainter(engine, plan), 0
            try:
                async for event in painter.paint(missing):
                    if isinstance(event, FinishedImage):
                        cell, place = event.image.cell, event.image.place
                        if reference is None:
                            store.save(event, always=True)
                        converged = None if reference is None else reference.store.load(cell, place)
                        store.add(cell, measures.measure(event, converged))
                        num_done += 1
                        on_progress(GateProgress(name, plan.num_images - len(missing) + num_done, plan.num_images))
            finally:
                painter.close()

        if missing:
            engine.warm_up()
            complete(paint())
        return _Painted(
            precision=name,
            model=provenance.model(engine.info, is_deterministic=engine.is_deterministic),
            unet_bytes=next(part.weights_bytes for part in engine.model.memory_report() if part.component == "unet"),
            why_not=check.why_not,
            store=store,
            records={cell: [store.records(cell)[place] for place in plan.places] for cell in plan.cells},
        )


def _is_done(image: PlannedImage, store: Store, *, is_reference: bool) -> bool:
    return image.place in store.records(image.cell) and (not is_reference or store.has(image.cell, image.place))


def judge(painted: _Painted, cell: Cell, reference: _Painted, limits: GateLimits) -> GateRow:
    """Compute the measures of a precision in a cell and the limits that it violates; the reference has no limits."""
    from diffserve.experiments.metrics.set_distance import frechet_distance

    records, reference_records = list(painted.records[cell]), list(reference.records[cell])
    groups = [record.prompt_index for record in records] if len({r.prompt_index for r in records}) > 1 else None

    def mean(values: Sequence[float]) -> Estimate:
        return Estimate(statistics.fmean(values), *bootstrap_interval(values, groups))

    exact = [record.parts.exact for record in records if record.parts]
    row = GateRow(
        precision=painted.precision,
        cell=cell,
        num_images=len(records),
        unet_bytes=painted.unet_bytes,
        engine_s=statistics.fmean(record.engine_s for record in records),
        exact=statistics.fmean(exact) if len(exact) == len(records) else None,
    )
    if painted is reference:
        return row
    psnr = [record.distance.psnr_db for record in records if record.distance and record.distance.psnr_db is not None]
    ssim = [record.distance.ssim for record in records if record.distance and record.distance.ssim is not None]
    pairs = [(a.parts, b.parts) for a, b in zip(records, reference_records, strict=True) if a.parts and b.parts]
    change = mean([a.exact - b.exact for a, b in pairs]) if len(pairs) == len(records) else None
    row = msgspec.structs.replace(
        row,
        exact_change=change,
        psnr_db=mean(psnr),
        worst_psnr_db=min(psnr),
        ssim=statistics.fmean(ssim),
        frechet=frechet_distance(features_of(reference_records), features_of(records)) if len(records) > 1 else None,
    )
    return msgspec.structs.replace(row, failures=tuple(broken(row, limits)))


def _write(
    report: GateReport, plan: SweepPlan, painted: Mapping[str, _Painted], initial_machine: Mapping[str, Any]
) -> None:
    why_not = next((result.why_not for result in painted.values() if result.why_not), None)
    document = {
        "date": provenance.now(),
        "versions": provenance.versions(),
        "machine": initial_machine,
        "models": {name: result.model for name, result in painted.items()},
        "plan": plan,
        "limits": report.limits,
        "reference": report.gate.reference,
        "failed": report.failed,
        "rows": report.rows,
        "notes": [f"Prompt match was not measured: {why_not}"] if why_not else [],
    }
    cell = plan.cells[0]
    shown = {
        name: [record.thumbnail for record in result.records[cell] if record.thumbnail]
        for name, result in painted.items()
    }
    write_gate(report, document, shown)

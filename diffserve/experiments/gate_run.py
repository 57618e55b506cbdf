"""Paint the pictures of a gate in one precision after the other, and judge them.

Engines are opened one after the other, the reference's first, so that no two models are held at once. Whatever was
painted is kept under ``parts/<precision>``, and the same gate goes on where it was.
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
    """``precision`` has ``num_done`` of its ``num_images`` pictures."""

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
    """Paint the cells of ``plan`` in every precision, judge the candidates, and write gate.json, gate.md and gate.png.

    ``open_engine`` opens the model in a precision. Raises :class:`InvalidRequest` for a folder that cannot be used, and
    what engines raise.
    """
    refuse_folder(folder, RESULTS)
    begun = provenance.machine()
    painted: dict[str, _Painted] = {}
    for name in gate.names:
        painted[name] = _paint(name, plan, folder, open_engine, painted.get(gate.reference), on_progress)
        gc.collect()  # an engine and its model go in circles; the next one needs their room
    rows = tuple(
        judge(painted[name], cell, painted[gate.reference], limits) for name in gate.names for cell in plan.cells
    )
    report = GateReport(gate, limits, rows, folder)
    _write(report, plan, painted, begun)
    return report


@dataclass(frozen=True)
class _Painted:
    """What one precision painted: records by cell in the order of the places."""

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


def judge(one: _Painted, cell: Cell, reference: _Painted, limits: GateLimits) -> GateRow:
    """The measures of a precision in a cell, and the limits that it breaks; the reference breaks none."""
    from diffserve.experiments.metrics.set_distance import frechet_distance

    records, others = list(one.records[cell]), list(reference.records[cell])
    groups = [record.prompt_index for record in records] if len({r.prompt_index for r in records}) > 1 else None

    def mean(values: Sequence[float]) -> Estimate:
        return Estimate(statistics.fmean(values), *bootstrap_interval(values, groups))

    exact = [record.parts.exact for record in records if record.parts]
    row = GateRow(
        precision=one.precision,
        cell=cell,
        num_images=len(records),
        unet_bytes=one.unet_bytes,
        engine_s=statistics.fmean(record.engine_s for record in records),
        exact=statistics.fmean(exact) if len(exact) == len(records) else None,
    )
    if one is reference:
        return row
    psnr = [record.distance.psnr_db for record in records if record.distance and record.distance.psnr_db is not None]
    ssim = [record.distance.ssim for record in records if record.distance and record.distance.ssim is not None]
    pairs = [(a.parts, b.parts) for a, b in zip(records, others, strict=True) if a.parts and b.parts]
    change = mean([a.exact - b.exact for a, b in pairs]) if len(pairs) == len(records) else None
    row = msgspec.structs.replace(
        row,
        exact_change=change,
        psnr_db=mean(psnr),
        worst_psnr_db=min(psnr),
        ssim=statistics.fmean(ssim),
        frechet=frechet_distance(features_of(others), features_of(records)) if len(records) > 1 else None,
    )
    return msgspec.structs.replace(row, failures=tuple(broken(row, limits)))


def _write(report: GateReport, plan: SweepPlan, painted: Mapping[str, _Painted], begun: Mapping[str, Any]) -> None:
    why_not = next((one.why_not for one in painted.values() if one.why_not), None)
    document = {
        "date": provenance.now(),
        "versions": provenance.versions(),
        "machine": begun,
        "models": {name: one.model for name, one in painted.items()},
        "plan": plan,
        "limits": report.limits,
        "reference": report.gate.reference,
        "failed": report.failed,
        "rows": report.rows,
        "notes": [f"Prompt match was not measured: {why_not}"] if why_not else [],
    }
    cell = plan.cells[0]
    shown = {name: [one.thumbnail for one in kept.records[cell] if one.thumbnail] for name, kept in painted.items()}
    write_gate(report, document, shown)

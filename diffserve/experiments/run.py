"""Run a sweep: paint what is missing, measure each picture, time every cell, and write the report.

``sweep`` is the whole of it; ``run_plan`` does it with an engine and a plan that are there. Nothing heavy is imported
before one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from diffserve.experiments import prompts as prompt_lists
from diffserve.experiments.engine_painter import EnginePainter, merge_rounds, request_for, time_alone
from diffserve.experiments.experiment import complete, paint_measured
from diffserve.experiments.folder import refuse_folder, refuse_other_sweep
from diffserve.experiments.measure import ImageMeasures, PromptCheck
from diffserve.experiments.painter import FinishedImage, PaintEvent, RowsDone
from diffserve.experiments.plan import (
    DEFAULT_PROMPTS,
    DEFAULT_SAMPLERS,
    DEFAULT_SEEDS,
    DEFAULT_STEPS,
    REFERENCE_STEPS,
    TIMED_ROUNDS,
    Cell,
    PlannedImage,
    SweepPlan,
)
from diffserve.experiments.provenance import machine, versions
from diffserve.experiments.records import SoloTime
from diffserve.experiments.report import RESULTS, SweepReport, write_report
from diffserve.experiments.store import Store
from diffserve.version import __version__
from diffserve.world.checker import EDITION

if TYPE_CHECKING:
    from diffserve.engine import Engine

RECORD_VERSION = 1


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is: ``rows_done`` of the ``num_rows`` UNet rows that were left when it began.

    phase     "painting", "timing" or "reporting"
    finished  the cell that has just become complete, if one has
    """

    phase: str
    rows_done: int
    num_rows: int
    finished: Cell | None = None


OnProgress = Callable[[SweepProgress], None]


def sweep(
    model: str | Path | Engine = "embedded",
    *,
    folder: str | Path,
    samplers: Sequence[str] = DEFAULT_SAMPLERS,
    steps: Sequence[int] = DEFAULT_STEPS,
    guidance: float | Sequence[float] | None = None,
    prompts: int | Sequence[str] = DEFAULT_PROMPTS,
    seeds: int = DEFAULT_SEEDS,
    first_seed: int = 0,
    reference_steps: int = REFERENCE_STEPS,
    on_progress: OnProgress | None = None,
) -> SweepReport:
    """Paint every sampler with every number of steps on the same prompts and seeds, and write a report into ``folder``.

    model    what ``Engine.from_pretrained`` takes, or an engine, which nobody else may use meanwhile
    guidance one or several scales; ``None``: the model's own
    prompts  so many held-out captions of the embedded model, or the prompts themselves

    A sweep that was interrupted goes on where it was when it is called again with the same folder. Raises
    :class:`InvalidRequest` before anything is painted or made, and what the engine raises while painting.
    """
    from diffserve.engine import Engine

    texts = prompt_lists.held_out_prompts(prompts) if isinstance(prompts, int) else tuple(prompts)
    scales = (guidance,) if isinstance(guidance, int | float) else guidance
    plan = SweepPlan(  # made, and so checked, before a model is loaded
        samplers=tuple(samplers),
        steps=tuple(steps),
        guidance=(1.0,) if scales is None else tuple(scales),
        prompts=texts,
        num_seeds=seeds,
        first_seed=first_seed,
        reference_steps=reference_steps,
    )
    refuse_early(plan, Path(folder))
    engine = model if isinstance(model, Engine) else Engine.from_pretrained(model)
    if scales is None:
        plan = msgspec.structs.replace(plan, guidance=(engine.info.default_guidance_scale,))
    return run_plan(engine, plan, Path(folder), on_progress)


def refuse_early(plan: SweepPlan, folder: Path) -> None:
    """Raise :class:`InvalidRequest` for all that is wrong with ``folder`` and can be known before a model is loaded."""
    refuse_folder(folder, RESULTS)
    refuse_other_sweep(folder, _planned(plan))


def run_plan(engine: Engine, plan: SweepPlan, folder: Path, on_progress: OnProgress | None = None) -> SweepReport:
    """Do ``plan`` with ``engine``; see :func:`sweep`."""
    plan.check(engine.info)
    for cell in (*plan.references, *plan.cells):
        engine.check(request_for(plan, cell, plan.places[0]))
    check = PromptCheck(engine.info.family, plan.prompts)
    begun = machine()
    setup = setup_of(engine, plan, is_checked=check.wishes is not None)
    with Store(folder, setup, results=RESULTS) as store:
        running = _SweepRun(engine, plan, store, check, on_progress or (lambda _: None))
        running.paint()
        times = running.time()
        running.tell("reporting")
        return write_report(engine=engine, plan=plan, store=store, times=times, check=check, begun=begun)


class _SweepRun:
    """The parts of a sweep that take long, and the account of how far they are."""

    def __init__(
        self, engine: Engine, plan: SweepPlan, store: Store, check: PromptCheck, on_progress: OnProgress
    ) -> None:
        self.engine, self.plan, self.store = engine, plan, store
        self._check = check
        self._on_progress = on_progress
        self._times_name = f"times-{store.digest(plan.references[0], {'cells': plan.all_cells})}.json"
        self._images = [image for image in plan.images() if not self._is_done(image)]
        self._known_times = self._read_times()
        timed_rows = 0 if self._known_times else TIMED_ROUNDS * sum(cell.rows for cell in plan.all_cells)
        self._num_rows = sum(image.cell.rows for image in self._images) + timed_rows
        self._rows_done = 0.0

    def tell(self, phase: str, finished: Cell | None = None) -> None:
        """Report how far the sweep is."""
        rows_done = min(int(self._rows_done), self._num_rows)
        self._on_progress(SweepProgress(phase, rows_done, self._num_rows, finished))

    def paint(self) -> None:
        """Paint and measure what is missing; every picture is on disk before the next tick."""
        if not self._images:
            return
        from diffserve.experiments.metrics.feature_network import FeatureNetwork

        measures = ImageMeasures(self._check, FeatureNetwork())
        self.engine.warm_up()  # so that no image is charged for it
        painter = EnginePainter(self.engine, self.plan)
        complete(paint_measured(self.plan, painter, measures, self.store, self._images, self._count))

    def time(self) -> dict[Cell, SoloTime]:
        """Paint one picture of each cell alone, unless that was done before."""
        if self._known_times:
            return self._known_times
        rounds: dict[Cell, list[SoloTime]] = {cell: [] for cell in self.plan.all_cells}
        for cell, found in time_alone(self.engine, self.plan):
            rounds[cell].append(found)
            self._rows_done += cell.rows
            self.tell("timing")
        times = {cell: merge_rounds(found) for cell, found in rounds.items()}
        self.store.write_json(self._times_name, {cell.slug: time for cell, time in times.items()})
        return times

    def _is_done(self, image: PlannedImage) -> bool:
        is_kept = not image.cell.is_reference or self.store.has(image.cell, image.place)
        return is_kept and image.place in self.store.records(image.cell)

    def _count(self, event: PaintEvent) -> None:
        if isinstance(event, RowsDone):
            self._rows_done += sum(event.rows.values())
            self.tell("painting")
        elif isinstance(event, FinishedImage):
            cell = event.image.cell
            if len(self.store.records(cell)) == len(self.plan.places):
                self.tell("painting", finished=cell)

    def _read_times(self) -> dict[Cell, SoloTime] | None:
        known = self.store.read_json(self._times_name)
        try:
            found = msgspec.convert(known, dict[str, SoloTime])
            return {cell: found[cell.slug] for cell in self.plan.all_cells}
        except (msgspec.ValidationError, KeyError):
            return None


def setup_of(engine: Engine, plan: SweepPlan, *, is_checked: bool) -> Mapping[str, Any]:
    """Everything but the cell that a picture's numbers depend on."""
    from diffserve.experiments.metrics.feature_network import NETWORK_VERSION

    info = engine.info
    return {
        "versions": {
            "record": RECORD_VERSION,
            "network": NETWORK_VERSION,
            "checker": EDITION,
            "diffserve": __version__,
        },
        "torch": versions()["torch"],
        "weights": engine.model.digest,
        "dtype": info.dtype,
        "device": info.device,
        "spacing": info.default_spacing,
        "size": info.good_sizes[0],
        "is_deterministic": engine.is_deterministic,
        "is_checked": is_checked,
        **_planned(plan),
    }


def _planned(plan: SweepPlan) -> dict[str, Any]:
    """The part of a setup that the plan alone says."""
    return {
        "prompts": plan.prompts,
        "num_seeds": plan.num_seeds,
        "first_seed": plan.first_seed,
        "reference_steps": plan.reference_steps,
    }

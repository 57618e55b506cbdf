"""Runs a sweep: generates missing images, measures them, times every cell, and writes the report.

``sweep`` is the main entry point; ``run_plan`` takes an existing engine and plan. Heavy libraries are imported only
when one of them runs.
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
    """Progress of a sweep.

    Attributes:
        phase: "painting", "timing" or "reporting".
        rows_done: UNet rows finished in this run.
        num_rows: UNet rows that were missing when this run started.
        finished: The cell that was just completed, if any.
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
    """Compare samplers and step counts on the same prompts and seeds, and write a report into ``folder``.

    An interrupted sweep resumes when it is called again with the same folder.

    Args:
        model: A model for ``Engine.from_pretrained``, or an engine that is not used elsewhere during the sweep.
        folder: Output folder.
        samplers: Sampler names.
        steps: Step counts.
        guidance: One or several guidance scales, ``None`` for the model's default.
        prompts: Prompt texts, or the number of held-out captions of the embedded model to use.
        seeds: Images per prompt.
        first_seed: Seed of the first image.
        reference_steps: DDIM steps of the converged images.
        on_progress: Called with the progress of the sweep.

    Raises:
        InvalidRequest: An argument or the folder is invalid; raised before anything is generated or written.
    """
    from diffserve.engine import Engine

    texts = prompt_lists.held_out_prompts(prompts) if isinstance(prompts, int) else tuple(prompts)
    scales = (guidance,) if isinstance(guidance, int | float) else guidance
    plan = SweepPlan(  # validated before a model is loaded
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
    """Check ``folder`` before a model is loaded.

    Raises:
        InvalidRequest: The folder cannot be written or holds another sweep.
    """
    refuse_folder(folder, RESULTS)
    refuse_other_sweep(folder, _plan_setup(plan))


def run_plan(engine: Engine, plan: SweepPlan, folder: Path, on_progress: OnProgress | None = None) -> SweepReport:
    """Run ``plan`` with ``engine`` and write the report into ``folder``; see :func:`sweep`."""
    plan.check(engine.info)
    for cell in (*plan.references, *plan.cells):
        engine.check(request_for(plan, cell, plan.places[0]))
    check = PromptCheck(engine.info.family, plan.prompts)
    initial_machine = machine()
    setup = setup_of(engine, plan, is_checked=check.wishes is not None)
    with Store(folder, setup, results=RESULTS) as store:
        running = _SweepRun(engine, plan, store, check, on_progress or (lambda _: None))
        running.paint()
        times = running.time()
        running.report_progress("reporting")
        return write_report(
            engine=engine, plan=plan, store=store, times=times, check=check, initial_machine=initial_machine
        )


class _SweepRun:
    """The long-running phases of a sweep, with their progress."""

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

    def report_progress(self, phase: str, finished: Cell | None = None) -> None:
        """Report the current progress of the sweep."""
        rows_done = min(int(self._rows_done), self._num_rows)
        self._on_progress(SweepProgress(phase, rows_done, self._num_rows, finished))

    def paint(self) -> None:
        """Generate and measure missing images; every record is on disk before the next engine tick."""
        if not self._images:
            return
        from diffserve.experiments.metrics.feature_network import FeatureNetwork

        measures = ImageMeasures(self._check, FeatureNetwork())
        self.engine.warm_up()  # so that its time is not charged to an image
        painter = EnginePainter(self.engine, self.plan)
        complete(paint_measured(self.plan, painter, measures, self.store, self._images, self._count))

    def time(self) -> dict[Cell, SoloTime]:
        """Generate one image of each cell alone and return the times, which are reused if they exist."""
        if self._known_times:
            return self._known_times
        rounds: dict[Cell, list[SoloTime]] = {cell: [] for cell in self.plan.all_cells}
        for cell, solo_time in time_alone(self.engine, self.plan):
            rounds[cell].append(solo_time)
            self._rows_done += cell.rows
            self.report_progress("timing")
        times = {cell: merge_rounds(cell_rounds) for cell, cell_rounds in rounds.items()}
        self.store.write_json(self._times_name, {cell.slug: time for cell, time in times.items()})
        return times

    def _is_done(self, image: PlannedImage) -> bool:
        is_stored = not image.cell.is_reference or self.store.has(image.cell, image.place)
        return is_stored and image.place in self.store.records(image.cell)

    def _count(self, event: PaintEvent) -> None:
        if isinstance(event, RowsDone):
            self._rows_done += sum(event.rows.values())
            self.report_progress("painting")
        elif isinstance(event, FinishedImage):
            cell = event.image.cell
            if len(self.store.records(cell)) == len(self.plan.places):
                self.report_progress("painting", finished=cell)

    def _read_times(self) -> dict[Cell, SoloTime] | None:
        document = self.store.read_json(self._times_name)
        try:
            times = msgspec.convert(document, dict[str, SoloTime])
            return {cell: times[cell.slug] for cell in self.plan.all_cells}
        except (msgspec.ValidationError, KeyError):
            return None


def setup_of(engine: Engine, plan: SweepPlan, *, is_checked: bool) -> Mapping[str, Any]:
    """Return everything except the cell that the results of an image depend on."""
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
        **_plan_setup(plan),
    }


def _plan_setup(plan: SweepPlan) -> dict[str, Any]:
    """Return the part of a setup that depends only on the plan."""
    return {
        "prompts": plan.prompts,
        "num_seeds": plan.num_seeds,
        "first_seed": plan.first_seed,
        "reference_steps": plan.reference_steps,
    }

"""Runs a sweep: generates missing images, measures them, times every cell, and writes the report.

``sweep`` is the main entry point; ``run_plan`` takes an existing engine and plan; gates share ``generate_missing``.
Heavy libraries are imported only when one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from diffserve.experiments import prompts as prompt_lists
from diffserve.experiments.engine_generator import EngineGenerator, request_for, time_alone
from diffserve.experiments.generation import complete, generate_measured
from diffserve.experiments.measure import ImageMeasures, PromptCheck
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
from diffserve.experiments.records import FinishedImage, GenerationEvent, RowsDone, SoloTime
from diffserve.experiments.report import RESULTS, SweepReport, write_report
from diffserve.experiments.store import Store, refuse_folder, refuse_other_sweep
from diffserve.version import __version__
from diffserve.world.checker import EDITION

if TYPE_CHECKING:
    from diffserve.engine import Engine

RECORD_VERSION = 1


@dataclass(frozen=True)
class SweepProgress:
    """Progress of a sweep, or of one precision of a gate.

    Attributes:
        phase: "painting", "timing" or "reporting", or the precision of a gate.
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
    check = check_plan(engine, plan)
    initial_machine = machine()
    with Store(folder, setup_of(engine, plan, check), results=RESULTS) as store:
        images = store.missing(plan)
        times_name = f"times-{store.digest(plan.references[0], {'cells': plan.all_cells})}.json"
        times = _read_times(store, times_name, plan)
        timed_rows = 0 if times else TIMED_ROUNDS * sum(cell.rows for cell in plan.all_cells)
        counter = ProgressCounter(on_progress, sum(image.cell.rows for image in images) + timed_rows)
        generate_missing(engine, plan, store, check, images, partial(counter.add, "painting"))
        if not times:
            times = time_alone(engine, plan, lambda cell: counter.add("timing", cell.rows))
            store.write_json(times_name, {cell.slug: time for cell, time in times.items()})
        counter.add("reporting")
        return write_report(
            engine=engine, plan=plan, store=store, times=times, check=check, initial_machine=initial_machine
        )


class ProgressCounter:
    """Counts finished UNet rows and reports the progress.

    Args:
        on_progress: Called with the progress of the run.
        num_rows: UNet rows that are missing.
    """

    def __init__(self, on_progress: OnProgress | None, num_rows: int) -> None:
        self._on_progress = on_progress
        self._num_rows = num_rows
        self._rows_done = 0.0

    def add(self, phase: str, rows: float = 0.0, finished: Cell | None = None) -> None:
        """Add ``rows`` and report the progress of ``phase``, with the cell that was just completed, if any."""
        self._rows_done += rows
        if self._on_progress is not None:
            rows_done = min(int(self._rows_done), self._num_rows)
            self._on_progress(SweepProgress(phase, rows_done, self._num_rows, finished))


def check_plan(engine: Engine, plan: SweepPlan) -> PromptCheck:
    """Check that ``engine`` accepts the requests of every cell, and return the checker of the prompts.

    Raises:
        InvalidRequest: The engine rejects a request.
    """
    for cell in (*plan.references, *plan.cells):
        engine.check(request_for(plan, cell, plan.places[0]))
    return PromptCheck(engine.info.family, plan.prompts)


def generate_missing(
    engine: Engine,
    plan: SweepPlan,
    store: Store,
    check: PromptCheck,
    images: Sequence[PlannedImage],
    on_rows: Callable[[float, Cell | None], None],
    reference_store: Store | None = None,
) -> None:
    """Generate and measure missing images; every record is on disk before the next engine tick.

    Args:
        engine: Generates the images.
        plan: The plan that the images belong to.
        store: Receives the records.
        check: Checks images against their prompts.
        images: The missing images.
        on_rows: Called with the UNet rows of each tick and ``None``, and with each cell that is completed.
        reference_store: Images to compare with, by default the plan's converged images.
    """
    if not images:
        return
    from diffserve.experiments.metrics.set_distance import FeatureNetwork

    def count(event: GenerationEvent) -> None:
        if isinstance(event, RowsDone):
            on_rows(sum(event.rows.values()), None)
        elif isinstance(event, FinishedImage) and len(store.records(event.image.cell)) == len(plan.places):
            on_rows(0.0, event.image.cell)

    measures = ImageMeasures(check, FeatureNetwork())
    engine.warm_up()  # so that its time is not charged to an image
    generator = EngineGenerator(engine, plan)
    complete(generate_measured(plan, generator, measures, store, images, count, reference_store=reference_store))


def _read_times(store: Store, name: str, plan: SweepPlan) -> dict[Cell, SoloTime] | None:
    """Read the times of every cell that an earlier run measured, or return ``None`` if one is missing."""
    try:
        times = msgspec.convert(store.read_json(name), dict[str, SoloTime])
        return {cell: times[cell.slug] for cell in plan.all_cells}
    except (msgspec.ValidationError, KeyError):
        return None


def setup_of(engine: Engine, plan: SweepPlan, check: PromptCheck) -> Mapping[str, Any]:
    """Return everything except the cell that the results of an image depend on."""
    from diffserve.experiments.metrics.set_distance import NETWORK_VERSION

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
        "is_checked": check.wishes is not None,
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

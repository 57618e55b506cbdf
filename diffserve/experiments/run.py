"""Runs a sweep: generates missing images, measures them, times every cell, and writes the report.

``sweep`` is the main entry point; ``run_plan`` takes an existing engine and plan; gates share ``generate_missing``.
Heavy libraries are imported only when one of them runs.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from diffserve.experiments import prompts as prompt_lists
from diffserve.experiments.analysis import Analysis
from diffserve.experiments.axes import Value
from diffserve.experiments.engine_generator import EngineGenerator, SweepEngine, request_for, time_alone
from diffserve.experiments.estimates import Measure
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
    cell_names,
)
from diffserve.experiments.power import describe_power
from diffserve.experiments.provenance import machine, versions
from diffserve.experiments.records import FinishedImage, GenerationEvent, RowsDone, SoloTime
from diffserve.experiments.report import RESULTS, SweepReport, read_deviations, write_report
from diffserve.experiments.store import Store, refuse_folder, refuse_other_sweep
from diffserve.experiments.verdicts import Comparison, open_comparisons
from diffserve.version import __version__
from diffserve.world.checker import EDITION

if TYPE_CHECKING:
    from diffserve.engine import Engine

RECORD_VERSION = 2


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


class _TimeIsUpError(Exception):
    """No more images are added to a sweep that runs until it is decided."""


def sweep(
    model: str | Path | Engine = "embedded",
    *,
    folder: str | Path,
    samplers: Sequence[str] = DEFAULT_SAMPLERS,
    steps: Sequence[int] = DEFAULT_STEPS,
    guidance: float | Sequence[float] | None = None,
    prompts: int | Sequence[str] = DEFAULT_PROMPTS,
    axes: Mapping[str, Sequence[Value]] | None = None,
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
        axes: Values of further request fields by name, such as ``{"eta": [0.0, 0.5]}``.
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
        axes={name: tuple(values) for name, values in (axes or {}).items()},
        num_seeds=seeds,
        first_seed=first_seed,
        reference_steps=reference_steps,
    )
    refuse_early(plan, Path(folder))
    engine = model if isinstance(model, Engine) else Engine.from_pretrained(model)
    if scales is None:
        plan = msgspec.structs.replace(plan, guidance=(engine.info.default_guidance_scale,))
    return run_plan(engine, plan, Path(folder), on_progress)


def state_power(plan: SweepPlan, previous: Path | None) -> list[str]:
    """Describe which differences the comparisons of ``plan`` can detect.

    Args:
        plan: The plan.
        previous: A previous report.json, or its folder, with the deviations of the same cells.

    Raises:
        InvalidRequest: ``previous`` cannot be read.
    """
    num_seeds = plan.looks[0] if plan.looks else plan.num_seeds
    deviations = {} if previous is None else read_deviations(previous, num_seeds)
    names = cell_names(plan.cells)
    measures = [Measure(name) for name in plan.detect]
    comparisons = [
        (f"{names[cell]} against {names[baseline]}", measure, deviations.get((cell, baseline, measure.value)))
        for cell, baseline in plan.comparisons
        for measure in measures
    ]
    return list(describe_power(comparisons, len(plan.prompts), num_seeds, plan.detect))


def _power_of(plan: SweepPlan, num_seeds: int, comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Describe the power of comparisons that were measured with ``num_seeds`` seeds per prompt."""
    names = cell_names(plan.cells)
    measured_comparisons = [
        (f"{names[each.cell]} against {names[each.baseline]}", Measure(each.measure), each.deviation)
        for each in comparisons
    ]
    return describe_power(measured_comparisons, len(plan.prompts), num_seeds, plan.detect)


def refuse_early(plan: SweepPlan, folder: Path) -> None:
    """Check ``folder`` before a model is loaded.

    Raises:
        InvalidRequest: The folder cannot be written or holds another sweep.
    """
    refuse_folder(folder, RESULTS)
    refuse_other_sweep(folder, _plan_setup(plan))


def run_plan(
    engine: Engine,
    plan: SweepPlan,
    folder: Path,
    on_progress: OnProgress | None = None,
    max_minutes: float | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> SweepReport:
    """Run ``plan`` with ``engine`` and write the report into ``folder``; see :func:`sweep`.

    Args:
        engine: The engine, not used elsewhere during the sweep.
        plan: The plan. With several looks, cells without an open verdict get no more images after a look.
        folder: Output folder.
        on_progress: Called with the progress of the sweep.
        max_minutes: Time after which no images are added to those of the first look.
        on_note: Called with sentences about open verdicts after each look but the last.
    """
    deadline_s = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    plan.check(engine.info)
    check = check_plan(engine, plan)
    initial_machine = machine()
    with Store(folder, setup_of(engine, plan, check), results=RESULTS) as store:
        times_name = f"times-{store.digest(plan.references[0], {'cells': plan.all_cells})}.json"
        times = read_times(store, times_name, plan)
        timed_rows = 0 if times else TIMED_ROUNDS * sum(cell.rows for cell in plan.all_cells)
        counter = ProgressCounter(on_progress, timed_rows)
        with contextlib.suppress(_TimeIsUpError):
            for images in images_of_looks(plan, store, on_note):
                counter.expect(sum(image.cell.rows for image in images))
                generate_missing(engine, plan, store, check, images, partial(counter.add, "painting"))
                counter.deadline_s = deadline_s
        counter.deadline_s = math.inf
        if not times:
            times = time_alone(engine, plan, lambda cell: counter.add("timing", cell.rows))
            store.write_json(times_name, {cell.slug: time for cell, time in times.items()})
        counter.add("reporting")
        return write_report(
            engine=engine, plan=plan, store=store, times=times, check=check, initial_machine=initial_machine
        )


def images_of_looks(plan: SweepPlan, store: Store, on_note: Callable[[str], None]) -> Iterator[list[PlannedImage]]:
    """Yield the missing images of each look; after the first only those of cells with an open verdict.

    The verdicts of a look use only its seeds, so that a resumed sweep makes the same decisions.
    """
    cells, before = set(plan.all_cells), 0
    for num_seeds in plan.looks or (plan.num_seeds,):
        if before:
            places = plan.places_until(before)
            complete = {cell: store.records(cell) for cell in plan.all_cells}
            analysis = Analysis(plan, complete, places=places)
            comparisons = open_comparisons(analysis)
            on_note(f"after {before} seeds per prompt, {len(comparisons)} verdicts are open")
            for sentence in _power_of(plan, before, comparisons):
                on_note(sentence)
            cells = {cell for each in comparisons for cell in (each.cell, each.baseline)}
            cells |= {reference for cell in cells if (reference := plan.reference_of(cell)) is not None}
        if not cells:
            return
        yield [image for image in store.missing(plan) if image.seed_index < num_seeds and image.cell in cells]
        before = num_seeds


class ProgressCounter:
    """Counts finished UNet rows and reports the progress.

    Args:
        on_progress: Called with the progress of the run.
        num_rows: UNet rows that are missing.

    Attributes:
        deadline_s: Monotonic time after which :meth:`add` raises ``_TimeIsUpError``.
    """

    def __init__(self, on_progress: OnProgress | None, num_rows: int) -> None:
        self._on_progress = on_progress
        self._num_rows = num_rows
        self._rows_done = 0.0
        self.deadline_s = math.inf

    def expect(self, rows: int) -> None:
        """Add ``rows`` to the UNet rows that are missing."""
        self._num_rows += rows

    def add(self, phase: str, rows: float = 0.0, finished: Cell | None = None) -> None:
        """Add ``rows`` and report the progress of ``phase``, with the cell that was just completed, if any."""
        self._rows_done += rows
        if self._on_progress is not None:
            rows_done = min(int(self._rows_done), self._num_rows)
            self._on_progress(SweepProgress(phase, rows_done, self._num_rows, finished))
        if time.monotonic() > self.deadline_s:
            raise _TimeIsUpError


def check_plan(engine: Engine, plan: SweepPlan) -> PromptCheck:
    """Check that ``engine`` accepts the requests of every cell, and return the checker of the prompts.

    Raises:
        InvalidRequest: The engine rejects a request.
    """
    for cell in (*plan.references, *plan.cells):
        engine.check(request_for(plan, cell, plan.places[0]))
    return PromptCheck(engine.info.family, plan.prompts)


def generate_missing(
    engine: SweepEngine,
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

    num_left = Counter(image.cell for image in images)

    def count(event: GenerationEvent) -> None:
        if isinstance(event, RowsDone):
            on_rows(sum(event.rows.values()), None)
        elif isinstance(event, FinishedImage):
            num_left[event.image.cell] -= 1
            if not num_left[event.image.cell]:
                on_rows(0.0, event.image.cell)

    measures = ImageMeasures(check, FeatureNetwork())
    engine.warm_up()  # so that its time is not charged to an image
    generator = EngineGenerator(engine, plan)
    complete(generate_measured(plan, generator, measures, store, images, count, reference_store=reference_store))


def read_times(store: Store, name: str, plan: SweepPlan) -> dict[Cell, SoloTime] | None:
    """Read the times of every cell that an earlier run measured, or return ``None`` if one is missing."""
    try:
        times = msgspec.convert(store.read_json(name), dict[str, SoloTime])
        return {cell: times[cell.slug] for cell in plan.all_cells}
    except (msgspec.ValidationError, KeyError):
        return None


def setup_of(engine: SweepEngine, plan: SweepPlan, check: PromptCheck) -> Mapping[str, Any]:
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
        **({"looks": plan.looks} if plan.looks else {}),
    }

"""Runs a sweep: generates missing images, measures them, times every cell, and writes the report.

``sweep`` is the main entry point; ``run_plan`` takes a plan and its engines; gates share ``generate_missing``.
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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.experiments import prompts as prompt_lists
from diffserve.experiments.analysis import Analysis
from diffserve.experiments.axes import (
    MODEL,
    NO_WILDCARDS,
    PRECISION,
    PROMPT,
    Value,
    read_models,
    read_templates,
    write_settings,
)
from diffserve.experiments.engine_generator import EngineGenerator, SweepEngine, time_alone
from diffserve.experiments.engines import EngineFacts, Engines, EngineT, OpenEngine, check_plan, shared_setup
from diffserve.experiments.estimates import Measure
from diffserve.experiments.export import Export
from diffserve.experiments.generation import complete, generate_measured
from diffserve.experiments.measure import NO_MODELS, ImageMeasures, ModelMeasures, PromptCheck
from diffserve.experiments.model_measures import (
    Folders,
    check_detected,
    digest_measures,
    load_measures,
    read_measures,
)
from diffserve.experiments.plan import (
    DEFAULT_PROMPTS,
    DEFAULT_SAMPLERS,
    DEFAULT_SEEDS,
    DEFAULT_STEPS,
    REFERENCE_STEPS,
    TIMED_ROUNDS,
    Cell,
    EngineKey,
    PlannedImage,
    SweepPlan,
    cell_names,
)
from diffserve.experiments.power import describe_power
from diffserve.experiments.provenance import machine, versions
from diffserve.experiments.records import FinishedImage, GenerationEvent, RowsDone, SoloTime
from diffserve.experiments.report import RESULTS, SweepReport, read_deviations, write_report
from diffserve.experiments.store import MEASURES, Store, refuse_folder, refuse_other_sweep
from diffserve.experiments.verdicts import Comparison, is_comparable, open_comparisons
from diffserve.models.learned_samplers import LearnedSamplers
from diffserve.settings.layers import load_settings
from diffserve.version import __version__
from diffserve.world.checker import EDITION

if TYPE_CHECKING:
    from diffserve.engine import Engine

RECORD_VERSION = 2
NO_FOLDERS: Folders = MappingProxyType({})


@dataclass(frozen=True)
class SweepProgress:
    """Progress of a sweep or of a gate.

    Attributes:
        phase: "painting", followed by model and precision if they are axes, "timing" or "reporting".
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
    measures: Mapping[str, str | Path] = MappingProxyType({}),
    export: Export | None = None,
    on_progress: OnProgress | None = None,
) -> SweepReport:
    """Compare samplers and step counts on the same prompts and seeds, and write a report into ``folder``.

    An interrupted sweep resumes when it is called again with the same folder.

    Args:
        model: A model for ``Engine.from_pretrained``, or an engine that is not used elsewhere during the sweep. With
            models in ``axes`` it is not used.
        folder: Output folder.
        samplers: Sampler names; a learned one has one cell with its own steps.
        steps: Step counts.
        guidance: One or several guidance scales, ``None`` for the model's default.
        axes: Values of further request fields by name, such as ``{"eta": [0.0, 0.5]}``; also of ``model`` (names or
            paths) and ``precision``, for which engines are opened one after the other, and of ``prompt``, whose
            templates such as "a {red|blue} fox" are expanded.
        prompts: Prompt texts, or the number of held-out captions of the embedded model to use without an axis
            ``prompt``.
        seeds: Images per prompt.
        first_seed: Seed of the first image.
        reference_steps: DDIM steps of the converged images.
        measures: Folders of weights by name of a measure, such as ``{"clip_score": "clip-vit-large-patch14"}``.
        export: Benchmark whose layout the images are also written in.
        on_progress: Called with the progress of the sweep.

    Raises:
        InvalidRequest: An argument or the folder is invalid; raised before anything is generated or written.
    """
    from diffserve.engine import Engine
    from diffserve.runtime.loading.family import learned_samplers_of

    scales = (guidance,) if isinstance(guidance, int | float) else guidance
    learned_samplers = LearnedSamplers.of(model.info) if isinstance(model, Engine) else learned_samplers_of(model)
    values = {name: tuple(axis) for name, axis in (axes or {}).items()}
    paths = read_models(",".join(map(str, values[MODEL]))) if MODEL in values else {}
    values |= {MODEL: tuple(paths)} if paths else {}
    matrix = read_templates("\n".join(map(str, values[PROMPT])), NO_WILDCARDS) if PROMPT in values else ()
    values |= {PROMPT: matrix} if matrix else {}
    captions = () if matrix or not isinstance(prompts, int) else prompt_lists.held_out_prompts(prompts)
    texts = (matrix[:1] or captions) if isinstance(prompts, int) else tuple(prompts)
    plan = SweepPlan(  # validated before a model is loaded
        samplers=tuple(samplers),
        steps=tuple(steps),
        guidance=(1.0,) if scales is None else tuple(scales),
        prompts=texts,
        axes=values,
        num_seeds=seeds,
        first_seed=first_seed,
        reference_steps=reference_steps,
        learned=learned_samplers.steps_of(samplers),
    )
    folders = read_measures(f"{name}={path}" for name, path in measures.items())
    refuse_early(plan, Path(folder), folders, export)
    if isinstance(model, Engine) and plan.engines != ((),):
        raise InvalidRequest("model and precision cannot be axes of an open engine; give the name of a model.")

    def open_engine(key: EngineKey) -> Engine:
        engine_values = dict(key)
        source = paths[str(engine_values[MODEL])] if MODEL in engine_values else model
        if isinstance(source, Engine):
            return source
        return Engine.from_pretrained(source, dtype=str(engine_values.get(PRECISION, "auto")))

    engines = Engines(open_engine)
    if scales is None:
        scale = engines.get(plan.engines[0]).info.default_guidance_scale
        defaults = {name: load_settings(model=path).model.guidance_scale for name, path in paths.items()}
        plan = msgspec.structs.replace(plan, guidance=(scale,), model_guidance=defaults)
    return run_plan(engines, plan, Path(folder), on_progress, folders=folders, export=export)


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
        if is_comparable(cell, baseline, measure)
    ]
    power = list(describe_power(comparisons, len(plan.prompts), num_seeds, plan.detect))
    if previous is not None and comparisons and all(deviation is None for *_, deviation in comparisons):
        power.append(f"{str(previous)!r} has none of these comparisons, so deviations are assumed.")
    return power


def _power_of(plan: SweepPlan, num_seeds: int, comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Describe the power of comparisons that were measured with ``num_seeds`` seeds per prompt."""
    names = cell_names(plan.cells)
    measured_comparisons = [
        (f"{names[each.cell]} against {names[each.baseline]}", Measure(each.measure), each.deviation)
        for each in comparisons
    ]
    return describe_power(measured_comparisons, len(plan.prompts), num_seeds, plan.detect)


def refuse_early(plan: SweepPlan, folder: Path, folders: Folders = NO_FOLDERS, export: Export | None = None) -> None:
    """Check what can be checked before a model is loaded.

    Args:
        plan: The plan.
        folder: Output folder.
        folders: Folders of weights by measure.
        export: Benchmark whose layout the images are also written in.

    Raises:
        InvalidRequest: The folder cannot be written or holds another sweep, a measure of the plan needs weights, or
            the plan does not fit the benchmark.
    """
    check_detected(plan.detect, folders)
    if export is not None:
        export.check(plan)
    refuse_folder(folder, RESULTS)
    refuse_other_sweep(folder, _plan_setup(plan))


def run_plan(
    engine: Engine | OpenEngine | Engines[Engine],
    plan: SweepPlan,
    folder: Path,
    on_progress: OnProgress | None = None,
    max_minutes: float | None = None,
    on_note: Callable[[str], None] = lambda _: None,
    *,
    folders: Folders = NO_FOLDERS,
    export: Export | None = None,
) -> SweepReport:
    """Run ``plan`` and write the report into ``folder``; see :func:`sweep`.

    Args:
        engine: The engine, not used elsewhere during the sweep; or a function that opens the engine of a model and
            precision, if they are axes.
        plan: The plan. With several looks, cells without an open verdict get no more images after a look.
        folder: Output folder.
        on_progress: Called with the progress of the sweep.
        max_minutes: Time after which no images are added to those of the first look.
        on_note: Called with sentences about open verdicts after each look but the last.
        folders: Folders of weights by measure.
        export: Benchmark whose layout the images are also written in; all images are stored then.
    """
    deadline_s = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    engines = engine if isinstance(engine, Engines) else Engines(engine)
    if plan.reference_steps is None:
        raise InvalidRequest("reference_steps is missing; a sweep compares with converged images.")
    check_detected(plan.detect, folders)
    facts = check_plan(engines, plan)
    models, digests = load_measures(folders, facts[plan.engines[0]].setup["device"]), digest_measures(folders)
    initial_machine = machine()
    image_cells = () if export is None else plan.all_cells
    with open_store(plan, facts, folder, results=RESULTS, image_cells=image_cells, digests=digests) as store:
        times = read_times(store, plan)
        untimed = [cell for cell in plan.all_cells if cell not in times]
        counter = ProgressCounter(on_progress, TIMED_ROUNDS * sum(cell.rows for cell in untimed))
        with contextlib.suppress(_TimeIsUpError):
            for images in images_of_looks(plan, store, on_note):
                generate_missing(engines, plan, store, facts, images, counter, models)
                counter.deadline_s = deadline_s
        counter.deadline_s = math.inf
        for key in reversed(plan.engines):  # the last engine is open
            cells = plan.cells_of(key)
            if not times.keys() >= set(cells):
                timed = time_alone(engines.get(key), plan, cells, lambda cell: counter.add("timing", cell.rows))
                store.write_json(times_name(store, cells), {cell.slug: time for cell, time in timed.items()})
                times |= timed
        counter.add("reporting")
        if export is not None:
            export.write(plan, store)
        return write_report(
            engine=engines.get(plan.engines[0]),
            plan=plan,
            store=store,
            times=times,
            facts=facts,
            initial_machine=initial_machine,
            weights={measure.value: (path.name, digests[measure.value]) for measure, path in folders.items()},
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


def generate_missing(
    engines: Engines[EngineT],
    plan: SweepPlan,
    store: Store,
    facts: Mapping[EngineKey, EngineFacts],
    images: Iterable[PlannedImage],
    counter: ProgressCounter,
    models: ModelMeasures = NO_MODELS,
) -> None:
    """Generate and measure missing images, one engine after the other; see :func:`_generate_on`.

    Args:
        engines: Generate the images.
        plan: The plan that the images belong to.
        store: Receives the records.
        facts: Facts of the engines.
        images: The missing images.
        counter: Reports the progress.
        models: Measures by networks whose weights the user names.
    """
    missing: dict[EngineKey, list[PlannedImage]] = {key: [] for key in plan.engines}
    for image in images:
        missing[plan.engine_of(image.cell)].append(image)
        counter.expect(image.cell.rows)
    for key, group in missing.items():
        if group:
            on_rows = partial(counter.add, f"painting{write_settings(key)}")
            _generate_on(engines.get(key), plan, store, facts[key].check, group, on_rows, models)


def _generate_on(
    engine: SweepEngine,
    plan: SweepPlan,
    store: Store,
    check: PromptCheck,
    images: Sequence[PlannedImage],
    on_rows: Callable[[float, Cell | None], None],
    models: ModelMeasures,
) -> None:
    """Generate and measure images on one engine; every record is on disk before the next engine tick."""
    from diffserve.experiments.metrics.set_distance import FeatureNetwork

    num_left = Counter(image.cell for image in images)

    def count(event: GenerationEvent) -> None:
        if isinstance(event, RowsDone):
            on_rows(sum(event.rows.values()), None)
        elif isinstance(event, FinishedImage):
            num_left[event.image.cell] -= 1
            if not num_left[event.image.cell]:
                on_rows(0.0, event.image.cell)

    measures = ImageMeasures(check, FeatureNetwork(), models)
    engine.warm_up()  # so that its time is not charged to an image
    generator = EngineGenerator(engine, plan)
    complete(generate_measured(plan, generator, measures, store, images, count))


def times_name(store: Store, cells: Sequence[Cell]) -> str:
    """Return the name of the file with the times of ``cells``."""
    return f"times-{store.digest(cells[0], {'cells': cells})}.json"


def read_times(store: Store, plan: SweepPlan) -> dict[Cell, SoloTime]:
    """Read the times that an earlier run measured, without those of engines that lack the time of a cell."""
    read: dict[Cell, SoloTime] = {}
    for cells in map(plan.cells_of, plan.engines):
        with contextlib.suppress(msgspec.ValidationError, KeyError):
            times = msgspec.convert(store.read_json(times_name(store, cells)), dict[str, SoloTime])
            read |= {cell: times[cell.slug] for cell in cells}
    return read


def open_store(
    plan: SweepPlan,
    facts: Mapping[EngineKey, EngineFacts],
    folder: Path,
    *,
    results: Iterable[str],
    image_cells: Iterable[Cell] = (),
    digests: Mapping[str, str] = MappingProxyType({}),
) -> Store:
    """Open the store of a plan; see :class:`Store`.

    The results of a cell depend on its engine, on that of the images that they are compared with, and on the weights of
    measures, whose ``digests`` are given by name.
    """
    common = {**_common_setup(plan), **({MEASURES: dict(digests)} if digests else {})}

    def setup_of(cell: Cell) -> Mapping[str, Any]:
        engine = plan.engine_of(cell)
        other = plan.engine_of(plan.reference_of(cell) or cell)
        return {**common, **facts[engine].setup, **({} if other == engine else {"compared with": facts[other].setup})}

    return Store(folder, {**common, **shared_setup(facts)}, results=results, setup_of=setup_of, image_cells=image_cells)


def _common_setup(plan: SweepPlan) -> dict[str, Any]:
    """Return everything except cell and engine that the results of an image depend on."""
    from diffserve.experiments.metrics.set_distance import NETWORK_VERSION

    return {
        "versions": {
            "record": RECORD_VERSION,
            "network": NETWORK_VERSION,
            "checker": EDITION,
            "diffserve": __version__,
        },
        "torch": versions()["torch"],
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

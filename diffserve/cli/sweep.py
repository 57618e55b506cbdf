"""``diffserve sweep``: generates the same images with many settings and reports quality versus steps."""

from __future__ import annotations

import datetime
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import SettingsOptions
from diffserve.cli.sweep_engines import engine_opener, load_models, resolve_precisions
from diffserve.experiments.axes import MODEL, PRECISION, PROMPT, read_axis, whole_numbers
from diffserve.experiments.estimates import PROMPT_MEASURES, Measure
from diffserve.experiments.export import Export
from diffserve.experiments.model_measures import read_measures
from diffserve.experiments.plan import DEFAULT_SAMPLERS, DEFAULT_STEPS, TIMED_ROUNDS, SweepPlan
from diffserve.experiments.plan_reading import DEFAULT_MAX_IMAGES, plan_warnings, read_plan
from diffserve.experiments.prompts import BenchmarkPrompt, read_benchmark_prompts, read_prompts
from diffserve.experiments.report import SweepReport
from diffserve.experiments.run import SweepProgress, refuse_early, run_plan, state_power
from diffserve.models.templates import Wildcards
from diffserve.service.safety import Safety
from diffserve.settings.config import Settings
from schedulers.learned import is_learned


@dataclass(frozen=True)
class SweepOptions:
    """Arguments of the command, unparsed. ``None`` stands for the default of the sweep, the gate or the model."""

    samplers: str | None
    steps: str | None
    guidance: str | None
    prompts: str
    num_seeds: int | None
    first_seed: int
    reference_steps: int
    output: Path
    axes: tuple[str, ...] = ()
    detect: str | None = None
    until_decided: bool = False
    max_images: int = DEFAULT_MAX_IMAGES
    max_minutes: float | None = None
    previous: Path | None = None
    plan_only: bool = False
    measures: tuple[str, ...] = ()
    export_layout: str | None = None


def run(options: SweepOptions, sources: SettingsOptions) -> int:
    """Run the sweep and return the exit code.

    Args:
        options: Arguments of the sweep.
        sources: Options for the settings.

    Raises:
        DiffserveError: The user made an error; it is raised before any image or file is created.
    """
    models = load_models(axis_text(options, MODEL), sources)
    settings = next(iter(models.values()))
    guidance = {name: each.model.guidance_scale for name, each in models.items()} if len(models) > 1 else {}
    plan = plan_of(options, settings, model_guidance=guidance)
    folders, export = read_measures(options.measures), _export_of(options, plan)
    refuse_early(plan, options.output, folders, export)
    if PRECISION in plan.axes:
        if sources.flags["model.dtype"].value is not None:
            raise InvalidRequest("--dtype and --axis precision both set precisions; leave --dtype out.", param="dtype")
        resolve_precisions(models, plan.axes[PRECISION], "--axis precision")
    power = [*state_power(plan, options.previous), *plan_warnings(plan)]
    if options.plan_only:
        print("\n".join([_describe_plan(plan), *power]))
        return 0
    check_prompts(plan, settings)
    console = Console(stderr=True, highlight=False)
    note = partial(console.print, markup=False, soft_wrap=True)
    note("\n".join([_describe_plan(plan), *power]))
    try:
        with make_progress(console) as progress, lasting_interrupt() as check:
            show = _ProgressBar(progress, plan)

            def report_progress(now: SweepProgress) -> None:
                check()
                show(now)

            engines = engine_opener(models, note)
            report = run_plan(
                engines,
                plan,
                options.output,
                report_progress,
                options.max_minutes,
                note,
                folders=folders,
                export=export,
            )
    except KeyboardInterrupt:
        message = f"stopped; finished images are kept in {options.output}; run the same command again to continue"
        console.print(message, markup=False, soft_wrap=True)
        raise
    for line in _lines(report):
        print(line)
    if export is not None:
        print(options.output / export.layout)
    return 0


def _export_of(options: SweepOptions, plan: SweepPlan) -> Export | None:
    """Return the export of ``--export-layout``, with the prompts of ``plan`` as their file has them."""
    if options.export_layout is None:
        return None
    if PROMPT in plan.axes:
        message = f"--export-layout needs the same prompts in every cell; leave out the axis {PROMPT}."
        raise InvalidRequest(message, param="export_layout")
    path = Path(options.prompts.strip())
    texts = [BenchmarkPrompt(text) for text in plan.prompts]
    return Export(options.export_layout, texts if _is_count(options) else read_benchmark_prompts(path))


def _is_count(options: SweepOptions) -> bool:
    """Return whether ``--prompts`` is a number of captions."""
    return options.prompts.strip().removeprefix("-").isdecimal()


def _describe_plan(plan: SweepPlan) -> str:
    limit = "at most " if len(plan.looks) > 1 else ""
    num_timed = TIMED_ROUNDS * sum(cell.rows for cell in plan.all_cells)
    return (
        f"{len(plan.cells)} cells of {limit}{len(plan.places)} images plus the converged images: {limit}"
        f"{plan.num_images:,} images, {plan.num_rows:,} UNet rows; {num_timed:,} rows more to time each cell alone"
    )


def check_prompts(plan: SweepPlan, settings: Settings) -> None:
    """Check the prompts with the safety filter, if one is configured.

    Raises:
        ModerationBlocked: A prompt is blocked.
        EngineUnavailable: The filter does not answer.
    """
    check_texts(plan.all_prompts, settings)


def check_texts(prompts: Iterable[str], settings: Settings) -> None:
    """Check prompts as ``check_prompts`` does."""
    with Safety.running(settings) as safety:
        if safety is not None:
            for prompt in prompts:
                safety.check_texts({"prompt": prompt})


@contextmanager
def lasting_interrupt() -> Iterator[Callable[[], None]]:
    """Make sure that Ctrl-C is not lost, and yield a function that raises a pending KeyboardInterrupt.

    Python drops exceptions in weak reference callbacks and finalizers, which run during many imports.
    """
    signals: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if signals:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def plan_of(
    options: SweepOptions, settings: Settings, *, gated: bool = False, model_guidance: Mapping[str, float] | None = None
) -> SweepPlan:
    """Return the plan of a sweep, or of a gate.

    Args:
        options: Arguments of the sweep.
        settings: Settings with the defaults of the model.
        gated: Whether the plan is for a gate: no reference images, and by default one cell with one seed.
        model_guidance: Default guidance scale of each model of the axis, used without an axis of guidance scales.

    Raises:
        InvalidRequest: An argument is invalid.
    """
    prompts = options.prompts.strip()
    profile = settings.model
    return read_plan(
        _axes(options),
        prompts=whole_numbers(prompts, "--prompts")[0] if _is_count(options) else read_prompts(Path(prompts)),
        guidance=profile.guidance_scale,
        samplers=(profile.sampler,) if gated else DEFAULT_SAMPLERS,
        steps=(profile.num_steps,) if gated else DEFAULT_STEPS,
        num_seeds=1 if gated and options.num_seeds is None else options.num_seeds,
        first_seed=options.first_seed,
        reference_steps=None if gated else options.reference_steps,
        until_decided=options.until_decided,
        max_images=options.max_images,
        detect=options.detect,
        learned_steps=lambda samplers: _learned_steps(samplers, settings),
        model_guidance=model_guidance,
        wildcards=Wildcards(settings.model.wildcard_dir),
        shown=lambda name: f"--{name.replace('_', '-')}",
    )


def _learned_steps(samplers: Iterable[str], settings: Settings) -> dict[str, int]:
    if not any(map(is_learned, samplers)):
        return {}
    from diffserve.runtime.loading.family import learned_samplers_of

    return learned_samplers_of(settings.model.path, settings.model.sampler_dir).steps_of(samplers)


def _axes(options: SweepOptions) -> list[tuple[str, str]]:
    """Return names and texts of the given axes, including those with options of their own."""
    main_axes = {"samplers": options.samplers, "steps": options.steps, "guidance": options.guidance}
    return [*((name, text) for name, text in main_axes.items() if text is not None), *map(read_axis, options.axes)]


def axis_text(options: SweepOptions, name: str) -> str | None:
    """Return the text of an axis, ``None`` if it is not given."""
    return dict(_axes(options)).get(name)


def make_progress(console: Console) -> Progress:
    """Return a progress bar that disappears at the end and is hidden unless ``console`` is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    is_hidden = not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=is_hidden, speed_estimate_period=120)


class _ProgressBar:
    """Updates the progress bar and prints each finished cell, with the remaining time if the bar is hidden."""

    def __init__(self, progress: Progress, plan: SweepPlan) -> None:
        self._progress = progress
        self._bar = progress.add_task("generating", total=None)
        self._plan = plan
        self._started_s: float | None = None

    def __call__(self, now: SweepProgress) -> None:
        if self._started_s is None:
            self._started_s = time.monotonic()
            done = self._plan.num_rows - now.num_rows
            if done > 0 and not self._plan.looks:
                self._print(f"{100 * done / self._plan.num_rows:.0f} % of the work is already done and is not repeated")
        self._progress.update(self._bar, description=now.phase, completed=now.rows_done, total=now.num_rows or 1)
        if now.finished is not None:
            self._print(f"{now.finished.label}, guidance {now.finished.guidance_scale:g}: done{self._left(now)}")

    def _left(self, now: SweepProgress) -> str:
        if self._progress.console.is_terminal or not now.rows_done or self._started_s is None:
            return ""
        spent_s = time.monotonic() - self._started_s
        left = datetime.timedelta(seconds=round(spent_s * (now.num_rows / now.rows_done - 1)))
        return f"; {100 * now.rows_done / now.num_rows:.0f} % done, about {left} left"

    def _print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, soft_wrap=True)


def _lines(report: SweepReport) -> Iterator[str]:
    """Yield a short results table, the findings and the path of the full report."""
    candidates = (Measure.EXACT, *PROMPT_MEASURES, Measure.LPIPS, Measure.PSNR_DB, Measure.FRECHET)
    measures = [measure for measure in candidates if any(cell.value(measure) for cell in report.cells)]
    heads = ["cell", "UNet rows", "guidance", *(measure.value for measure in measures), "ms per step", "images/s"]
    rows = [heads]
    for cell in report.cells:
        values = (cell.value(measure) for measure in measures)
        texts = ["" if v is None else m.write(v.value) for m, v in zip(measures, values, strict=True)]
        settings = (cell.cell.label, f"{cell.evaluations:g}", f"{cell.cell.guidance_scale:g}")
        rows.append([*settings, *texts, f"{cell.step_ms.value:.1f}", f"{cell.images_per_s:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    if report.checker is not None:
        yield f"exact: {report.checker}, on {report.checker.count} images of known content"
    yield from (f"{finding.claim}: {finding.verdict}" for finding in report.findings)
    yield str(report.page)

"""``diffserve sweep --gate``: compares precisions with a reference precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from diffserve.api.errors import InvalidRequest
from diffserve.cli.options import SettingsOptions
from diffserve.cli.sweep import SweepOptions, axis_text, check_prompts, lasting_interrupt, make_progress, plan_of
from diffserve.cli.sweep_engines import engine_opener, resolve_precisions
from diffserve.experiments.axes import ENGINE_AXES
from diffserve.experiments.gate import (
    JSON,
    RESULTS,
    SUMMARY,
    GateLimits,
    GateReport,
    PrecisionGate,
    run_gate,
    table,
    verdicts,
)
from diffserve.experiments.run import SweepProgress
from diffserve.experiments.store import refuse_folder
from diffserve.settings.config import Settings

EXIT_GATE_FAILED = 3
"""Exit code if a candidate exceeds a limit."""


@dataclass(frozen=True)
class GateOptions:
    """Arguments of the gate, unparsed. ``None`` stands for the default in :class:`GateLimits`."""

    gate: str
    exact_points: float | None = None
    psnr_db: float | None = None
    frechet: float | None = None

    @property
    def limits(self) -> GateLimits:
        """The limits, with defaults for those that are not set.

        Raises:
            InvalidRequest: A limit is invalid.
        """
        return GateLimits(**self.values_set)

    @property
    def values_set(self) -> dict[str, float]:
        """The limits that are set."""
        values = {"exact_points": self.exact_points, "psnr_db": self.psnr_db, "frechet": self.frechet}
        return {name: value for name, value in values.items() if value is not None}


def run(options: GateOptions, pictures: SweepOptions, sources: SettingsOptions) -> int:
    """Run the gate and return the exit code: 0 if every candidate passes, otherwise ``EXIT_GATE_FAILED``.

    Args:
        options: Arguments of the gate.
        pictures: Arguments of the sweep that selects the images.
        sources: Options for the settings.

    Raises:
        DiffserveError: The user made an error, or a precision is not supported on this device; it is raised before
            any image is generated.
    """
    if sources.flags["model.dtype"].value is not None:
        raise InvalidRequest("--dtype and --gate both set precisions; give only --gate.", param="dtype")
    if any(axis_text(pictures, name) for name in ENGINE_AXES):
        raise InvalidRequest("--gate compares precisions of one model; leave --axis model and precision out.")
    gate, limits = PrecisionGate.parse(options.gate), options.limits
    settings = sources.load()
    plan = plan_of(pictures, settings, gated=True)
    refuse_folder(pictures.output, RESULTS)
    check_prompts(plan, settings)
    gate = _resolve(gate, settings)
    console = Console(stderr=True, highlight=False)
    summary = f"{', '.join(gate.names)}: {plan.num_images:,} images each, {plan.num_painted_rows:,} UNet rows"
    console.print(summary, markup=False, soft_wrap=True)
    try:
        with make_progress(console) as progress, lasting_interrupt() as check:
            bar = progress.add_task("painting", total=None)

            def show(now: SweepProgress) -> None:
                check()
                progress.update(bar, description=now.phase, completed=now.rows_done, total=now.num_rows or 1)

            engines = engine_opener({"": settings}, partial(console.print, markup=False, soft_wrap=True))
            report = run_gate(gate, plan, limits, pictures.output, engines, show, options.values_set)
    except KeyboardInterrupt:
        message = f"stopped; finished images are kept in {pictures.output}; run the same command again to continue"
        console.print(message, markup=False, soft_wrap=True)
        raise
    for line in _lines(report):
        print(line)
    return EXIT_GATE_FAILED if report.failed else 0


def _resolve(gate: PrecisionGate, settings: Settings) -> PrecisionGate:
    """Return the gate with canonical precision names.

    Raises:
        ConfigError: A precision is not supported on this device.
        InvalidRequest: A precision occurs twice.
    """
    names = resolve_precisions({"": settings}, gate.names, "--gate")
    if len(names) < len(gate.names):
        message = f"--gate names {', '.join(gate.names)}, which are {', '.join(names)}; name each precision once."
        raise InvalidRequest(message, param="gate")
    return PrecisionGate(names[0], names[1:])


def _lines(report: GateReport) -> Iterator[str]:
    rows = table(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    yield from verdicts(report)
    yield str(report.folder / SUMMARY)
    yield str(report.folder / JSON)

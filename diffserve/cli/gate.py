"""``diffserve sweep --gate``: compares precisions with a reference precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.cli.generate import open_engine
from diffserve.cli.options import SettingsOptions
from diffserve.cli.sweep import SweepOptions, check_prompts, lasting_interrupt, make_progress, plan_of
from diffserve.disk_cache import DiskCache
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

if TYPE_CHECKING:
    from diffserve.engine import Engine

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
        values = {"exact_points": self.exact_points, "psnr_db": self.psnr_db, "frechet": self.frechet}
        return GateLimits(**{name: value for name, value in values.items() if value is not None})


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

            def open_in(precision: str) -> Engine:
                console.print(f"loading {settings.model.path} in {precision}", markup=False, soft_wrap=True)
                return open_engine(_in_precision(settings, precision))

            report = run_gate(gate, plan, limits, pictures.output, open_in, show)
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
    from diffserve.runtime import choose_for

    names, model, cache = [], settings.model, DiskCache.at(settings.engine.cache_dir)
    for name in gate.names:
        try:
            names.append(choose_for(model.path, model.device, name, settings.engine.offload, cache).dtype)
        except ConfigError as error:
            raise ConfigError(f"--gate: {error.message}", param="gate") from None
    if len(set(names)) < len(names):
        raise InvalidRequest(f"--gate names {', '.join(names)}; name each precision once.", param="gate")
    return PrecisionGate(names[0], tuple(names[1:]))


def _in_precision(settings: Settings, precision: str) -> Settings:
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, dtype=precision))


def _lines(report: GateReport) -> Iterator[str]:
    rows = table(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    yield from verdicts(report)
    yield str(report.folder / SUMMARY)
    yield str(report.folder / JSON)

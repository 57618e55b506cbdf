"""``diffserve sweep --gate``: whether precisions paint what a reference paints, as a table and an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.cli.generate import open_engine
from diffserve.cli.sweep import SweepOptions, check_prompts, lasting_interrupt, make_progress, plan_of
from diffserve.disk_cache import DiskCache
from diffserve.experiments.folder import refuse_folder
from diffserve.experiments.gate import JSON, RESULTS, SUMMARY, GateLimits, GateReport, PrecisionGate
from diffserve.settings.config import Settings
from diffserve.settings.layers import Flag, load_settings

if TYPE_CHECKING:
    from diffserve.engine import Engine
    from diffserve.experiments.gate_run import GateProgress

EXIT_GATE_FAILED = 3
"""Of ``diffserve sweep --gate`` where a candidate breaks a limit."""


@dataclass(frozen=True)
class GateOptions:
    """``gate`` as it was written, and the limits that were given; ``None``: as they are in :class:`GateLimits`."""

    gate: str
    exact_points: float | None = None
    psnr_db: float | None = None
    frechet: float | None = None

    @property
    def limits(self) -> GateLimits:
        """Those given, and the others as they are. Raises InvalidRequest."""
        given = {"exact_points": self.exact_points, "psnr_db": self.psnr_db, "frechet": self.frechet}
        return GateLimits(**{name: value for name, value in given.items() if value is not None})


def run(
    options: GateOptions, pictures: SweepOptions, *, model: str | None, config: str | None, flags: Mapping[str, Flag]
) -> int:
    """Run the gate; 0 where every candidate passes, else ``EXIT_GATE_FAILED``.

    User errors are raised as DiffserveError before anything is painted: a precision that cannot run here, too.
    """
    if flags["model.dtype"].value is not None:
        raise InvalidRequest("--dtype and --gate both name precisions; give --gate alone.", param="dtype")
    gate, limits = PrecisionGate.parse(options.gate), options.limits
    settings = load_settings(model=model, config=config, flags=flags)
    plan = plan_of(pictures, settings, gated=True)
    refuse_folder(pictures.output, RESULTS)
    check_prompts(plan, settings)
    gate = _resolve(gate, settings)
    from diffserve.experiments.gate_run import run_gate

    console = Console(stderr=True, highlight=False)
    say = f"{', '.join(gate.names)}: {plan.num_images:,} pictures each, {plan.num_painted_rows:,} UNet rows"
    console.print(say, markup=False, soft_wrap=True)
    try:
        with make_progress(console) as progress, lasting_interrupt() as check:
            bar = progress.add_task("painting", total=plan.num_images)

            def show(now: GateProgress) -> None:
                check()
                progress.update(bar, description=now.precision, completed=now.num_done)

            def open_in(precision: str) -> Engine:
                console.print(f"loading {settings.model.path} in {precision}", markup=False, soft_wrap=True)
                return open_engine(_in_precision(settings, precision))

            report = run_gate(gate, plan, limits, pictures.output, open_in, show)
    except KeyboardInterrupt:
        kept = f"stopped; what is painted is kept in {pictures.output}, and the same command goes on"
        console.print(kept, markup=False, soft_wrap=True)
        raise
    for line in _lines(report):
        print(line)
    return EXIT_GATE_FAILED if report.failed else 0


def _resolve(gate: PrecisionGate, settings: Settings) -> PrecisionGate:
    """The gate in canonical names, every precision known to run here. Raises ConfigError."""
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
    from diffserve.experiments.gate_report import table, verdicts

    rows = table(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    yield from verdicts(report)
    yield str(report.folder / SUMMARY)
    yield str(report.folder / JSON)

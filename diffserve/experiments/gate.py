"""A gate for precisions: the same pictures in each of them, held against those of a reference, pass or fail.

A precision is accepted the way MLPerf Inference accepts one: the same prompts, seeds and starting latents, and measures
that must stay inside a stated window. ``gate_run`` paints and judges, ``gate_report`` writes what came out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.estimates import Estimate
from diffserve.experiments.plan import Cell, quote, split_axis
from diffserve.settings.config import DTYPE_ALIASES, replace_removed_dtype

JSON, SUMMARY, PICTURES = "gate.json", "gate.md", "gate.png"
RESULTS = (JSON, SUMMARY, PICTURES)
FORM = "write it as REFERENCE:CANDIDATE,CANDIDATE, for example float32:bfloat16,int8."


class GateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate must keep to. How the defaults were found is in ``benchmarks/LOG.md``.

    exact_points  exact prompt match, where it can be checked, may lie so many percentage points below the reference's
    psnr_db       mean PSNR to the reference's pictures, at least
    frechet       Frechet distance to the reference's pictures in the fixed feature network, at most

    Raises :class:`InvalidRequest` for a limit that no candidate could keep or break.
    """

    exact_points: float = 5.0
    psnr_db: float = 30.0
    frechet: float = 0.05

    def __post_init__(self) -> None:
        for name, most in (("exact_points", 100.0), ("psnr_db", 99.0), ("frechet", 1e9)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise InvalidRequest(f"{name} is {value:g}; it must lie between 0 and {most:g}.", param=name)


@dataclass(frozen=True)
class PrecisionGate:
    """Canonical names of precisions, each once."""

    reference: str
    candidates: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> PrecisionGate:
        """Read ``REFERENCE:CANDIDATE,CANDIDATE``; short names are known. Raises :class:`InvalidRequest`."""
        reference, colon, rest = text.partition(":")
        if not colon or not reference.strip() or not rest.strip():
            raise InvalidRequest(f"--gate is {quote(text)}; {FORM}", param="gate")
        given_names = split_axis(f"{reference},{rest}", "--gate")
        names = [DTYPE_ALIASES.get(name, replace_removed_dtype(name, "--gate")) for name in given_names]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidRequest(
                f"--gate names {quote(twice)} twice; a precision is compared with others.", param="gate"
            )
        return cls(names[0], tuple(names[1:]))

    @property
    def names(self) -> tuple[str, ...]:
        """Reference and candidates."""
        return self.reference, *self.candidates


class GateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One precision in one cell.

    exact          share of pictures that show exactly what they were asked to; ``None`` where that cannot be checked
    exact_change   the same, less the reference's, picture by picture
    psnr_db        to the reference's pictures, mean; and of the worst picture
    ssim           the same, mean
    frechet        distance to the reference's pictures; ``None`` of one picture alone
    unet_bytes     of the UNet's weights
    engine_s       an image's mean share of the engine's time
    failures       in words, every limit that is broken; none: it passes
    """

    precision: str
    cell: Cell
    num_images: int
    unet_bytes: int
    engine_s: float
    exact: float | None = None
    exact_change: Estimate | None = None
    psnr_db: Estimate | None = None
    worst_psnr_db: float | None = None
    ssim: float | None = None
    frechet: float | None = None
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class GateReport:
    """What came out. ``rows``: the reference first, then the candidates in order, each in every cell."""

    gate: PrecisionGate
    limits: GateLimits
    rows: tuple[GateRow, ...]
    folder: Path

    @property
    def failed(self) -> tuple[str, ...]:
        """The candidates that break a limit in some cell."""
        return tuple(dict.fromkeys(row.precision for row in self.rows if row.failures))


def broken(row: GateRow, limits: GateLimits) -> Iterator[str]:
    """Every limit that the candidate of ``row`` breaks, with its value."""
    if row.exact_change is not None and -100 * row.exact_change.value > limits.exact_points:
        lost = -100 * row.exact_change.value
        yield f"exact prompt match is {lost:.1f} points lower, at most {limits.exact_points:g} are allowed"
    if row.psnr_db is not None and row.psnr_db.value < limits.psnr_db:
        yield f"PSNR is {row.psnr_db.value:.1f} dB, at least {limits.psnr_db:g} are asked"
    if row.frechet is not None and row.frechet > limits.frechet:
        yield f"the Frechet distance is {row.frechet:.3g}, at most {limits.frechet:g} is allowed"

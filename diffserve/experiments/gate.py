"""Data types of the precision gate, which compares candidate precisions with a reference and reports pass or fail.

As in MLPerf Inference, all precisions use the same prompts, seeds and starting latents, and measures must stay within
limits. ``gate_run`` generates and evaluates the images, ``gate_report`` writes the results.
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
    """Limits for a candidate; ``benchmarks/LOG.md`` explains the defaults.

    Attributes:
        exact_points: Maximum loss of exact prompt match against the reference in percentage points, if checkable.
        psnr_db: Minimum mean PSNR to the reference's images.
        frechet: Maximum Frechet distance to the reference's images in the fixed feature network.

    Raises:
        InvalidRequest: A limit is outside its range.
    """

    exact_points: float = 5.0
    psnr_db: float = 30.0
    frechet: float = 0.05

    def __post_init__(self) -> None:
        for name, maximum in (("exact_points", 100.0), ("psnr_db", 99.0), ("frechet", 1e9)):
            value = getattr(self, name)
            if not 0 <= value <= maximum:
                raise InvalidRequest(f"{name} is {value:g}; it must lie between 0 and {maximum:g}.", param=name)


@dataclass(frozen=True)
class PrecisionGate:
    """Canonical names of the reference precision and of distinct candidates."""

    reference: str
    candidates: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> PrecisionGate:
        """Parse ``REFERENCE:CANDIDATE,CANDIDATE``; short names such as ``fp32`` are accepted.

        Raises:
            InvalidRequest: The text has another form, or a precision is unknown or repeated.
        """
        reference, colon, candidates = text.partition(":")
        if not colon or not reference.strip() or not candidates.strip():
            raise InvalidRequest(f"--gate is {quote(text)}; {FORM}", param="gate")
        aliases = split_axis(f"{reference},{candidates}", "--gate")
        names = [DTYPE_ALIASES.get(name, replace_removed_dtype(name, "--gate")) for name in aliases]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise InvalidRequest(
                f"--gate names {quote(repeated)} twice; a precision is compared with others.", param="gate"
            )
        return cls(names[0], tuple(names[1:]))

    @property
    def names(self) -> tuple[str, ...]:
        """The reference followed by the candidates."""
        return self.reference, *self.candidates


class GateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one precision in one cell.

    Attributes:
        precision: Canonical name of the precision.
        cell: Sampler, steps and guidance.
        num_images: Number of images.
        unet_bytes: Size of the UNet's weights.
        engine_s: Mean share of an image in the engine's time.
        exact: Share of images that match their prompt exactly, ``None`` if that cannot be checked.
        exact_change: Paired difference of ``exact`` to the reference.
        psnr_db: Mean PSNR to the reference's images.
        worst_psnr_db: Lowest PSNR of an image.
        ssim: Mean SSIM to the reference's images.
        frechet: Frechet distance to the reference's images, ``None`` for a single image.
        failures: One message per violated limit; empty if the precision passes.
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
    """Results of a gate; ``rows`` holds the reference first, then the candidates in order, each in every cell."""

    gate: PrecisionGate
    limits: GateLimits
    rows: tuple[GateRow, ...]
    folder: Path

    @property
    def failed(self) -> tuple[str, ...]:
        """Candidates that violate a limit in some cell."""
        return tuple(dict.fromkeys(row.precision for row in self.rows if row.failures))


def broken(row: GateRow, limits: GateLimits) -> Iterator[str]:
    """Yield a message with the value for each limit that the candidate of ``row`` violates."""
    if row.exact_change is not None and -100 * row.exact_change.value > limits.exact_points:
        loss = -100 * row.exact_change.value
        yield f"exact prompt match is {loss:.1f} points lower, at most {limits.exact_points:g} are allowed"
    if row.psnr_db is not None and row.psnr_db.value < limits.psnr_db:
        yield f"PSNR is {row.psnr_db.value:.1f} dB, at least {limits.psnr_db:g} dB is required"
    if row.frechet is not None and row.frechet > limits.frechet:
        yield f"the Frechet distance is {row.frechet:.3g}, at most {limits.frechet:g} is allowed"

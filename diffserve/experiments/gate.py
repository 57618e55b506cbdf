"""Precision gate: compares candidate precisions with a reference and reports pass or fail.

As in MLPerf Inference, all precisions use the same prompts, seeds and starting latents, and measures must stay within
limits. A gate is a sweep over precisions with a verdict on its records.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.experiments import provenance
from diffserve.experiments.axes import PRECISION, quote, split_axis
from diffserve.experiments.engines import EngineFacts, Engines, OpenEngine, check_plan
from diffserve.experiments.estimates import CheckerError, Estimate, Measure
from diffserve.experiments.findings import interval
from diffserve.experiments.intervals import bootstrap_interval, widen_equal
from diffserve.experiments.plan import Cell, EngineKey, SweepPlan
from diffserve.experiments.records import features_of
from diffserve.experiments.report import measure_checker
from diffserve.experiments.run import OnProgress, ProgressCounter, generate_missing, open_store
from diffserve.experiments.store import Store, refuse_folder, write_whole
from diffserve.settings.config import DTYPE_ALIASES, replace_removed_dtype

JSON, SUMMARY, PICTURES = "gate.json", "gate.md", "gate.png"
RESULTS = (JSON, SUMMARY, PICTURES)
FORM = "write it as REFERENCE:CANDIDATE,CANDIDATE, for example float32:bfloat16,int8."
HEADS = ("precision", "cell", "exact", "change", "PSNR", "worst", "SSIM", "Frechet", "UNet", "s per image", "verdict")
GAP_PX = 2


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
    """Canonical names of the reference precision and of distinct candidates, or of values of another engine axis."""

    reference: str
    candidates: tuple[str, ...]
    axis: str = PRECISION

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
                f"--gate names {quote(repeated)} twice; a precision is compared with other precisions.", param="gate"
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


def run_gate(
    gate: PrecisionGate,
    plan: SweepPlan,
    limits: GateLimits,
    folder: Path,
    open_engine: OpenEngine,
    on_progress: OnProgress | None = None,
    set_limits: Collection[str] = (),
) -> GateReport:
    """Generate the cells of ``plan`` in every precision, evaluate the candidates, and write the files of the gate.

    A gate is a sweep without converged images whose axis is the precision. An interrupted gate resumes in its folder.

    Args:
        gate: Reference and candidate precisions.
        plan: Cells, prompts and seeds, without the axis.
        limits: Limits for the candidates.
        folder: Output folder.
        open_engine: Opens the model in a precision.
        on_progress: Called with the progress.
        set_limits: Names of the limits that must be checked; the others are skipped if they cannot be measured.

    Raises:
        InvalidRequest: The folder cannot be used, an engine rejects the plan, or a named limit cannot be measured.
    """
    refuse_folder(folder, RESULTS)
    plan = msgspec.structs.replace(plan, axes={**plan.axes, gate.axis: gate.names}, reference_steps=None)
    engines = Engines(open_engine)
    initial_machine = provenance.machine()
    facts = check_plan(engines, plan)
    first = plan.engines[0]
    _refuse_unmeasured(set_limits, plan, facts[first].check.why_not)
    with open_store(plan, facts, folder, results=RESULTS, image_cells=plan.cells_of(first)) as store:
        checker = measure_checker(engines.get(first), facts[first].check)
        generate_missing(engines, plan, store, facts, store.missing(plan), ProgressCounter(on_progress, 0))
        cells = [cell for key in plan.engines for cell in plan.cells_of(key)]
        rows = tuple(judge(gate, plan, store, cell, facts[plan.engine_of(cell)].unet_bytes, limits) for cell in cells)
        report = GateReport(gate, limits, rows, folder)
        _write(report, plan, store, facts, checker, initial_machine)
    return report


def _refuse_unmeasured(set_limits: Collection[str], plan: SweepPlan, why_not: str | None) -> None:
    """Raise InvalidRequest if a limit that was named cannot be measured."""
    if "exact_points" in set_limits and why_not is not None:
        message = f"--gate-exact: exact prompt match cannot be measured: {why_not} Leave --gate-exact out."
        raise InvalidRequest(message, param="gate_exact")
    if "frechet" in set_limits and len(plan.places) < 2:
        message = "--gate-frechet needs at least 2 images of each precision; give more --prompts or --seeds."
        raise InvalidRequest(message, param="gate_frechet")


def judge(
    gate: PrecisionGate, plan: SweepPlan, store: Store, cell: Cell, unet_bytes: int, limits: GateLimits
) -> GateRow:
    """Compute the measures of a cell and the limits that it violates; the reference has no limits."""
    from diffserve.experiments.metrics.set_distance import frechet_distance

    records = [store.records(cell)[place] for place in plan.places]
    groups = [record.prompt_index for record in records] if len(plan.prompts) > 1 else None

    def mean(values: Sequence[float]) -> Estimate:
        return Estimate(statistics.fmean(values), *bootstrap_interval(values, groups))

    exact = [record.parts.exact for record in records if record.parts]
    row = GateRow(
        precision=str(dict(cell.settings)[gate.axis]),
        cell=msgspec.structs.replace(cell, settings=tuple(each for each in cell.settings if each[0] != gate.axis)),
        num_images=len(records),
        unet_bytes=unet_bytes,
        engine_s=statistics.fmean(record.engine_s for record in records),
        exact=statistics.fmean(exact) if len(exact) == len(records) else None,
    )
    reference = plan.reference_of(cell)
    if reference is None:
        return row
    reference_records = [store.records(reference)[place] for place in plan.places]
    psnr = [record.distance.psnr_db for record in records if record.distance and record.distance.psnr_db is not None]
    ssim = [record.distance.ssim for record in records if record.distance and record.distance.ssim is not None]
    pairs = [(a.parts, b.parts) for a, b in zip(records, reference_records, strict=True) if a.parts and b.parts]
    change = None
    if len(pairs) == len(records):
        changes = [float(a.exact - b.exact) for a, b in pairs]
        ends = widen_equal(*bootstrap_interval(changes, groups), len(set(groups or plan.places)))
        change = Estimate(statistics.fmean(changes), *ends)
    row = msgspec.structs.replace(
        row,
        exact_change=change,
        psnr_db=mean(psnr),
        worst_psnr_db=min(psnr),
        ssim=statistics.fmean(ssim),
        frechet=frechet_distance(features_of(reference_records), features_of(records)) if len(records) > 1 else None,
    )
    return msgspec.structs.replace(row, failures=tuple(broken(row, limits)))


def _write(
    report: GateReport,
    plan: SweepPlan,
    store: Store,
    facts: Mapping[EngineKey, EngineFacts],
    checker: CheckerError | None,
    initial_machine: Mapping[str, Any],
) -> None:
    """Write gate.json, gate.md to commit with a project, and gate.png with sample images of each precision."""
    why_not = next((fact.check.why_not for fact in facts.values() if fact.check.why_not), None)
    document = {
        "date": provenance.now(),
        "versions": provenance.versions(),
        "machine": initial_machine,
        "models": {name: fact.model for name, fact in zip(report.gate.names, facts.values(), strict=True)},
        "plan": plan,
        "limits": report.limits,
        "reference": report.gate.reference,
        "failed": report.failed,
        "rows": report.rows,
        "checker": checker,
        "notes": [
            *([f"Prompt match was not measured: {why_not}"] if why_not else []),
            *([f"Exact prompt match: {checker}, on {checker.count} images of known content."] if checker else []),
        ],
    }
    records = [store.records(plan.cells_of(key)[0]) for key in plan.engines]
    thumbnails = [[png for place in plan.places if (png := each[place].thumbnail)] for each in records]
    write_whole(report.folder / PICTURES, _contact_sheet(thumbnails))
    write_whole(report.folder / SUMMARY, _markdown(report, document).encode())
    write_whole(report.folder / JSON, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def table(report: GateReport) -> list[tuple[str, ...]]:
    """Format the rows as text with the header first; columns that are empty in every row are omitted."""
    several = len({row.cell.guidance_scale for row in report.rows}) > 1
    lines = [HEADS, *(_fields(row, report, with_scale=several) for row in report.rows)]
    columns = [index for index in range(len(HEADS)) if any(line[index] for line in lines[1:])]
    return [tuple(line[index] for index in columns) for line in lines]


def _fields(row: GateRow, report: GateReport, *, with_scale: bool) -> tuple[str, ...]:
    verdict = "reference" if row.precision == report.gate.reference else "fails" if row.failures else "passes"
    change = row.exact_change
    return (
        row.precision,
        f"{row.cell.label}, guidance {row.cell.guidance_scale:g}" if with_scale else row.cell.label,
        "" if row.exact is None else f"{100 * row.exact:.1f} %",
        "" if change is None else f"{100 * change.value:+.1f} points{interval(change, Measure.EXACT)}",
        "" if row.psnr_db is None else f"{row.psnr_db.value:.1f} dB",
        "" if row.worst_psnr_db is None else f"{row.worst_psnr_db:.1f} dB",
        "" if row.ssim is None else f"{row.ssim:.3f}",
        "" if row.frechet is None else f"{row.frechet:.3g}",
        f"{row.unet_bytes / 1e6:.1f} MB",
        f"{row.engine_s:.2f}",
        verdict,
    )


def verdicts(report: GateReport) -> Iterator[str]:
    """Yield one sentence per candidate and cell."""
    for row in report.rows:
        if row.precision != report.gate.reference:
            why = f"fails: {'; '.join(row.failures)}" if row.failures else "passes"
            yield f"{row.precision}, {row.cell.label}, guidance {row.cell.guidance_scale:g}: {why}."


def _contact_sheet(rows: Sequence[Sequence[bytes]]) -> bytes:
    """Combine thumbnails into one PNG with a row per precision."""
    image_rows = [[Image.open(BytesIO(image)) for image in row] for row in rows]
    width, height = (max(image.size[side] for row in image_rows for image in row) + GAP_PX for side in (0, 1))
    sheet = Image.new("RGB", (width * max(map(len, image_rows)) - GAP_PX, height * len(image_rows) - GAP_PX), "white")
    for number, row in enumerate(image_rows):
        for column, image in enumerate(row):
            sheet.paste(image, (column * width, number * height))
    file = BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def _markdown(report: GateReport, document: Mapping[str, Any]) -> str:
    heads, *rows = table(report)
    limits, machine = report.limits, document["machine"]
    model = document["models"][report.gate.reference]
    lines = [
        f"# Precision gate for {model['id']}: {', '.join(report.gate.candidates)} against {report.gate.reference}",
        *verdicts(report),
        "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows)),
        f"![some images]({PICTURES})",
        f"From top to bottom: {', '.join(report.gate.names)}.",
        f"{report.rows[0].num_images} images per precision and cell, with the same prompts and seeds. Each image is "
        "compared with the reference's image of the same prompt and seed. The Frechet distance uses a fixed network of "
        "random filters and compares with all images of the reference. "
        f"A candidate fails with PSNR below {limits.psnr_db:g} dB, a "
        f"Frechet distance above {limits.frechet:g}, or exact prompt match more than {limits.exact_points:g} points "
        "below the reference's. Seconds are an image's share of the engine's time.",
        *document["notes"],
        f"Weights {model['digest']}; {machine['cpu']}, {machine['cores']} cores; "
        f"{', '.join(f'{name} {version}' for name, version in document['versions'].items())}; {document['date']}.",
    ]
    return "\n\n".join(lines) + "\n"

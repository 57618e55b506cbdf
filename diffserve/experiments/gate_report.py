"""The files of a gate: gate.json, gate.md to keep with a project's sources, and gate.png with some of its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any

import msgspec
from PIL import Image

from diffserve.experiments.folder import write_whole
from diffserve.experiments.gate import JSON, PICTURES, SUMMARY, GateReport, GateRow

HEADS = ("precision", "cell", "exact", "change", "PSNR", "worst", "SSIM", "Frechet", "UNet", "s an image", "verdict")
GAP_PX = 2


def table(report: GateReport) -> list[tuple[str, ...]]:
    """The rows as people read them, heads first; the column that says nothing of any row is left out."""
    several = len({row.cell.guidance_scale for row in report.rows}) > 1
    lines = [HEADS, *(_fields(row, report, with_scale=several) for row in report.rows)]
    kept = [index for index in range(len(HEADS)) if any(line[index] for line in lines[1:])]
    return [tuple(line[index] for index in kept) for line in lines]


def _fields(row: GateRow, report: GateReport, *, with_scale: bool) -> tuple[str, ...]:
    verdict = "reference" if row.precision == report.gate.reference else "fails" if row.failures else "passes"
    change = row.exact_change
    return (
        row.precision,
        f"{row.cell.label}, guidance {row.cell.guidance_scale:g}" if with_scale else row.cell.label,
        "" if row.exact is None else f"{100 * row.exact:.1f} %",
        "" if change is None else f"{100 * change.value:+.1f} points",
        "" if row.psnr_db is None else f"{row.psnr_db.value:.1f} dB",
        "" if row.worst_psnr_db is None else f"{row.worst_psnr_db:.1f} dB",
        "" if row.ssim is None else f"{row.ssim:.3f}",
        "" if row.frechet is None else f"{row.frechet:.3g}",
        f"{row.unet_bytes / 1e6:.1f} MB",
        f"{row.engine_s:.2f}",
        verdict,
    )


def verdicts(report: GateReport) -> Iterator[str]:
    """A sentence for every candidate and cell."""
    for row in report.rows:
        if row.precision != report.gate.reference:
            why = f"fails: {'; '.join(row.failures)}" if row.failures else "passes"
            yield f"{row.precision}, {row.cell.label}, guidance {row.cell.guidance_scale:g}: {why}."


def write_gate(report: GateReport, document: Mapping[str, Any], shown: Mapping[str, Sequence[bytes]]) -> None:
    """Write all files. ``shown``: of each precision the same small pictures, as PNG."""
    write_whole(report.folder / PICTURES, _contact_sheet(list(shown.values())))
    write_whole(report.folder / SUMMARY, _markdown(report, document, list(shown)).encode())
    write_whole(report.folder / JSON, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def _contact_sheet(rows: Sequence[Sequence[bytes]]) -> bytes:
    """A row for each precision."""
    opened = [[Image.open(BytesIO(one)) for one in row] for row in rows]
    width, height = (max(one.size[side] for row in opened for one in row) + GAP_PX for side in (0, 1))
    sheet = Image.new("RGB", (width * max(map(len, opened)) - GAP_PX, height * len(opened) - GAP_PX), "white")
    for number, row in enumerate(opened):
        for place, one in enumerate(row):
            sheet.paste(one, (place * width, number * height))
    file = BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def _markdown(report: GateReport, document: Mapping[str, Any], names: Sequence[str]) -> str:
    heads, *rows = table(report)
    limits, machine = report.limits, document["machine"]
    model = document["models"][report.gate.reference]
    lines = [
        f"# A gate for {model['id']}: {', '.join(report.gate.candidates)} against {report.gate.reference}",
        *verdicts(report),
        "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows)),
        f"![some pictures]({PICTURES})",
        f"From top to bottom: {', '.join(names)}.",
        f"{report.rows[0].num_images} pictures of each precision in each cell, of the same prompts and seeds. Measures "
        "are against the reference's picture of the same prompt and seed; the Frechet distance, in a fixed network of "
        f"random filters, is against all of its pictures. A candidate fails with PSNR below {limits.psnr_db:g} dB, a "
        f"Frechet distance above {limits.frechet:g}, or exact prompt match more than {limits.exact_points:g} points "
        "below the reference's. Seconds are an image's share of the engine's time.",
        *document["notes"],
        f"Weights {model['digest']}; {machine['cpu']}, {machine['cores']} cores; "
        f"{', '.join(f'{name} {version}' for name, version in document['versions'].items())}; {document['date']}.",
    ]
    return "\n\n".join(lines) + "\n"

"""Writes the files of a gate: gate.json, gate.md to commit with a project, and gate.png with sample images."""

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
    """Yield one sentence per candidate and cell."""
    for row in report.rows:
        if row.precision != report.gate.reference:
            why = f"fails: {'; '.join(row.failures)}" if row.failures else "passes"
            yield f"{row.precision}, {row.cell.label}, guidance {row.cell.guidance_scale:g}: {why}."


def write_gate(report: GateReport, document: Mapping[str, Any], shown: Mapping[str, Sequence[bytes]]) -> None:
    """Write all files of a gate.

    Args:
        report: Results of the gate.
        document: Content of gate.json.
        shown: PNG thumbnails of the same images for each precision.
    """
    write_whole(report.folder / PICTURES, _contact_sheet(list(shown.values())))
    write_whole(report.folder / SUMMARY, _markdown(report, document, list(shown)).encode())
    write_whole(report.folder / JSON, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


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

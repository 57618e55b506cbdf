"""Figures of a report: charts, image strips with difference maps, and images of doubtful cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.axes import PROMPT
from diffserve.experiments.charts import (
    Chart,
    StripGrid,
    color_numbers,
    common_measures,
    over_seconds,
    over_steps,
    strip_grid,
    time_measures,
)
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell, CellLine, SweepPlan
from diffserve.experiments.records import ImageRecord
from diffserve.experiments.report_page import DoubtfulCell, Section
from diffserve.experiments.series import ChartDot
from diffserve.experiments.summary import PART_NAMES, CellSummary

CURVES, TIME, STRIP, OVERVIEW = "curves.png", "quality-against-time.png", "strip-{}.png", "overview.png"
WEBP_QUALITY, DIFFERENCE_QUALITY = 92, 60
AMPLIFICATION: Final = 8
"""Factor of difference maps, whose values are at most 255."""

NUM_LOWEST: Final = 6
"""Number of images with the lowest PSNR that count as doubtful."""

MAX_DOUBTFUL: Final = 4
"""Number of images of a doubtful cell to show."""

LINES_NOTE: Final = (
    "Steps are on a logarithmic axis. Colored: learned samplers, those on a Pareto front, and the best of the others, "
    "with bands for 95 % intervals. Lines that coincide within their intervals are one line with several names. All "
    "dots have tooltips."
)
DIFFERENCE_NOTE: Final = (
    f"Difference maps show the absolute difference from the converged image, {AMPLIFICATION} times amplified; black is "
    "equal."
)
DOUBTFUL_NOTE: Final = (
    f"Images above whose prompt check failed, and the {NUM_LOWEST} with the lowest PSNR to the converged image."
)


def files_of(analysis: Analysis, summaries: Sequence[CellSummary]) -> dict[str, bytes]:
    """Render every figure as PNG, by file name."""
    from diffserve.experiments import plots

    shown = _thumbnails(analysis)
    figures = {
        OVERVIEW: plots.overview(summaries),
        CURVES: plots.curves(summaries),
        TIME: plots.quality_against_time(summaries),
    }
    strips = {
        STRIP.format(index + 1): plots.strip(strip_title(analysis.plan, index), pictures, summaries)
        for index, pictures in enumerate(shown)
    }
    return figures | strips


def sections_of(analysis: Analysis, summaries: Sequence[CellSummary]) -> Iterator[Section]:
    """Yield the sections of the HTML report that hold figures."""
    yield Section(
        "Quality over steps",
        (LINES_NOTE,),
        charts=over_steps(summaries, common_measures(summaries)),
    )
    charts = over_seconds(summaries, time_measures(summaries))
    yield Section(
        "Quality over time",
        (
            "Vertical lines: 95 % intervals. The Pareto front uses only the values; its labels have the steps.",
            *map(_describe_front, charts),
        ),
        charts=charts,
    )
    if strips := _strips(analysis, color_numbers(summaries)):
        notes = "All images of a block have the same seed.", DIFFERENCE_NOTE
        yield Section("The same seed with more steps", notes[: 2 if analysis.plan.references else 1], strips=strips)
    if doubtful := doubtful_cells(analysis):
        yield Section("Doubtful images", (DOUBTFUL_NOTE,), doubtful=doubtful)


def _describe_front(chart: Chart) -> str:
    def label(dot: ChartDot) -> str:
        return f"{dot.summary.cell.label} ({dot.x:.2f} s)"

    end = "it has no knee" if chart.knee is None else f"its knee is {label(chart.knee)}"
    return f"Pareto front of {chart.measure.title}: {', '.join(map(label, chart.front))}; {end}."


def _strips(analysis: Analysis, colors: Mapping[CellLine, int]) -> dict[str, StripGrid]:
    """Return by caption the image grids of the first prompts, with difference maps."""
    plan, strips = analysis.plan, {}
    for prompt, thumbnails in enumerate(_thumbnails(analysis)):
        grid = strip_grid({cell: webp(decode(png)) for cell, png in thumbnails.items()}, colors)
        converged = {cell.target: decode(png) for cell, png in thumbnails.items() if cell.is_reference}
        maps = {
            cell: webp(difference_map(decode(png), converged[cell.target]), DIFFERENCE_QUALITY)
            for cell, png in thumbnails.items()
            if not cell.is_reference and cell.target in converged
        }
        differences = strip_grid({cell: maps.get(cell) for cell in thumbnails}, colors).rows if maps else ()
        caption = strip_title(plan, prompt)
        strips[caption] = grid._replace(differences=differences)
    return strips


def strip_title(plan: SweepPlan, prompt_index: int) -> str:
    """Return the title of the images of a prompt and its first seed; with an axis of prompts only the seed."""
    seed = f"seed {plan.seed_of((prompt_index, 0))}"
    return seed if PROMPT in plan.axes else f"“{plan.prompts[prompt_index]}”, {seed}"


def difference_map(pixels: NDArray[np.uint8], other: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the largest absolute difference over the channels, amplified; black where the images are equal.

    Args:
        pixels: An image, (H, W, 3).
        other: Another one of the same size.

    Returns:
        Gray values, (H, W).
    """
    difference = AMPLIFICATION * np.abs(pixels.astype(np.int16) - other).max(axis=-1)
    gray: NDArray[np.uint8] = np.minimum(difference, 255).astype(np.uint8)
    return gray


def doubtful_cells(analysis: Analysis) -> tuple[DoubtfulCell, ...]:
    """Return the cells with doubtful images among those that are stored, in the order of the plan.

    An image is doubtful if its prompt check failed, or if its PSNR to the converged image is among the lowest.
    """
    shown = {
        cell: [record for record in analysis.records(cell) if record.thumbnail and not cell.is_reference]
        for cell in analysis.plan.cells
    }
    distances = sorted(psnr for records in shown.values() for record in records if (psnr := _psnr(record)) is not None)
    limit = distances[:NUM_LOWEST][-1] if distances else -np.inf
    cells = []
    for cell, records in shown.items():
        images = [
            (f"“{analysis.plan.prompt_of(cell, record.prompt_index)}”: {why}", webp(decode(record.thumbnail)))
            for record in records
            if record.thumbnail and (why := _why_doubtful(record, limit))
        ]
        if images:
            cells.append(DoubtfulCell(cell.label, tuple(images[:MAX_DOUBTFUL])))
    return tuple(cells)


def _psnr(record: ImageRecord) -> float | None:
    return record.distance.psnr_db if record.distance else None


def _why_doubtful(record: ImageRecord, limit_db: float) -> str:
    """Say why an image is doubtful; empty if it is not."""
    wrong = [name for name in PART_NAMES if record.parts and not getattr(record.parts, name)]
    reasons = [f"wrong {', '.join(wrong)}"] if wrong else []
    psnr = _psnr(record)
    reasons += [f"PSNR {Measure.PSNR_DB.write(psnr)}"] if psnr is not None and (reasons or psnr <= limit_db) else []
    return "; ".join(reasons)


def _thumbnails(analysis: Analysis) -> list[dict[Cell, bytes]]:
    """Return the stored PNG thumbnails of the first prompts by cell."""
    shown = []
    for prompt in range(len(analysis.plan.prompts)):
        records = {cell: analysis.record(cell, (prompt, 0)) for cell in analysis.plan.all_cells}
        thumbnails = {cell: record.thumbnail for cell, record in records.items() if record and record.thumbnail}
        if not thumbnails:
            break
        shown.append(thumbnails)
    return shown


def decode(file: bytes) -> NDArray[np.uint8]:
    """Decode an image to (H, W, 3)."""
    return np.asarray(Image.open(BytesIO(file)).convert("RGB"))


def webp(pixels: NDArray[np.uint8], quality: int = WEBP_QUALITY) -> bytes:
    """Encode an image, (H, W, 3) or gray (H, W), as WebP."""
    file = BytesIO()
    Image.fromarray(pixels).convert("RGB").save(file, "WEBP", quality=quality)
    return file.getvalue()

"""The figures of a sweep: PNG files for the folder, and SVG charts for the HTML report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO

from PIL import Image

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.charts import (
    Chart,
    ChartDot,
    common_measures,
    over_seconds,
    over_steps,
    strip_grid,
    time_measures,
)
from diffserve.experiments.plan import Cell
from diffserve.experiments.report_page import Section, Strip
from diffserve.experiments.summary import CellSummary

CURVES, TIME, STRIP, OVERVIEW = "curves.png", "quality-against-time.png", "strip-{}.png", "overview.png"
WEBP_QUALITY = 92


def files_of(analysis: Analysis, summaries: Sequence[CellSummary]) -> dict[str, bytes]:
    """Render every figure as PNG, by file name."""
    from diffserve.experiments import plots

    prompts = analysis.plan.prompts
    shown = _thumbnails(analysis)
    overview = plots.overview(summaries, prompts[0], shown[0] if shown else {})
    figures = {OVERVIEW: overview, CURVES: plots.curves(summaries), TIME: plots.quality_against_time(summaries)}
    strips = {STRIP.format(index + 1): plots.strip(prompts[index], pictures) for index, pictures in enumerate(shown)}
    return figures | strips


def sections_of(analysis: Analysis, summaries: Sequence[CellSummary]) -> Iterator[Section]:
    """Yield the sections of the HTML report that hold figures."""
    yield Section(
        "Over steps",
        ("Steps are on a logarithmic axis. Bands: 95 % intervals. Dotted: the converged pictures themselves.",),
        charts=over_steps(summaries, common_measures(summaries)),
    )
    charts = over_seconds(summaries, time_measures(summaries))
    yield Section(
        "Against time",
        (
            "Upright lines: 95 % intervals. The front is of the values alone; the numbers on it are steps.",
            *map(_describe_front, charts),
        ),
        charts=charts,
    )
    if strips := tuple(_strips(analysis)):
        yield Section("The same seed, growing steps", ("Every picture of a block has the same seed.",), strips=strips)


def _describe_front(chart: Chart) -> str:
    def label(dot: ChartDot) -> str:
        return f"{dot.summary.cell.label} ({dot.x:.2f} s)"

    end = "it has no knee" if chart.knee is None else f"its knee is {label(chart.knee)}"
    return f"On the front of {chart.measure.title}: {', '.join(map(label, chart.front))}; {end}."


def _strips(analysis: Analysis) -> Iterator[Strip]:
    plan = analysis.plan
    for prompt, pictures in enumerate(_thumbnails(analysis)):
        small = {cell: _webp(png) for cell, png in pictures.items()}
        yield Strip(f"“{plan.prompts[prompt]}”, seed {plan.seed_of((prompt, 0))}", strip_grid(small))


def _thumbnails(analysis: Analysis) -> list[dict[Cell, bytes]]:
    """Return the stored PNG thumbnails of the first prompts by cell."""
    shown = []
    for prompt in range(len(analysis.plan.prompts)):
        index = analysis.plan.places.index((prompt, 0))
        optional_thumbnails = {cell: analysis.records(cell)[index].thumbnail for cell in analysis.plan.all_cells}
        thumbnails = {cell: thumbnail for cell, thumbnail in optional_thumbnails.items() if thumbnail is not None}
        if not thumbnails:
            break
        shown.append(thumbnails)
    return shown


def _webp(png: bytes) -> bytes:
    file = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").save(file, "WEBP", quality=WEBP_QUALITY)
    return file.getvalue()

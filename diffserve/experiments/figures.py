"""The figures of a sweep: PNG files for the folder, and the same drawn once more for the page, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO

from PIL import Image

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.front import knee, pareto_front
from diffserve.experiments.plan import Cell
from diffserve.experiments.report_page import Chart, Section, Strip
from diffserve.experiments.series import measured, points_of, strip_grid, time_measures
from diffserve.experiments.summary import CellSummary

CURVES, TIME, STRIP, OVERVIEW = "curves.png", "quality-against-time.png", "strip-{}.png", "overview.png"
WEBP_QUALITY = 92


def files_of(analysis: Analysis, summaries: Sequence[CellSummary]) -> dict[str, bytes]:
    """Every figure by the name of its file."""
    from diffserve.experiments import plots

    prompts = analysis.plan.prompts
    shown = _shown(analysis)
    overview = plots.overview(summaries, prompts[0], shown[0] if shown else {})
    figures = {OVERVIEW: overview, CURVES: plots.curves(summaries), TIME: plots.quality_against_time(summaries)}
    strips = {STRIP.format(index + 1): plots.strip(prompts[index], pictures) for index, pictures in enumerate(shown)}
    return figures | strips


def sections_of(analysis: Analysis, summaries: Sequence[CellSummary]) -> Iterator[Section]:
    """The figures as the page shows them."""
    from diffserve.experiments import plots

    yield Section(
        "Over steps",
        ("Steps are on a logarithmic axis. Shaded: 95 % intervals. Dotted: the converged pictures themselves.",),
        charts=tuple(
            Chart(
                f"{measure.title} over steps",
                plots.curves(summaries, [measure]),
                plots.curves(summaries, [measure], is_dark=True),
            )
            for measure in measured(summaries)
        ),
    )
    yield Section(
        "Against time",
        (
            "Upright lines: 95 % intervals. The front is of the values alone; the numbers on it are steps.",
            *_fronts(summaries),
        ),
        charts=tuple(
            Chart(
                f"{measure.title} against the seconds of one image",
                plots.quality_against_time(summaries, [measure]),
                plots.quality_against_time(summaries, [measure], is_dark=True),
            )
            for measure in time_measures(summaries)
        ),
    )
    if strips := tuple(_strips(analysis)):
        yield Section("The same seed, growing steps", ("Every picture of a block has the same seed.",), strips=strips)


def _fronts(summaries: Sequence[CellSummary]) -> Iterator[str]:
    """The fronts in words."""
    labels = {one.cell.slug: f"{one.cell.label} ({one.alone_s:.2f} s)" for one in summaries}
    for measure in time_measures(summaries):
        front = pareto_front(points_of(summaries, measure))
        best = knee(front)
        ends = "it has no knee" if best is None else f"its knee is {labels[best.name]}"
        yield f"On the front of {measure.title}: {', '.join(labels[point.name] for point in front)}; {ends}."


def _strips(analysis: Analysis) -> Iterator[Strip]:
    plan = analysis.plan
    for prompt, pictures in enumerate(_shown(analysis)):
        small = {cell: _webp(png) for cell, png in pictures.items()}
        yield Strip(f"“{plan.prompts[prompt]}”, seed {plan.seed_of((prompt, 0))}", strip_grid(small))


def _shown(analysis: Analysis) -> list[dict[Cell, bytes]]:
    """For the first prompts the pictures that were kept, as PNG."""
    cells = (*analysis.plan.cells, *analysis.plan.references)
    shown = []
    for prompt in range(len(analysis.plan.prompts)):
        index = analysis.plan.places.index((prompt, 0))
        found = {cell: analysis.records(cell)[index].thumbnail for cell in cells}
        kept = {cell: thumbnail for cell, thumbnail in found.items() if thumbnail is not None}
        if not kept:
            break
        shown.append(kept)
    return shown


def _webp(png: bytes) -> bytes:
    file = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").save(file, "WEBP", quality=WEBP_QUALITY)
    return file.getvalue()

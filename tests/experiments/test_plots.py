"""Plots: pictures that decode and show something, light and dark, whatever measures and cells there are."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from diffserve.experiments import plots
from diffserve.experiments.charts import over_seconds, strip_grid, time_measures
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell
from diffserve.experiments.summary import CellSummary, summarise
from tests.experiments.synthetic import analysis_of, plan_of, time_of

PLAN = plan_of(("ddpm", "ddim"), (5, 20, 100))
CELLS = (*PLAN.cells, *PLAN.references)
NASTY = "<script>alert('x')</script> & \"quotes\" $x^2$ \U0001f98a"


@pytest.fixture(scope="module")
def summaries() -> tuple[CellSummary, ...]:
    analysis = analysis_of(PLAN, lambda cell: 1 - 2 / cell.num_steps, lambda cell: 2 / cell.num_steps)
    return tuple(summarise(analysis, cell, time_of(cell)) for cell in CELLS)


def png(color: int) -> bytes:
    file = BytesIO()
    Image.fromarray(np.full((32, 32, 3), color, np.uint8)).save(file, "PNG")
    return file.getvalue()


THUMBNAILS = {cell: png(30 * index) for index, cell in enumerate(CELLS)}


def pixels(data: bytes) -> NDArray[np.uint8]:
    image = Image.open(BytesIO(data))
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB"))


@pytest.mark.slow
def test_every_plot_is_a_picture(summaries: tuple[CellSummary, ...]) -> None:
    for data in (
        plots.curves(summaries),
        plots.quality_against_time(summaries),
        plots.strip(NASTY, THUMBNAILS),
        plots.contact_sheet(summaries, NASTY, THUMBNAILS),
        plots.overview(summaries),
    ):
        actual = pixels(data)
        assert min(actual.shape[:2]) > 150
        assert len(np.unique(actual @ np.array([1 << 16, 1 << 8, 1]))) > 10  # colours


@pytest.mark.slow
def test_a_plot_of_one_cell_or_without_some_measures_can_be_drawn(summaries: tuple[CellSummary, ...]) -> None:
    for part in (summaries[:1], summaries[:1] + summaries[-1:]):
        assert pixels(plots.curves(part)).size
        assert pixels(plots.quality_against_time(part)).size
        assert pixels(plots.overview(part)).size
    assert pixels(plots.strip("a fox", {PLAN.cells[0]: png(3)})).size


def test_the_overview_is_small_enough_to_be_kept_with_sources(summaries: tuple[CellSummary, ...]) -> None:
    data = plots.overview(summaries)
    assert len(data) < 80_000
    assert pixels(data).shape[:2] == (451, 1012)
    assert (pixels(data)[0, 0] == 255).all(), "a light background, also on a dark page"


def test_the_front_is_drawn_over_the_seconds_of_one_image(summaries: tuple[CellSummary, ...]) -> None:
    assert time_measures(summaries) == (Measure.EXACT, Measure.PSNR_DB)
    for chart in over_seconds(summaries, time_measures(summaries)):
        assert [dot.summary.cell.num_steps for dot in chart.dots] == [5, 20, 100] * 2
        assert all(dot.x == dot.summary.alone_s for dot in chart.dots)
        assert [dot.summary.cell.num_steps for dot in chart.front] == [5, 20, 100]


def test_a_strip_has_a_row_for_each_sampler_and_ends_in_the_converged_picture() -> None:
    missing = Cell("ddim", 20, 3.0)
    colors = {missing.line: 0}
    grid = strip_grid({cell: data for cell, data in THUMBNAILS.items() if cell != missing})
    assert grid.heads == ("5 steps", "20 steps", "100 steps", "converged (200)")
    assert grid.names == ("ddpm", "ddim")
    converged = THUMBNAILS[PLAN.references[0]]
    ddim = THUMBNAILS[Cell("ddim", 5, 3.0)], None, THUMBNAILS[Cell("ddim", 100, 3.0)], converged
    assert grid.rows[1] == ddim
    assert grid.rows[0][-1] == converged
    assert strip_grid(THUMBNAILS, colors).names == ("ddim", "ddpm"), "the colored lines come first"
    assert (strip_grid(THUMBNAILS, colors).num_first, grid.num_first) == (1, 2)


def test_learned_samplers_of_a_family_are_one_row_of_a_strip() -> None:
    learned = {Cell(f"learned:toy-{steps}", steps, 3.0): png(steps) for steps in (5, 20)}
    grid = strip_grid({**THUMBNAILS, **learned})
    assert grid.names == ("ddpm", "ddim", "learned")
    assert grid.rows[2] == (png(5), png(20), None, THUMBNAILS[PLAN.references[0]])

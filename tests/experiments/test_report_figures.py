"""Images of a report: difference maps, strips with folded rows, and doubtful images."""

from __future__ import annotations

from io import BytesIO

import msgspec
import numpy as np
import pytest
from PIL import Image

from diffserve.experiments.analysis import Analysis
from diffserve.experiments.plan import Cell
from diffserve.experiments.records import Distance, Parts
from diffserve.experiments.report_figures import NUM_LOWEST, decode, difference_map, doubtful_cells, sections_of
from diffserve.experiments.summary import summarise
from tests.experiments.synthetic import plan_of, records_of, time_of

SAMPLERS = (
    "ddim", "ddpm", "euler", "euler_a", "heun", "dpmpp_2m", "dpmpp_2m_sde", "lms", "deis", "unipc"
)  # fmt: skip
PLAN = plan_of(SAMPLERS, (4, 10), num_prompts=4)
SIDE = 16


def png(value: int) -> bytes:
    file = BytesIO()
    Image.fromarray(np.full((SIDE, SIDE, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def analysis() -> Analysis:
    """Return an analysis whose first two prompts have thumbnails; images of cell N differ by N from converged ones."""
    records = records_of(PLAN, lambda _: 1.0, lambda cell: SAMPLERS.index(cell.sampler) / 10 + 1 / cell.num_steps)
    for number, cell in enumerate(PLAN.all_cells):
        for place in ((0, 0), (1, 0)):
            value = 100 if cell.is_reference else 101 + number
            records[cell][place] = msgspec.structs.replace(records[cell][place], thumbnail=png(value))
    bad = Cell("unipc", 10, 3.0)
    parts = Parts(exact=False, background=True, objects=False, relation=False, size=True)
    records[bad][1, 0] = msgspec.structs.replace(records[bad][1, 0], parts=parts, distance=Distance(psnr_db=50.0))
    return Analysis(PLAN, records)


def test_a_difference_map_is_amplified_and_black_where_images_are_equal() -> None:
    first = np.zeros((2, 2, 3), np.uint8)
    second = first.copy()
    second[0, 0] = (1, 10, 3)
    second[1, 1] = 200
    assert difference_map(first, second).tolist() == [[80, 0], [0, 255]]
    assert (difference_map(first, second) == difference_map(second, first)).all()


def test_strips_have_difference_maps_and_rows_of_gray_lines_are_folded(analysis: Analysis) -> None:
    summaries = [summarise(analysis, cell, time_of(cell)) for cell in PLAN.all_cells]
    strips = next(section.strips for section in sections_of(analysis, summaries) if section.strips)
    assert list(strips) == ["“prompt 0”, seed 0", "“prompt 1”, seed 3"]
    grid = strips["“prompt 0”, seed 0"]
    assert (len(grid.rows), grid.num_first) == (10, 7)
    assert grid.names[0] == "ddim", "the sampler that is closest to the converged image"
    (four, ten, converged), (map_four, map_ten, no_map) = grid.rows[0], grid.differences[0]
    assert None not in (four, ten, converged)
    assert no_map is None, "the converged image has no difference from itself"
    cells = list(PLAN.all_cells)
    for file, steps in ((map_four, 4), (map_ten, 10)):
        assert file is not None
        difference = 8 * (1 + cells.index(Cell("ddim", steps, 3.0)))
        assert decode(file).mean() == pytest.approx(difference, abs=2)


def test_doubtful_images_failed_their_check_or_have_the_lowest_psnr(analysis: Analysis) -> None:
    cells = {cell.name: [caption for caption, _ in cell.images] for cell in doubtful_cells(analysis)}
    assert "“prompt 1”: wrong objects, relation; PSNR 50.0 dB" in cells["unipc 10"]
    lowest = [caption for captions in cells.values() for caption in captions if "wrong" not in caption]
    assert len(lowest) == NUM_LOWEST
    assert all(" dB" in caption for caption in lowest)
    assert "ddim 10" not in cells


def test_without_checks_and_converged_images_nothing_is_doubtful() -> None:
    plan = plan_of(num_prompts=2, reference_steps=None)
    records = {
        cell: {
            place: msgspec.structs.replace(record, parts=None, distance=None, thumbnail=png(3))
            for place, record in cell_records.items()
        }
        for cell, cell_records in records_of(plan, lambda _: 1.0, lambda _: 0.3).items()
    }
    assert doubtful_cells(Analysis(plan, records)) == ()

"""The files of a report: a table that reads back, plots that decode, a page that needs nothing else."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from diffserve.experiments import plots
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.findings import AS_EXPECTED, OTHERWISE, Finding
from diffserve.experiments.plan import Cell
from diffserve.experiments.report_page import write_page
from diffserve.experiments.summary import CellSummary, summarise, write_csv
from tests.experiments.synthetic import analysis_of, plan_of, time_of

PLAN = plan_of(("ddpm", "ddim"), (5, 20, 100))
NASTY = "<script>alert('x')</script> & \"quotes\" $x^2$ \U0001f98a"
FINDINGS = (Finding("DDIM is ahead", AS_EXPECTED, (NASTY,)), Finding(NASTY, OTHERWISE, ("so it is",)))


@pytest.fixture(scope="module")
def summaries() -> tuple[CellSummary, ...]:
    analysis = analysis_of(PLAN, lambda cell: 1 - 2 / cell.num_steps, lambda cell: 2 / cell.num_steps)
    return tuple(summarise(analysis, cell, time_of(cell)) for cell in (*PLAN.cells, *PLAN.references))


def png(color: int) -> bytes:
    file = BytesIO()
    Image.fromarray(np.full((32, 32, 3), color, np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_a_row_holds_measures_times_and_throughput(summaries: tuple[CellSummary, ...]) -> None:
    one = summaries[0]
    assert (one.cell, one.num_images, one.spacing) == (Cell("ddpm", 5, 3.0), 80, "trailing")
    assert one.evaluations == 10
    assert one.step_ms == Estimate(10.0, 9.0, 11.0)
    assert one.images_per_s == pytest.approx(1 / 0.05)
    assert set(one.measures) == {"exact", "latent_rmse", "psnr_db", "ssim"}
    assert one.parts == {"background": 1.0, "objects": 1.0, "relation": 1.0, "size": 1.0}
    assert summaries[-1].value(Measure.SSIM) is None


def test_the_table_reads_back_with_a_line_for_each_cell(summaries: tuple[CellSummary, ...]) -> None:
    rows = list(csv.DictReader(io.StringIO(write_csv(summaries))))
    assert [(row["sampler"], int(row["steps"]), row["converged"]) for row in rows] == [
        *((cell.sampler, cell.num_steps, "0") for cell in PLAN.cells),
        ("ddim", 200, "1"),
    ]
    for row, one in zip(rows, summaries, strict=True):
        exact = one.value(Measure.EXACT)
        assert exact is not None
        assert exact.low is not None
        assert float(row["exact"]) == pytest.approx(exact.value, rel=1e-5)
        assert float(row["exact_low"]) == pytest.approx(exact.low, rel=1e-5)
        assert float(row["ms_per_step_alone"]) == 10
    assert rows[-1]["ssim"] == ""
    assert "frechet" not in rows[0]
    assert write_csv([]) == "\n"


def test_every_plot_is_a_picture(summaries: tuple[CellSummary, ...]) -> None:
    thumbnails = {cell: png(40 * index) for index, cell in enumerate((*PLAN.cells, *PLAN.references))}
    for data in (
        plots.curves(summaries),
        plots.quality_against_time(summaries),
        plots.strip(NASTY, thumbnails),
    ):
        image = Image.open(BytesIO(data))
        assert image.format == "PNG"
        assert min(image.size) > 150
        assert len(np.unique(np.asarray(image.convert("L")))) > 10


def test_a_plot_of_one_cell_or_without_some_measures_can_be_drawn(summaries: tuple[CellSummary, ...]) -> None:
    for part in (summaries[:1], summaries[:1] + summaries[-1:]):
        assert Image.open(BytesIO(plots.curves(part))).format == "PNG"
        assert Image.open(BytesIO(plots.quality_against_time(part))).format == "PNG"
    assert plots.strip("a fox", {PLAN.cells[0]: png(3)})


def test_the_front_is_drawn_over_the_seconds_of_one_image(summaries: tuple[CellSummary, ...]) -> None:
    points = plots.points_of(summaries, Measure.EXACT)
    assert len(points) == len(PLAN.cells)
    assert [point.seconds for point in points] == [one.alone_s for one in summaries[:-1]]
    assert plots.time_measures(summaries) == (Measure.EXACT, Measure.PSNR_DB)


class Page(HTMLParser):
    """What a browser would fetch, and which elements there are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_loads_nothing_runs_nothing_and_says_everything(summaries: tuple[CellSummary, ...]) -> None:
    figures = [(NASTY, NASTY, png(9)), ("", "second", png(10))]
    text = write_page(NASTY, {"model": NASTY, NASTY: 3}, FINDINGS, figures, summaries, [NASTY])
    page = Page(text)
    assert len(page.addresses) == 2
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not re.search(r"url\(|@import|https?://", text)
    assert sum(NASTY in words for words in page.words) >= 6
    assert page.tags.count("tr") == 1 + len(summaries)
    assert {"h1", "h2", "table", "figcaption"} <= set(page.tags)


def test_a_page_without_findings_says_so(summaries: tuple[CellSummary, ...]) -> None:
    assert "answer none of the usual questions" in write_page("t", {}, (), [], summaries, [])

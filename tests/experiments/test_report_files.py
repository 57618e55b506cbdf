"""The files of a report: a table that reads back, a page that needs nothing else, a short text that is inert."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from io import BytesIO

import msgspec
import numpy as np
import pytest
from PIL import Image

from diffserve.experiments.charts import StripGrid, headline, over_seconds, over_steps
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.findings import AS_EXPECTED, OTHERWISE, Finding
from diffserve.experiments.plan import Cell
from diffserve.experiments.report_page import SCRIPT, DoubtfulCell, Section, Tables, write_markdown, write_page
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
    summary = summaries[0]
    assert (summary.cell, summary.num_images, summary.spacing) == (Cell("ddpm", 5, 3.0), 120, "trailing")
    assert summary.evaluations == 10
    assert summary.step_ms == Estimate(10.0, 9.0, 11.0)
    assert summary.images_per_s == pytest.approx(1 / 0.05)
    assert set(summary.measures) == {"exact", "latent_rmse", "psnr_db", "ssim"}
    assert summary.parts == {"background": 1.0, "objects": 1.0, "relation": 1.0, "size": 1.0}
    assert summaries[-1].value(Measure.SSIM) is None


def test_the_table_reads_back_with_a_line_for_each_cell(summaries: tuple[CellSummary, ...]) -> None:
    rows = list(csv.DictReader(io.StringIO(write_csv(summaries))))
    assert [(row["sampler"], int(row["steps"]), row["converged"]) for row in rows] == [
        *((cell.sampler, cell.num_steps, "0") for cell in PLAN.cells),
        ("ddim", 200, "1"),
    ]
    for row, summary in zip(rows, summaries, strict=True):
        exact = summary.value(Measure.EXACT)
        assert exact is not None
        assert exact.low is not None
        assert float(row["exact"]) == pytest.approx(exact.value, rel=1e-5)
        assert float(row["exact_low"]) == pytest.approx(exact.low, rel=1e-5)
        assert float(row["ms_per_step_alone"]) == 10
    assert rows[-1]["ssim"] == ""
    assert "frechet" not in rows[0]
    assert write_csv([]) == "\n"


class Page(HTMLParser):
    """The elements of a page and the addresses that a browser would fetch."""

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


def test_the_page_loads_nothing_and_says_everything(summaries: tuple[CellSummary, ...]) -> None:
    rows = ((png(3), png(4)), (png(5), png(4)))
    strip = StripGrid((NASTY, "converged"), (NASTY, "ddim"), rows, 1, ((png(6), None), (png(7), None)))
    sections = [
        Section(NASTY, (NASTY,), charts=over_steps(summaries, Measure, {"ddim": NASTY})),
        Section("seconds", (), charts=over_seconds(summaries, [Measure.SSIM])),
        Section("strips", (), strips={NASTY: strip}),
        Section("doubtful", (), doubtful=(DoubtfulCell(NASTY, ((NASTY, png(8)),)),)),
    ]
    facts, tables = {"model": NASTY, NASTY: 3}, Tables(summaries)
    text = write_page(NASTY, facts, FINDINGS, sections, tables, [NASTY], headline(summaries))
    page = Page(text)
    images = [address for address in page.addresses if not address.startswith("#")]
    assert len(images) == 4 + 2 + 1, "images, difference maps, and a doubtful image"
    assert all(address.startswith("data:image/webp;base64,") for address in images)
    assert page.tags.count("script") == 1
    assert SCRIPT.read_text(encoding="utf-8") in text, "the script has no text from outside"
    assert page.tags.count("details") == 1, "the row after the first ones is folded"
    assert "link" not in page.tags
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    assert page.tags.count("svg") == 2 + 4 + 1, "the headline, and a chart for each measure"
    assert sum(NASTY in words for words in page.words) >= 10
    assert page.tags.count("tr") == 1 + len(summaries) + 4
    assert {"h1", "h2", "table", "figcaption", "svg"} <= set(page.tags)


def test_a_page_without_findings_says_so(summaries: tuple[CellSummary, ...]) -> None:
    text = write_page("t", {}, (), [], Tables(summaries), [])
    assert "answer none of the usual questions" in text
    assert "<script" not in text, "there is nothing to compare"


def test_the_table_of_the_page_writes_a_unit_once_and_the_guidance_only_where_there_are_several(
    summaries: tuple[CellSummary, ...],
) -> None:
    text = write_page("t", {}, (), [], Tables(summaries), [])
    assert re.search(r"<td>60\.0 %<small>[\d.]+ to [\d.]+ %</small></td>", text)
    assert "guidance 3" not in text
    other = msgspec.structs.replace(summaries[0], cell=Cell("ddpm", 5, 1.0))
    assert "ddpm 5, guidance 1" in write_page("t", {}, (), [], Tables((*summaries, other)), [])


def test_the_short_report_has_the_picture_the_findings_and_a_row_for_each_cell(
    summaries: tuple[CellSummary, ...],
) -> None:
    text = write_markdown("A sweep", {"model": "tiny"}, FINDINGS, "overview.png", Tables(summaries), ["Paired."])
    assert "![quality over network evaluations and over seconds per image](overview.png)" in text
    assert "### DDIM is ahead: as expected" in text
    rows = [line for line in text.splitlines() if line.startswith("| dd")]
    assert [row.split("|")[1].strip() for row in rows] == [summary.cell.label for summary in summaries]
    assert re.search(r"\| 60\.0 % \([\d.]+ to [\d.]+ %\) \|", rows[0])


def test_the_short_report_takes_words_as_words(summaries: tuple[CellSummary, ...]) -> None:
    nasty = "![x](https://example.org/x.png) <img src=x> | `code` [link](http://example.org)\n# heading"
    text = write_markdown(
        nasty, {nasty: nasty}, (Finding(nasty, OTHERWISE, (nasty,)),), "p.png", Tables(summaries), [nasty]
    )
    assert not re.search(r"(?<!\\)[<\]`](?!\(p\.png)", text.replace("image](p.png)", "image"))
    assert "://" not in text
    assert [line for line in text.splitlines() if line.startswith("# ")] == [text.splitlines()[0]]

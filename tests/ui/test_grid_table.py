"""The experiment's grid as HTML: an image in every finished cell and escaped texts."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from diffserve.experiments.estimates import Estimate
from diffserve.experiments.plan import Cell, SweepPlan
from diffserve.experiments.summary import CellSummary
from ui.experiment.grid import Arrangement, grid
from ui.experiment.view import findings_list

BAD = "<img src=x onerror=alert(1)>\"'&"


def plan_of(prompt: str = "a fox", num_seeds: int = 1) -> SweepPlan:
    return SweepPlan(
        samplers=("ddpm", "ddim"), steps=(4, 8), guidance=(3.0,), prompts=(prompt,), num_seeds=num_seeds,
        reference_steps=20,
    )  # fmt: skip


def finished(cell: Cell, num_images: int = 1, **measures: float) -> CellSummary:
    return CellSummary(
        cell=cell, num_images=num_images, measures={name: Estimate(value) for name, value in measures.items()},
        parts={}, spacing="trailing", evaluations=8.0, step_ms=Estimate(1.0), alone_s=1.0, engine_s=0.0,
    )  # fmt: skip


def squares(plan: SweepPlan, *cells: CellSummary) -> list[list[ElementTree.Element]]:
    looks = {summary.cell: Path(f"/pictures/{summary.cell.slug}.png") for summary in cells}
    markup = grid(plan, {summary.cell: summary for summary in cells}, looks, {}).replace("&nbsp;", " ")
    rows = ElementTree.fromstring(_closed(markup)).findall(".//tbody/tr")
    return [row.findall("td") for row in rows]


def _closed(markup: str) -> str:
    """Close tags without content, as XML requires."""
    return re.sub(r"<((?:img|input)\s[^>]*)>", r"<\1/>", markup)


def test_samplers_are_rows_and_steps_are_columns() -> None:
    plan = plan_of()
    cell = next(candidate for candidate in plan.cells if (candidate.sampler, candidate.num_steps) == ("ddim", 8))
    rows = squares(plan, finished(cell, exact=1.0))
    assert [len(row) for row in rows] == [3, 3], "two steps and the converged picture"
    painted = [[square.find(".//img") is not None for square in row] for row in rows]
    assert painted == [[False, False, False], [False, True, False]]
    image = rows[1][1].find("a/img")
    assert image is not None
    assert (image.get("src") or "").endswith("ddim-8-g3.png")
    assert image.get("alt") == "ddim, 8 steps"
    assert (rows[1][1].findtext("small") or "").strip() == "✓"


def test_several_images_are_summarized_in_their_cell() -> None:
    plan = plan_of(num_seeds=2)
    rows = squares(plan, finished(plan.cells[0], 2, exact=0.5, psnr_db=21.0))
    assert rows[0][0].findtext("small") == "1/2 ✓ · 21.0 dB"
    assert "1 more for each, not shown" in grid(plan, {}, {}, {})


def test_each_guidance_has_its_own_converged_column_in_its_rows() -> None:
    plan = SweepPlan(
        samplers=("ddim",), steps=(4, 8), guidance=(1.0, 3.0), prompts=("a fox",), num_seeds=1, reference_steps=20
    )
    rows = squares(plan, *map(finished, plan.all_cells))
    images = [[square.find("a/img") for square in row] for row in rows]
    names = [["" if image is None else image.get("alt") for image in row] for row in images]
    assert names == [
        ["ddim, 4 steps, guidance 1", "ddim, 8 steps, guidance 1", "ddim, 20 steps, guidance 1", ""],
        ["ddim, 4 steps, guidance 3", "ddim, 8 steps, guidance 3", "", "ddim, 20 steps, guidance 3"],
    ]
    markup = grid(plan, {}, {}, {})
    assert "<small>DDIM 20, guidance 1</small>" in markup
    assert "<small>DDIM 20, guidance 3</small>" in markup


def test_any_field_can_be_the_columns_and_rows() -> None:
    plan = SweepPlan(
        samplers=("ddpm", "ddim"), steps=(4, 8), guidance=(1.0, 3.0), prompts=("a fox",), num_seeds=1,
        reference_steps=20, axes={"eta": (0.0, 0.5, 1.0)},
    )  # fmt: skip

    def arranged(columns: str, rows: str) -> tuple[list[str], list[str], list[list[str]]]:
        looks = {cell: Path("/a.png") for cell in plan.all_cells}
        cells = {cell: finished(cell) for cell in plan.all_cells}
        markup = grid(plan, cells, looks, {"ddim": "DDIM"}, Arrangement(columns, rows)).replace("&nbsp;", " ")
        table = ElementTree.fromstring(_closed(markup))
        heads = [head.text or "" for head in table.findall(".//thead/tr/th")]
        body = table.findall(".//tbody/tr")
        images = [[image.get("alt") or "" for image in row.findall("td/a/img")] for row in body]
        return heads, [row.findtext("th") or "" for row in body], images

    heads, rows, images = arranged("eta", "guidance_scale")
    assert heads == ["eta", "0", "0.5", "1", "converged", "converged"]
    assert rows[:4] == [
        "ddpm, 4 steps, guidance 1", "ddpm, 4 steps, guidance 3",
        "DDIM, 4 steps, guidance 1", "DDIM, 4 steps, guidance 3",
    ]  # fmt: skip
    compared = [f"DDIM, 4 steps, guidance 3, eta {eta}" for eta in ("0", "0.5", "1")]
    assert images[3] == [*compared, "DDIM, 20 steps, guidance 3"]
    heads, rows, _ = arranged("sampler", "eta")
    assert heads[:3] == ["sampler", "ddpm", "DDIM"]
    assert rows[:3] == [f"4 steps, guidance 1, eta {eta}" for eta in ("0", "0.5", "1")]
    assert len(rows) == 12
    heads, rows, _ = arranged("clip_skip", "eta")  # not compared here
    assert heads[:3] == ["steps", "4", "8"]
    assert rows[:3] == [f"ddpm, guidance 1, eta {eta}" for eta in ("0", "0.5", "1")]


def test_a_learned_sampler_is_one_cell_at_its_own_steps() -> None:
    plan = SweepPlan(
        samplers=("ddim", "learned:tiny-5"), steps=(4, 8), guidance=(3.0,), prompts=("a fox",), num_seeds=1,
        reference_steps=20, learned={"learned:tiny-5": 5},
    )  # fmt: skip
    rows = squares(plan, *map(finished, plan.all_cells))
    has_image = [[square.find("a/img") is not None for square in row] for row in rows]
    assert has_image == [[True, False, True, True], [False, True, False, True]], "columns 4, 5, 8 and converged"


def test_prompts_and_names_are_escaped() -> None:
    markup = grid(plan_of(prompt=BAD), {}, {}, {"ddim": BAD})
    assert "<img" not in markup
    assert "onerror=alert(1)&gt;" in markup


def test_findings_are_claims_with_verdict_and_evidence() -> None:
    finding = {"claim": f"a {BAD}", "verdict": "as expected", "evidence": ["ddim 4: 20.0 dB.", "One pair."]}
    (details,) = ElementTree.fromstring(findings_list([finding])).findall("details")
    summary = details.find("summary")
    assert summary is not None
    assert "".join(summary.itertext()) == f"a {BAD}: as expected"
    assert details.findtext("p") == "ddim 4: 20.0 dB. One pair."
    assert findings_list([]) == ""

"""The experiment's grid as HTML: an image in every cell and escaped texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diffserve.experiments.plan import PlannedImage, SweepPlan
from diffserve.experiments.records import PreviewImage, RefusedImage, RowsDone
from tests.ui.painted import paint
from ui.experiment.board import Board
from ui.experiment.view import grid

BAD = "<img src=x onerror=alert(1)>\"'&"
MakeBoard = Callable[..., Board]


@pytest.fixture
def board_of(tmp_path: Path) -> MakeBoard:
    def make(prompt: str = "a fox", num_seeds: int = 1) -> Board:
        plan = SweepPlan(
            samplers=("ddpm", "ddim"), steps=(4, 8), guidance=(3.0,), prompts=(prompt,), num_seeds=num_seeds,
            reference_steps=20,
        )  # fmt: skip
        return Board(plan, tmp_path)

    return make


def squares(board: Board) -> list[list[ElementTree.Element]]:
    markup = grid(board, {}).replace("&nbsp;", " ")
    rows = ElementTree.fromstring(_closed(markup)).findall(".//tbody/tr")
    return [row.findall("td") for row in rows]


def _closed(markup: str) -> str:
    """Close the image tags, as XML requires."""
    parts = markup.split("<img ")
    return parts[0] + "".join(f"<img {part.replace('>', '/>', 1)}" for part in parts[1:])


def test_samplers_are_rows_and_steps_are_columns(board_of: MakeBoard) -> None:
    board = board_of()
    cell = next(candidate for candidate in board.plan.cells if (candidate.sampler, candidate.num_steps) == ("ddim", 8))
    paint(board, PlannedImage(cell, 0, 0), is_exact=True)
    rows = squares(board)
    assert [len(row) for row in rows] == [3, 3], "two steps and the converged picture"
    painted = [[square.find(".//img") is not None for square in row] for row in rows]
    assert painted == [[False, False, False], [False, True, False]]
    image = rows[1][1].find("a/img")
    assert image is not None
    assert (image.get("src") or "").endswith("ddim-8-g3-p1-s1-picture.png")
    assert image.get("alt") == "ddim, 8 steps"
    assert (rows[1][1].findtext("small") or "").strip() == "✓"


def test_a_preview_is_marked_and_has_no_link(board_of: MakeBoard) -> None:
    board = board_of()
    cell = board.plan.cells[0]
    image = PlannedImage(cell, 0, 0)
    board.handle(PreviewImage(image, b"", 0))
    board.handle(RowsDone({image: cell.rows / 4}))
    square = squares(board)[0][0]
    preview, bar = square.find("img"), square.find(".//i")
    assert preview is not None
    assert bar is not None
    assert (preview.get("class"), bar.get("style")) == ("preview", "width:25%")


def test_several_images_are_summarized_in_their_cell(board_of: MakeBoard) -> None:
    board = board_of(num_seeds=2)
    cell = board.plan.cells[0]
    for seed, hit in enumerate((True, False)):
        paint(board, PlannedImage(cell, 0, seed), is_exact=hit, psnr_db=20.0 + 2 * seed)
    assert squares(board)[0][0].findtext("small") == "1/2 ✓ · 21.0 dB"
    assert "1 more for each, not shown" in grid(board, {})


def test_a_refused_cell_shows_the_reason(board_of: MakeBoard) -> None:
    board = board_of()
    board.handle(RefusedImage(PlannedImage(board.plan.cells[0], 0, 0), f"no {BAD}"))
    square = squares(board)[0][0]
    assert (square.get("class"), square.get("title")) == ("trouble", f"no {BAD}")


def test_prompts_and_names_are_escaped(board_of: MakeBoard) -> None:
    board = board_of(prompt=BAD)
    markup = grid(board, {"ddim": BAD})
    assert "<img" not in markup
    assert "onerror=alert(1)&gt;" in markup

"""The board of an experiment: finished images and the summary of each cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell, PlannedImage, SweepPlan
from diffserve.experiments.records import PreviewImage, RefusedImage, RowsDone
from diffserve.media.images import decode_image
from tests.ui.painted import COLOR, paint
from ui.experiment.board import Board
from ui.experiment.speed import Timing
from ui.experiment.view import sheet_of, table_of

GUESS = Timing(row_s=0.01, rest_s=0.1)
MakeBoard = Callable[..., Board]


@pytest.fixture
def board_of(tmp_path: Path) -> MakeBoard:
    def make(num_prompts: int = 1, num_seeds: int = 1, *, has_converged: bool = True) -> Board:
        prompts = tuple(f"{number} apples" for number in range(num_prompts))
        plan = SweepPlan(
            samplers=("ddpm", "ddim"), steps=(4, 8), guidance=(3.0,), prompts=prompts, num_seeds=num_seeds,
            reference_steps=20 if has_converged else None,
        )  # fmt: skip
        return Board(plan, tmp_path)

    return make


def paint_all(board: Board, *, is_exact: bool | None = None) -> None:
    for image in board.plan.images():
        paint(board, image, is_exact=is_exact, psnr_db=None if image.cell.is_reference else image.cell.num_steps)


def refuse(board: Board, cell: Cell) -> None:
    board.handle(RefusedImage(PlannedImage(cell, 0, 0), "no"))


def test_a_cell_shows_its_preview_until_its_image_is_finished(board_of: MakeBoard) -> None:
    board = board_of(num_seeds=2)
    cell = board.plan.cells[0]
    square = board.squares[cell]
    board.handle(PreviewImage(PlannedImage(cell, 0, 0), b"early", 0))
    assert square.look is not None
    assert (square.look.read_bytes(), square.is_shown_whole) == (b"early", False)
    paint(board, PlannedImage(cell, 0, 1))
    assert square.look.read_bytes() == b"early", "the second seed is not shown"
    paint(board, PlannedImage(cell, 0, 0))
    assert (square.look, square.is_shown_whole) == (board.file_of(cell, (0, 0)), True)


def test_every_change_is_notified(board_of: MakeBoard) -> None:
    board = board_of()
    image = next(board.plan.images())
    changes: list[Callable[[], None]] = [
        lambda: board.handle(RowsDone({image: 3.0})),
        lambda: board.handle(PreviewImage(image, b"", 0)),
        lambda: paint(board, image),
        lambda: board.set_timing(GUESS),
        lambda: refuse(board, image.cell),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        assert board.version == number


def test_finished_rows_include_the_share_of_unfinished_images(board_of: MakeBoard) -> None:
    board = board_of(has_converged=False)
    few, many = Cell("ddpm", 4, 3.0), Cell("ddim", 8, 3.0)
    for _ in range(2):
        board.handle(RowsDone({PlannedImage(few, 0, 0): 2.0}))
    paint(board, PlannedImage(many, 0, 0))
    assert board.rows_done == 4 + 16
    refuse(board, few)
    assert board.rows_done == 8 + 16, "nothing more will be done for a refused cell"


def test_only_images_that_every_started_cell_has_are_compared(board_of: MakeBoard) -> None:
    board = board_of(num_seeds=3)
    first, second, *_ = board.plan.cells
    for seed in (0, 1, 2):
        paint(board, PlannedImage(first, 0, seed), is_exact=seed == 0)
    assert [seed for _, seed in board.fair_places] == [0, 1, 2]
    paint(board, PlannedImage(second, 0, 0), is_exact=False)
    assert [seed for _, seed in board.fair_places] == [0]
    rows = {summary.cell: summary for summary in board.summaries(GUESS)}
    assert set(rows) == {first, second}
    exact = rows[first].value(Measure.EXACT)
    assert exact is not None
    assert (exact.value, rows[first].num_images) == (1.0, 1), "the two others are not paired"


def test_a_missing_converged_image_excludes_only_its_own_comparison(board_of: MakeBoard) -> None:
    board = board_of(num_seeds=3)
    for image in board.plan.images():
        is_lost, is_reference = image.seed_index == 1, image.cell.is_reference
        if not (is_reference and is_lost):
            paint(board, image, psnr_db=None if is_reference or is_lost else 20.0 + image.seed_index)
    assert [seed for _, seed in board.fair_places] == [0, 2]
    *rows, reference = board.summaries(GUESS)
    assert reference.cell.is_reference
    assert [near.value for summary in rows if (near := summary.value(Measure.PSNR_DB))] == [21.0] * len(
        board.plan.cells
    )


def test_a_failed_cell_does_not_narrow_the_comparison(board_of: MakeBoard) -> None:
    board = board_of(num_seeds=3, has_converged=False)
    lost_cell, *remaining = board.plan.cells
    paint(board, PlannedImage(lost_cell, 0, 2))
    refuse(board, lost_cell)
    assert [seed for _, seed in board.fair_places] == [2], "it is all that there is"
    for cell in remaining:
        for seed in (0, 1, 2):
            paint(board, PlannedImage(cell, 0, seed))
    assert [seed for _, seed in board.fair_places] == [0, 1, 2]
    assert {summary.cell for summary in board.summaries(GUESS)} == set(remaining)


def test_seconds_are_evaluations_times_an_estimated_or_measured_time(board_of: MakeBoard) -> None:
    board = board_of()
    paint_all(board)
    (guessed, *_) = board.summaries(GUESS)
    assert guessed.alone_s == pytest.approx(8 * 0.01 + 0.1)
    board.set_timing(Timing(row_s=0.02, rest_s=0.2))
    (measured, *_) = board.summaries(GUESS)
    assert measured.alone_s == pytest.approx(8 * 0.02 + 0.2)
    assert measured.step_ms.value == pytest.approx(1000 * 0.02 * 8 / 4)


def test_only_many_prompts_have_a_confidence_interval(board_of: MakeBoard) -> None:
    def exact(num_prompts: int, num_seeds: int) -> tuple[float | None, float | None]:
        board = board_of(num_prompts, num_seeds)
        paint_all(board, is_exact=True)
        exact = board.summaries(GUESS)[0].value(Measure.EXACT)
        assert exact is not None
        assert exact.value == 1.0
        return exact.low, exact.high

    assert exact(1, 1) == exact(2, 4) == (None, None)
    assert exact(6, 1) == (0.5, 1.0), "the rule of three"
    assert exact(1, 6) == (0.5, 1.0), "the seeds of an only prompt"


def test_a_measure_missing_for_an_image_is_missing_for_its_cell(board_of: MakeBoard) -> None:
    board = board_of(num_seeds=2)
    first, second, *_ = board.plan.cells
    for cell in (first, second):
        paint(board, PlannedImage(cell, 0, 0), is_exact=True, psnr_db=30.0 if cell == first else None)
        paint(board, PlannedImage(cell, 0, 1), is_exact=None)
    assert [(summary.num_images, summary.measures) for summary in board.summaries(GUESS)] == [(2, {}), (2, {})]


def test_the_table_has_a_row_for_each_cell_and_the_source_of_its_seconds(board_of: MakeBoard) -> None:
    board = board_of()
    paint_all(board, is_exact=True)
    rows = list(csv.DictReader(io.StringIO(table_of(board.summaries(GUESS)))))
    assert [(row["sampler"], row["steps"]) for row in rows] == [
        ("ddpm", "4"), ("ddim", "4"), ("ddpm", "8"), ("ddim", "8"),
    ]  # fmt: skip
    assert [row["psnr_db"] for row in rows] == ["4", "4", "8", "8"]
    assert {row["seconds_are"] for row in rows} == {"evaluations times the measured time of a single one"}
    assert not {"engine_seconds", "images_per_s"} & set(rows[0]), "a client cannot know them"
    assert rows[0]["ms_per_step_alone_low"] == ""


@pytest.mark.slow
def test_the_overview_image_has_the_grid_and_the_curves(board_of: MakeBoard) -> None:
    board = board_of()
    paint_all(board, is_exact=True)
    sheet = decode_image(sheet_of(board.summaries(GUESS), board))
    assert (sheet.array == COLOR).all(axis=-1).any(), "the pictures themselves"
    unmeasured = board_of(has_converged=False)
    for image in unmeasured.plan.images():
        paint(unmeasured, image)
    grid_alone = decode_image(sheet_of(unmeasured.summaries(GUESS), unmeasured))
    assert sheet.height_px > 2 * grid_alone.height_px, "two rows of curves below the grid"

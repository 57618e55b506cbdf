"""What is painted of an experiment so far, and what it says of each cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell, Job, SweepPlan
from diffserve.images import decode_image
from ui.experiment import export
from ui.experiment.board import Board, Painted
from ui.experiment.pace import Timing
from ui.experiment.plan import GridPlan

GUESS = Timing(row_s=0.01, rest_s=0.1)


def board_of(num_prompts: int = 1, num_seeds: int = 1, *, has_converged: bool = True) -> Board:
    prompts = tuple(f"{number} apples" for number in range(num_prompts))
    sweep = SweepPlan(
        samplers=("ddpm", "ddim"), steps=(4, 8), guidance=(3.0,), prompts=prompts, num_seeds=num_seeds,
        reference_steps=20,
    )  # fmt: skip
    return Board(GridPlan(sweep, has_converged))


def painted(is_exact: bool | None = None, file: Path = Path("x.png")) -> Painted:
    return Painted(file, evaluations=8, spacing="trailing", is_exact=is_exact)


def paint_all(board: Board, *, is_exact: bool | None = None, file: Path = Path("x.png")) -> None:
    for job in board.plan.jobs():
        board.paint(job, painted(is_exact, file))
        if not job.cell.is_reference:
            board.measure(job.cell, job.place, float(job.cell.num_steps))


def test_a_square_shows_its_preview_until_its_picture_is_there() -> None:
    board = board_of(num_seeds=2)
    cell = board.plan.cells[0]
    board.look(Job(cell, 0, 0), Path("preview.png"))
    assert (board.squares[cell].look, board.squares[cell].is_shown_whole) == (Path("preview.png"), False)
    board.paint(Job(cell, 0, 1), painted(file=Path("other.png")))
    assert board.squares[cell].look == Path("preview.png"), "the second seed is not shown"
    board.paint(Job(cell, 0, 0), painted(file=Path("picture.png")))
    assert (board.squares[cell].look, board.squares[cell].is_shown_whole) == (Path("picture.png"), True)


def test_every_change_is_news() -> None:
    board = board_of()
    job = next(board.plan.jobs())
    changes: list[Callable[[], None]] = [
        lambda: board.progress(job, 0.5),
        lambda: board.look(job, Path("a")),
        lambda: board.paint(job, painted()),
        lambda: board.measure(job.cell, job.place, 20.0),
        lambda: board.time(GUESS),
        lambda: board.refuse(job.cell, "no"),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        assert board.version == number


def test_rows_that_are_done_count_unfinished_pictures_by_their_share() -> None:
    board = board_of(has_converged=False)
    few, many = Cell("ddpm", 4, 3.0), Cell("ddim", 8, 3.0)
    board.progress(Job(few, 0, 0), 0.5)
    board.paint(Job(many, 0, 0), painted())
    assert board.rows_done == 0.5 * 8 + 16
    board.refuse(few, "no")
    assert board.rows_done == 8 + 16, "nothing more will be done for a refused cell"


def test_only_places_that_every_begun_cell_has_are_compared() -> None:
    board = board_of(num_seeds=3)
    first, second, *_ = board.plan.cells
    for seed in (0, 1, 2):
        board.paint(Job(first, 0, seed), painted(is_exact=seed == 0))
    assert [seed for _, seed in board.fair_places] == [0, 1, 2]
    board.paint(Job(second, 0, 0), painted(is_exact=False))
    assert [seed for _, seed in board.fair_places] == [0]
    rows = {one.cell: one for one in board.summaries(GUESS)}
    assert set(rows) == {first, second}
    exact = rows[first].value(Measure.EXACT)
    assert exact is not None
    assert (exact.value, rows[first].num_images) == (1.0, 1), "the two others are not paired"


def test_a_converged_picture_that_is_missing_costs_its_own_place_alone() -> None:
    board = board_of(num_seeds=3)
    for job in board.plan.jobs():
        is_lost = job.seed_index == 1
        if not (job.cell.is_reference and is_lost):
            board.paint(job, painted())
        if not (job.cell.is_reference or is_lost):
            board.measure(job.cell, job.place, 20.0 + job.seed_index)
    assert [seed for _, seed in board.fair_places] == [0, 2]
    *rows, reference = board.summaries(GUESS)
    assert reference.cell.is_reference
    assert [near.value for one in rows if (near := one.value(Measure.PSNR_DB))] == [21.0] * len(board.plan.cells)


def test_a_cell_that_was_given_up_narrows_no_other() -> None:
    board = board_of(num_seeds=3, has_converged=False)
    lost, *others = board.plan.cells
    board.paint(Job(lost, 0, 2), painted())
    board.refuse(lost, "no")
    assert [seed for _, seed in board.fair_places] == [2], "it is all that there is"
    for cell in others:
        for seed in (0, 1, 2):
            board.paint(Job(cell, 0, seed), painted())
    assert [seed for _, seed in board.fair_places] == [0, 1, 2]
    assert {one.cell for one in board.summaries(GUESS)} == set(others)


def test_seconds_are_evaluations_times_a_time_that_is_a_guess_until_it_is_measured() -> None:
    board = board_of()
    paint_all(board)
    (guessed, *_) = board.summaries(GUESS)
    assert guessed.alone_s == pytest.approx(8 * 0.01 + 0.1)
    board.time(Timing(row_s=0.02, rest_s=0.2))
    (measured, *_) = board.summaries(GUESS)
    assert measured.alone_s == pytest.approx(8 * 0.02 + 0.2)
    assert measured.step_ms.value == pytest.approx(1000 * 0.02 * 8 / 4)


def test_few_prompts_have_no_interval_and_many_have() -> None:
    def exact(num_prompts: int, num_seeds: int) -> tuple[float | None, float | None]:
        board = board_of(num_prompts, num_seeds)
        paint_all(board, is_exact=True)
        found = board.summaries(GUESS)[0].value(Measure.EXACT)
        assert found is not None
        assert found.value == 1.0
        return found.low, found.high

    assert exact(1, 1) == exact(2, 4) == (None, None)
    assert exact(6, 1) == (0.5, 1.0), "the rule of three"
    assert exact(1, 6) == (0.5, 1.0), "the seeds of an only prompt"


def test_a_measure_that_a_picture_lacks_is_no_measure_of_its_cell() -> None:
    board = board_of(num_seeds=2)
    first, second, *_ = board.plan.cells
    for cell in (first, second):
        board.paint(Job(cell, 0, 0), painted(is_exact=True))
        board.paint(Job(cell, 0, 1), painted(is_exact=None))
    board.measure(first, (0, 0), 30.0)
    assert [(one.num_images, one.measures) for one in board.summaries(GUESS)] == [(2, {}), (2, {})]


def test_the_table_holds_a_line_for_each_square_and_says_where_seconds_come_from() -> None:
    board = board_of()
    paint_all(board, is_exact=True)
    rows = list(csv.DictReader(io.StringIO(export.table(board.summaries(GUESS)))))
    assert [(row["sampler"], row["steps"]) for row in rows] == [
        ("ddpm", "4"), ("ddim", "4"), ("ddpm", "8"), ("ddim", "8"),
    ]  # fmt: skip
    assert [row["psnr_db"] for row in rows] == ["4", "4", "8", "8"]
    assert {row["seconds_are"] for row in rows} == {"evaluations times the measured time of one alone"}
    assert "engine_seconds" not in rows[0], "a client cannot know it"


@pytest.mark.slow
def test_the_picture_holds_grid_and_curves(tmp_path: Path) -> None:
    board = board_of()
    file = tmp_path / "x.png"
    Image.fromarray(np.full((40, 40, 3), (250, 0, 200), np.uint8)).save(file)
    paint_all(board, is_exact=True, file=file)
    sheet = decode_image(export.picture(board.summaries(GUESS), board))
    assert (sheet.array == (250, 0, 200)).all(axis=-1).any(), "the pictures themselves"
    unmeasured = board_of(has_converged=False)
    for job in unmeasured.plan.jobs():
        unmeasured.paint(job, painted(file=file))
    grid_alone = decode_image(export.picture(unmeasured.summaries(GUESS), unmeasured))
    assert sheet.height_px > 2 * grid_alone.height_px, "two rows of curves below the grid"

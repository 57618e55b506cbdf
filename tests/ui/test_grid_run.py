"""An experiment run through the client on a real server."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from diffserve.client import AsyncClient, ServerUnreachable
from diffserve.experiments import measure
from diffserve.experiments.estimates import Measure
from diffserve.experiments.measure import PromptCheck
from diffserve.experiments.metrics.fidelity import BEST_PSNR_DB, psnr_db
from diffserve.experiments.plan import SweepPlan
from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from tests.service.server import SOON_S, RunningServer
from ui.experiment.run import GridRun
from ui.experiment.speed import SpeedProbe

pytestmark = pytest.mark.slow
PROMPTS = ("a red fox", "a castle")


def plan_of(*, steps: tuple[int, ...] = (2, 6), num_seeds: int = 1, reference_steps: int | None = 6) -> SweepPlan:
    return SweepPlan(
        samplers=("ddim", "euler"), steps=steps, guidance=(3.0,), prompts=PROMPTS, num_seeds=num_seeds, first_seed=5,
        reference_steps=reference_steps,
    )  # fmt: skip


def run_of(client: AsyncClient, plan: SweepPlan, folder: Path) -> GridRun:
    return GridRun(client, plan, PromptCheck("sd15", plan.prompts), folder)


async def finish(run: GridRun) -> None:
    async with aclosing(run.watch()) as moments:
        async for _ in moments:
            pass


def test_every_cell_is_generated_and_measured_and_single_images_are_timed(
    server: RunningServer, tmp_path: Path
) -> None:
    async def paint() -> GridRun:
        async with AsyncClient(server.url) as client:
            speed = await SpeedProbe().speed(client)
            assert min(*speed.alone, speed.together.row_s) > 0
            run = run_of(client, plan_of(num_seeds=2), tmp_path)
            await finish(run)
            assert run.error is None
            *cells, reference = run.board.summaries(speed.alone)
            assert reference.cell.is_reference
            rows = {(cell.cell.sampler, cell.cell.num_steps): cell for cell in cells}
            assert rows["euler", 6].evaluations == 12
            assert rows["euler", 6].alone_s > rows["euler", 2].alone_s > 0
            same, worse = rows["ddim", 6].value(Measure.PSNR_DB), rows["ddim", 2].value(Measure.PSNR_DB)
            assert same is not None
            assert worse is not None
            assert same.value == BEST_PSNR_DB, "DDIM in as many steps is the converged picture itself"
            assert worse.value < BEST_PSNR_DB
            return run

    board = asyncio.run(paint()).board
    assert board.num_painted == 4 * (4 + 1)
    assert board.rows_done == board.plan.num_painted_rows
    assert board.timing is not None
    server.wait_until_idle()


def test_images_are_paired_and_stored_unchanged(server: RunningServer, tmp_path: Path) -> None:
    async def paint() -> GridRun:
        async with AsyncClient(server.url) as client:
            run = run_of(client, plan_of(reference_steps=None, num_seeds=2), tmp_path)
            await finish(run)
            return run

    run = asyncio.run(paint())
    states: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for cell, square in run.board.squares.items():
        for place in square.records:
            text = read_infotext(run.board.file_of(cell, place).read_bytes())
            assert text is not None
            read = parse_infotext(text)
            assert int(read.fields["Steps"]) == cell.num_steps
            states.setdefault(place, set()).add((read.prompt, read.fields["Seed"]))
    assert states == {
        (0, 0): {(PROMPTS[0], "5")}, (0, 1): {(PROMPTS[0], "6")},
        (1, 0): {(PROMPTS[1], "7")}, (1, 1): {(PROMPTS[1], "8")},
    }  # fmt: skip
    run.board.tidy()
    assert {file.name for file in tmp_path.iterdir()} == {
        square.look.name for square in run.board.squares.values() if square.look is not None
    }


def test_stop_retains_finished_images_and_frees_the_slots(server: RunningServer, tmp_path: Path) -> None:
    async def paint() -> GridRun:
        async with AsyncClient(server.url) as client:
            run = run_of(client, plan_of(steps=(2, 900), reference_steps=900), tmp_path)
            async with aclosing(run.watch()) as moments:
                async for _ in moments:
                    if run.board.num_painted >= 2:
                        run.stop()
            return run

    run = asyncio.run(paint())
    server.wait_until_idle()
    assert (run.is_stopped, run.error) == (True, None)
    assert 2 <= run.board.num_painted < run.plan.num_images
    squares = run.board.squares.values()
    assert all(run.board.file_of(square.cell, place).is_file() for square in squares for place in square.records)


def test_stop_while_measuring_loses_no_measure(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_comparing, go_on = threading.Event(), threading.Event()

    def compare_slowly(image: Any, converged: Any) -> float:
        is_comparing.set()
        go_on.wait(SOON_S)
        return psnr_db(image, converged)

    monkeypatch.setattr(measure, "psnr_db", compare_slowly)

    async def paint() -> GridRun:
        async with AsyncClient(server.url) as client:
            run = run_of(client, plan_of(), tmp_path)
            async with aclosing(run.watch()) as moments:
                async for _ in moments:
                    if is_comparing.is_set() and not run.is_stopped:
                        run.stop()
                        asyncio.get_running_loop().call_later(0.5, go_on.set)
            return run

    run = asyncio.run(paint())
    assert run.is_stopped
    converged = set(run.board.squares[run.plan.references[0]].records)
    squares = [run.board.squares[cell] for cell in run.plan.cells]
    assert any(square.measured_places for square in squares)
    assert all(square.measured_places == set(square.records) & converged for square in squares)


def test_a_disconnect_midway_frees_the_slots(server: RunningServer, tmp_path: Path) -> None:
    async def paint() -> None:
        async with AsyncClient(server.url) as client:
            run = run_of(client, plan_of(steps=(900,), reference_steps=900), tmp_path)
            moments = run.watch()
            async for _ in moments:
                if server.num_requests():
                    await moments.aclose()
            assert not run.is_timing, "nobody waits for that any more"

    asyncio.run(paint())
    server.wait_until_idle()


def test_an_experiment_stopped_before_its_start_generates_nothing(server: RunningServer, tmp_path: Path) -> None:
    async def paint() -> GridRun:
        async with AsyncClient(server.url) as client:
            run = run_of(client, plan_of(), tmp_path)
            run.stop()
            await finish(run)
            return run

    assert asyncio.run(paint()).board.num_painted == 0


def test_a_refused_cell_does_not_affect_others(server: RunningServer, tmp_path: Path) -> None:
    async def paint() -> GridRun:
        async with AsyncClient(server.url) as client:
            run = run_of(client, plan_of(steps=(2, 5000), reference_steps=None), tmp_path)
            await finish(run)
            return run

    run = asyncio.run(paint())
    troubles = {cell.num_steps: square.trouble for cell, square in run.board.squares.items()}
    assert run.error is None
    assert troubles[2] is None
    assert "1000" in (troubles[5000] or "")
    assert run.board.num_painted == 4


def test_an_unreachable_server_is_reported(tmp_path: Path) -> None:
    async def paint() -> GridRun:
        async with AsyncClient("http://127.0.0.1:9") as client:
            run = run_of(client, plan_of(), tmp_path)
            await finish(run)
            return run

    run = asyncio.run(paint())
    assert isinstance(run.error, ServerUnreachable)
    assert run.board.num_painted == 0

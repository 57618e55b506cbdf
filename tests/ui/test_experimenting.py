"""Answers of the Experiment tab to a form, with a server that is available or not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.errors import EngineUnavailable
from diffserve.client import ImageCapabilities, SamplerChoice
from diffserve.experiments.measure import PromptCheck
from diffserve.experiments.plan import SweepPlan
from tests.browser.cable import Cable, cable_to
from tests.service.server import RunningServer
from tests.ui.gradio_request import Request
from tests.ui.painted import paint
from ui.captions import EARLY
from ui.experiment import view
from ui.experiment.handlers import NOT_YET, ExperimentHandlers
from ui.experiment.run import GridRun
from ui.experiment.speed import ServerSpeed, Timing
from ui.experiment.view import Shown, View, names_of, work_text
from ui.server import Server

pytestmark = pytest.mark.slow
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def here(server: RunningServer) -> Iterator[Server]:
    """Return the page's client of the shared server."""
    page_server = Server(server.url)
    yield page_server
    page_server.files.remove()


def form(**fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "samplers": ["ddim"], "steps": "2, 4", "prompts": "a red fox", "num_seeds": 1, "first_seed": 0,
        "guidance": None, "has_converged": False, "model": None,
    }  # fmt: skip
    return values | fields


async def run(events: ExperimentHandlers, **fields: Any) -> list[Shown]:
    return [shown async for shown in events.run(**form(**fields), request=Request())]  # type: ignore[arg-type]


def test_an_experiment_ends_with_curves_and_files(here: Server) -> None:
    async def paint() -> tuple[str, list[Shown]]:
        events = ExperimentHandlers(here)
        estimate = await events.estimate(**form(has_converged=True))
        shown = await run(events, has_converged=True)
        await here.client.close()
        return estimate, shown

    estimate, shown = asyncio.run(paint())
    assert "2 combinations of sampler and steps, 1 image each, and 1 converged one: about" in estimate
    assert "only images of the embedded model" in estimate
    last = shown[-1]
    assert "Generated 3 images" in last.status
    assert last.grid.count("<img") == 3
    assert "PSNR" in last.curves_over_steps
    assert "UNet evaluations times" in last.curves_over_seconds
    assert last.csv["value"].read_text(encoding="utf-8").count("\n") == 3
    assert last.png["value"].read_bytes().startswith(b"\x89PNG")


def test_stop_affects_only_its_own_page(here: Server, server: RunningServer) -> None:
    class Other(Request):
        session_hash = "somebody else"

    async def paint() -> list[Shown]:
        events, shown = ExperimentHandlers(here), []
        async for update in events.run(**form(steps="2, 900"), request=Request()):  # type: ignore[arg-type]
            await events.stop(Other())  # type: ignore[arg-type]
            shown.append(update)
            if "<img" in str(update.grid):
                await events.stop(Request())  # type: ignore[arg-type]
        await here.client.close()
        return shown

    shown = asyncio.run(paint())
    server.wait_until_idle()
    assert "Stopped" in shown[-1].status
    assert sum("Stopped" in str(update.status) for update in shown) == 1


def test_an_invalid_experiment_is_reported_in_its_tab(here: Server) -> None:
    async def ask() -> tuple[str, list[Shown]]:
        events = ExperimentHandlers(here)
        answers = await events.estimate(**form(samplers=["ddin"])), await run(events, steps="5000")
        await here.client.close()
        return answers

    estimate, shown = asyncio.run(ask())
    assert "ddin" in estimate
    assert "error" in estimate
    assert len(shown) == 1
    assert "1000 steps is the maximum" in shown[0].status


def test_an_unreachable_server_is_a_message_with_the_fix() -> None:
    async def ask() -> tuple[str, list[Shown]]:
        server = Server(NOBODY)
        events = ExperimentHandlers(server)
        answers = await events.estimate(**form()), await run(events)
        server.files.remove()
        return answers

    estimate, shown = asyncio.run(ask())
    assert "diffserve serve" in estimate
    assert "diffserve serve" in shown[-1].status


def test_a_server_lost_midway_is_one_message_and_finished_images_stay(server: RunningServer) -> None:
    async def paint(cable: Cable) -> tuple[list[Shown], str]:
        page_server, shown = Server(cable.url), []
        events = ExperimentHandlers(page_server)
        try:
            async for update in events.run(**form(steps="2, 900"), request=Request()):  # type: ignore[arg-type]
                shown.append(update)
                if re.search(r"image 1 of 2\b", update.status):
                    await asyncio.to_thread(cable.pull_out)
            return shown, shown[-1].csv["value"].read_text(encoding="utf-8")
        finally:
            await page_server.close()

    with cable_to(server.port) as cable:
        shown, table = asyncio.run(paint(cable))
    *before, last = shown
    assert 'role="alert"' not in "".join(update.status for update in before)
    assert last.status.count("<p>") == last.status.count('role="alert"') == 1
    assert "ended before the answer did" in last.status
    assert "1 of 2 images are done and kept" in last.status
    assert re.findall(r'<img src="[^"]+" alt="([^"]+)"', last.grid) == ["DDIM, 2 steps"]
    assert table.count("\n") == 2, "the names of the columns, and one square"
    assert (last.run["visible"], last.run["interactive"], last.stop["visible"]) == (True, True, "hidden")


def test_missing_curves_are_not_a_failure_before_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(view, "CURVES_EVERY_S", 0.0)
    plan = SweepPlan(samplers=("ddim",), steps=(2, 4), guidance=(1.0,), prompts=("a",), num_seeds=1)

    async def look() -> tuple[Shown | None, Shown]:
        server = Server(NOBODY)
        run = GridRun(server.client, plan, PromptCheck("sd15", plan.prompts), tmp_path)
        view = View(run, ServerSpeed(Timing(row_s=0.1, rest_s=0.1), Timing(row_s=0.1, rest_s=0.1)), {"ddim": "DDIM"})
        paint(run.board, next(plan.images_by_place()))
        both = await view.news(), await view.ending(server.files)
        await server.close()
        return both

    going, over = asyncio.run(look())
    assert going is not None
    assert "Curves appear once" in going.curves_over_steps
    assert "no data for a curve" in over.curves_over_steps


def test_an_estimate_waits_for_the_models_without_an_error_and_a_run_starts_with_them(
    monkeypatch: pytest.MonkeyPatch, here: Server
) -> None:
    async def ask() -> tuple[str, list[Shown]]:
        events, fetch = ExperimentHandlers(here), here.client.models

        async def not_yet() -> Any:
            monkeypatch.setattr(here.client, "models", fetch)
            raise EngineUnavailable("the engine is loading its model; please try again in a moment.")

        async def not_ready() -> bool:
            return False

        monkeypatch.setattr(here.client, "models", not_yet)
        estimate = await events.estimate(**form())
        monkeypatch.setattr(here.client, "models", not_yet)
        monkeypatch.setattr(here.client, "is_ready", not_ready)
        shown = await run(events, steps="2")
        await here.client.close()
        return estimate, shown

    estimate, shown = asyncio.run(ask())
    assert NOT_YET in estimate
    assert "error" not in estimate
    assert EARLY in shown[0].status
    assert "Generated 1 images" in shown[-1].status


def test_samplers_are_selected_by_their_labels() -> None:
    plan = SweepPlan(samplers=("DPM++ 2M Karras", "ddim"), steps=(2,), guidance=(1.0,), prompts=("a",), num_seeds=2)
    image = ImageCapabilities(
        family="sd15", digest="0", device="cpu", dtype="float32", sizes=((64, 64),), min_side_px=64, max_side_px=64,
        samplers=(SamplerChoice(name="dpmpp_2m", label="DPM++ 2M"), SamplerChoice(name="ddim", label="DDIM")),
        quality_steps={}, default_sampler="ddim", default_num_steps=2, default_guidance_scale=1.0,
        default_spacing="leading", train_timesteps=1000, max_images=1,
    )  # fmt: skip
    assert names_of(plan, image) == {"dpmpp_2m karras": "DPM++ 2M karras", "ddim": "DDIM"}
    assert work_text(plan) == "2 combinations of sampler and steps, 2 images each, and 2 converged ones"

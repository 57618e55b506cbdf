"""Answers of the Experiment tab to a form, with a server that is available or not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from diffserve.api.errors import EngineUnavailable, InvalidRequest
from diffserve.client import ImageCapabilities, PlannedExperiment, SamplerChoice
from diffserve.experiments.plan import SweepPlan
from tests.browser.cable import Cable, cable_to
from tests.service.server import RunningServer
from tests.ui.gradio_request import Request
from ui.captions import EARLY
from ui.experiment.handlers import NOT_YET, ExperimentForm, ExperimentHandlers, read_form
from ui.experiment.view import Shown, names_of, work_text
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
        "guidance": None, "reference_steps": 6, "model": None, "axis": "", "axis_values": "",
        "x": "num_inference_steps", "x_values": "", "y": "sampler", "y_values": "",
        "request": Request(),
    }  # fmt: skip
    return values | fields


async def run(events: ExperimentHandlers, **fields: Any) -> list[Shown]:
    return [shown async for shown in events.run(**form(**fields))]


def test_an_experiment_ends_with_curves_and_files_and_a_reloaded_page_finds_it_again(here: Server) -> None:
    async def paint() -> tuple[str, list[Shown], list[Shown]]:
        events = ExperimentHandlers(here)
        estimate = await events.estimate(**form())
        shown = await run(events)
        name = next(update.current for update in shown if isinstance(update.current, str))
        again = [update async for update in events.follow(name, None, None, Request())]  # type: ignore[arg-type]
        await here.client.close()
        return estimate, shown, again

    estimate, shown, again = asyncio.run(paint())
    assert "2 combinations of sampler and steps, 1 image each, and 1 converged one: about" in estimate
    assert "only images of the embedded model" in estimate
    for last in (shown[-1], again[-1]):
        assert "Generated 3 images" in last.status
        assert last.grid.count("<img") == 3
        assert "PSNR" in last.curves_over_steps
        assert "time of a row" in last.curves_over_seconds
        assert last.csv["value"].read_text(encoding="utf-8").count("\n") == 4
        assert last.png["value"].read_bytes().startswith(b"\x89PNG")
        assert "<html" in last.report["value"].read_text(encoding="utf-8")
        assert (last.run["visible"], last.run["interactive"], last.stop["visible"]) == (True, True, "hidden")


def test_stop_cancels_the_experiment_of_its_page(here: Server, server: RunningServer) -> None:
    async def paint() -> list[Shown]:
        events, shown, name = ExperimentHandlers(here), list[Shown](), ""
        async for update in events.run(**form(steps="2, 900")):
            shown.append(update)
            name = update.current if isinstance(update.current, str) else name
            if str(update.grid).count("<img") == 2:  # the converged image, and the cell compared with it
                await events.stop(name, Request())  # type: ignore[arg-type]
        await here.client.close()
        return shown

    shown = asyncio.run(paint())
    server.wait_until_idle()
    last = shown[-1]
    assert "Stopped" in last.status
    assert "DDIM, 900 steps" not in last.grid
    assert last.csv["value"].read_text(encoding="utf-8").count("\n") == 2, "the names of the columns, and one square"
    assert (last.png["visible"], last.report["visible"]) == (False, False)


def test_an_invalid_experiment_is_reported_in_its_tab(here: Server) -> None:
    async def ask() -> tuple[str, list[Shown]]:
        events = ExperimentHandlers(here)
        answers = await events.estimate(**form(samplers=["ddin"])), await run(events, steps="5000")
        no_steps = await events.estimate(**form(steps="0"))
        await here.client.close()
        assert "Number of steps is 0; ask for at least 1 step." in no_steps
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


def test_a_server_lost_midway_is_one_message_and_the_experiment_goes_on(server: RunningServer, here: Server) -> None:
    async def paint(cable: Cable) -> list[Shown]:
        page_server, shown, name = Server(cable.url), list[Shown](), ""
        events = ExperimentHandlers(page_server)
        try:
            async for update in events.run(**form(steps="2, 900")):
                shown.append(update)
                name = update.current if isinstance(update.current, str) else name
                if re.search(r"image [1-9] of 3\b", str(update.status)):
                    await asyncio.to_thread(cable.pull_out)
            assert (await here.client.experiment(name)).status in ("validating", "in_progress")
            await ExperimentHandlers(here).stop(name, Request())  # type: ignore[arg-type]
            return shown
        finally:
            await page_server.close()
            await here.client.close()

    with cable_to(server.port) as cable:
        *before, last = asyncio.run(paint(cable))
    server.wait_until_idle()
    assert 'role="alert"' not in "".join(str(update.status) for update in before)
    assert last.status.count("<p>") == last.status.count('role="alert"') == 1
    assert (last.run["visible"], last.run["interactive"], last.stop["visible"]) == (True, True, "hidden")


def test_an_estimate_waits_for_the_models_without_an_error_and_a_run_starts_with_them(
    monkeypatch: pytest.MonkeyPatch, here: Server
) -> None:
    async def ask() -> tuple[str, list[Shown]]:
        events = ExperimentHandlers(here)

        async def not_yet(**_: Any) -> Any:
            raise EngineUnavailable("the engine is loading its model; please try again in a moment.")

        async def not_ready() -> bool:
            return False

        with monkeypatch.context() as patched:
            patched.setattr(here.client, "plan_experiment", not_yet)
            estimate = await events.estimate(**form())
        monkeypatch.setattr(here.client, "is_ready", not_ready)
        shown = await run(events, steps="2")
        await here.client.close()
        return estimate, shown

    estimate, shown = asyncio.run(ask())
    assert NOT_YET in estimate
    assert "error" not in estimate
    assert EARLY in shown[0].status
    assert "Generated 2 images" in shown[-1].status


def test_samplers_are_selected_by_their_labels() -> None:
    plan = SweepPlan(
        samplers=("DPM++ 2M Karras", "ddim", "learned:tiny-5"), steps=(2,), guidance=(1.0,), prompts=("a",),
        num_seeds=2, learned={"learned:tiny-5": 5},
    )  # fmt: skip
    image = ImageCapabilities(
        family="sd15", digest="0", device="cpu", dtype="float32", sizes=((64, 64),), min_side_px=64, max_side_px=64,
        samplers=(SamplerChoice(name="dpmpp_2m", label="DPM++ 2M"), SamplerChoice(name="ddim", label="DDIM")),
        quality_steps={}, default_sampler="ddim", default_num_steps=2, default_guidance_scale=1.0,
        default_spacing="leading", train_timesteps=1000, max_images=1,
    )  # fmt: skip
    names = {"dpmpp_2m karras": "DPM++ 2M karras", "ddim": "DDIM", "learned:tiny-5": "learned:tiny-5"}
    assert names_of(plan, image) == names
    planned = PlannedExperiment(
        model="a", plan={"prompts": ["a"], "num_seeds": 2}, num_cells=len(plan.cells), num_images=plan.num_images
    )
    assert work_text(planned) == "3 combinations of sampler and steps, 2 images each, and 2 converged ones"
    planned = PlannedExperiment(
        model="a", plan={"prompts": ["a"], "num_seeds": 1, "guidance": [1, 3]}, num_cells=2, num_images=4
    )
    assert work_text(planned).startswith("2 combinations of sampler, steps and guidance, 1 image each")


def test_axes_need_values_and_differ() -> None:
    values = form(x="eta", x_values="0, 0.5", y="lora:ink", y_values="0, 1", axis="clip_skip", axis_values="1, 2")
    del values["request"]
    assert read_form(ExperimentForm(**values))["axes"] == {"eta": "0, 0.5", "lora:ink": "0, 1", "clip_skip": "1, 2"}
    for changes, message in (
        ({"x_values": " "}, "the axis Eta has no values"),
        ({"y": "eta"}, "X and Y are both Eta"),
        ({"axis": "eta"}, "the axis Eta is chosen twice"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            read_form(ExperimentForm(**values | changes))

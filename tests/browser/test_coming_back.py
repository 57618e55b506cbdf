"""The page keeps its state across reloads and server restarts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.cable import Cable, cable_to
from tests.browser.visit import Screenshot, Visit, Visitor
from tests.service.server import SOON_S, START_S, RunningServer, running_server, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_reload_restores_prompt_settings_gallery_and_the_running_job(
    visit: Visitor, page_server: RunningServer, screenshot: Screenshot
) -> None:
    here = visit()
    here.set_advanced(steps=4, seed=5, negative_prompt="night")
    here.choose("aspect", "Portrait")
    here.write("count", 2)
    here.write("prompt", "a crown")
    here.paint()
    expect(here.gallery()).to_have_count(2)
    here.write("count", 1)
    here.set_advanced(steps=1000)
    here.write("prompt", "a penguin")
    here.press("generate")
    here.until_painting()
    here.page.reload()
    here.expect_caption(r"step \d+ of 1000")
    expect(here.part("stop")).to_be_visible()
    page_server.wait_for_requests(1)
    expect(here.gallery()).to_have_count(2)
    expect(here.field("prompt")).to_have_value("a penguin")
    expect(here.part("aspect").locator("label.selected")).to_contain_text("Portrait")
    for name, value in {"steps": "1000", "seed": "5", "negative-prompt": "night"}.items():
        expect(here.field(name)).to_have_value(value)
    screenshot(here, "reloaded")

    there = Visit(here.page.context.new_page())
    there.open(page_server.url)
    expect(there.gallery()).to_have_count(0)
    expect(there.field("prompt")).to_have_value("")
    expect(there.part("stop")).to_be_hidden()
    there.page.close()
    page_server.wait_for_requests(1)  # another tab neither stole nor stopped the job

    here.press("stop")
    here.until_rested()
    expect(here.gallery()).to_have_count(3)  # with the unfinished penguin
    here.page.get_by_role("tab", name="Experiment").click()
    here.write("exp-steps", "3, 4")
    here.page.reload()
    expect(here.part("exp-run")).to_be_visible()
    expect(here.field("exp-steps")).to_have_value("3, 4")
    here.page.get_by_role("tab", name="Create").click()
    expect(here.gallery()).to_have_count(3)
    here.gallery().nth(1).click()
    here.expect_caption("seed 6")


def start_both(there: Visit) -> None:
    """Start generation in both tabs, and the experiment in the current one."""
    there.set_advanced(steps=1000, seed=7)
    there.write("prompt", "an owl")
    there.press("generate")
    there.until_painting()
    there.page.get_by_role("tab", name="Experiment").click()
    there.pick("exp-samplers", "DDIM")
    there.write("exp-steps", "2, 1000")
    there.write("exp-prompts", "a penguin")
    there.write("exp-seeds", 12)  # not all generated before the page of a busy machine reconnects
    there.write("exp-reference-steps", 3)  # converged images come first, and share the engine with the thousand steps
    there.press("exp-run")
    there.until("() => [...document.querySelectorAll('#exp-grid td img')].some(image => image.naturalWidth > 0)")


def expect_image_lost(there: Visit, cable: Cable) -> None:
    """Check that lost work is reported in its tab and can be started again after the restart.

    The experiment went on, and its Stop, pressed without a connection, stops it now.
    """
    expect(there.part("exp-run")).to_be_visible(timeout=1000 * START_S)
    there.expect_text("exp-status", "stopped: ")
    cable.pull_out()  # like a server that is briefly too busy to answer
    there.expect_text("exp-status", "connection lost")
    cable.plug_in()
    there.expect_text("exp-status", "stopped: ")
    expect(there.part("exp-stop")).to_be_hidden()
    there.expect_text("exp-estimate", r"about \d+ (s|min)")
    expect(there.field("exp-steps")).to_have_value("2, 1000")
    there.page.get_by_role("tab", name="Create").click()
    there.until_rested()
    there.expect_caption("lost when the server stopped; press Generate")
    expect(there.field("prompt")).to_have_value("an owl")
    there.set_advanced(steps=4)
    there.paint()
    there.expect_caption("4 steps, .* seed 7")


def test_a_server_that_dies_midway_is_reported_at_once_and_the_next_one_continues(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    with running_server(Path("embedded"), tmp_path / "first", page=True) as first, cable_to(first.port) as cable:
        wait_for(lambda: first.status("/config") == 200, START_S, "the page")
        here = visit(cable.url, is_ready=False)
        here.write("prompt", "a crown")
        here.press("generate")
        expect(here.gallery()).to_have_count(1, timeout=1000 * START_S)
        here.until_rested()
        here.set_advanced(steps=1000)
        here.write("prompt", "a penguin")
        here.press("generate")
        here.until_painting()
        there = visit(cable.url)
        start_both(there)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        here.expect_caption("connection lost")
        screenshot(here, "gone")
        late = "document.querySelector('#caption [role=alert]').outerHTML = '<p role=status>step 9 of 1000</p>'"
        here.page.evaluate(late)  # as Gradio does with earlier messages
        here.expect_caption("connection lost")
        here.press("lost-stop")
        here.expect_caption("stopped")
        there.expect_text("exp-status", "connection lost")
        there.press("lost-exp-stop")
        there.expect_text("exp-status", "stopped: connection lost")
        expect(there.part("lost-exp-run")).to_be_visible()
        assert there.part("exp-grid").locator("td img").count() > 0
        screenshot(there, "experiment-gone")
        here.set_advanced(steps=5)
        here.press("lost-generate")
        here.expect_caption("generated after reconnecting")
        with running_server(Path("embedded"), tmp_path / "first", page=True) as second:
            cable.target_port = second.port
            expect(here.gallery()).to_have_count(2, timeout=1000 * START_S)
            here.until_rested()
            here.expect_caption("5 steps")
            expect(here.field("prompt")).to_have_value("a penguin")
            here.gallery().last.click()
            here.expect_caption(r"\d{2} steps")
            screenshot(here, "back")
            expect_image_lost(there, cable)
            screenshot(there, "experiment-back")
            second.wait_until_idle(SOON_S)

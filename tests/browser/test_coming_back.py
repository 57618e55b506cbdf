"""A page that is reloaded, or whose server was started anew, has all that it had."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.cable import cable_to
from tests.browser.visit import Screenshot, Visit, Visitor
from tests.service.server import SOON_S, START_S, RunningServer, running_server, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_reload_keeps_prompt_settings_gallery_and_the_running_job(
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
    here.open_advanced()
    for name, value in {"steps": "1000", "seed": "5", "negative-prompt": "night"}.items():
        expect(here.field(name)).to_have_value(value)
    screenshot(here, "reloaded")

    there = Visit(here.page.context.new_page())
    there.open(page_server.url)
    expect(there.gallery()).to_have_count(0)
    expect(there.field("prompt")).to_have_value("")
    assert there.part("stop").count() == 0
    there.page.close()
    page_server.wait_for_requests(1)  # another tab neither stole nor stopped the job

    here.press("stop")
    here.until_rested()
    here.page.get_by_role("tab", name="Experiment").click()
    here.write("exp-steps", "3, 4")
    here.page.reload()
    expect(here.part("exp-run")).to_be_visible()
    expect(here.field("exp-steps")).to_have_value("3, 4")
    here.page.get_by_role("tab", name="Create").click()
    expect(here.gallery()).to_have_count(2)
    here.gallery().first.click()
    here.expect_caption("seed 6")


def test_a_server_that_dies_in_mid_paint_is_told_at_once_and_the_next_one_goes_on(
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
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        here.expect_caption("the server is gone")
        screenshot(here, "gone")
        here.press("lost-stop")
        here.expect_caption("stopped")
        here.set_advanced(steps=5)
        here.press("lost-generate")
        here.expect_caption("painted as soon as it is back")
        with running_server(Path("embedded"), tmp_path / "second", page=True) as second:
            cable.target_port = second.port
            expect(here.gallery()).to_have_count(2, timeout=1000 * START_S)
            here.until_rested()
            here.expect_caption("5 steps")
            expect(here.field("prompt")).to_have_value("a penguin")
            here.gallery().last.click()
            here.expect_caption("25 steps")
            screenshot(here, "back")
            second.wait_until_idle(SOON_S)

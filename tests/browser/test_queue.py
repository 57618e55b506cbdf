"""The queue of the page: requests that wait are jobs, which other pages of the key and later servers know."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from diffserve.client import Client
from diffserve.store import Database, Keys
from tests.browser.cable import cable_to
from tests.browser.test_editing import expect_no_barrier
from tests.browser.test_manners import PHONE, assert_fits
from tests.browser.visit import Screenshot, Visit, Visitor
from tests.service.server import START_S, RunningServer, running_server, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LONG = 1000
LATENCY_MS = 400


@pytest.fixture(autouse=True)
def _empty_queue(page_server: RunningServer) -> None:
    """Remove the jobs that other tests left on the shared server."""
    with Client(page_server.url) as client:
        names = [job.id for job in client.jobs(limit=100).data]
        if names:
            client.cancel_jobs(names)
        for name in names:
            client.delete_job(name)


def begin(here: Visit, *waiting: str, num_steps: int = LONG) -> None:
    """Start an owl, and send requests with these prompts while it is painted."""
    here.set_advanced(steps=LONG)
    here.write("prompt", "an owl")
    here.press("generate")
    here.until_painting()
    here.set_advanced(steps=num_steps, seed=7)
    for number, prompt in enumerate(waiting, 1):
        here.field("prompt").fill(prompt)
        here.field("prompt").press("Enter")
        here.expect_caption(f"{number} more queued")


def items(here: Visit) -> Locator:
    return here.part("queue").get_by_role("listitem")


def press(here: Visit, name: str) -> None:
    here.part("queue").get_by_role("button", name=name).click()


def sign_in(here: Visit, url: str, key: str) -> Visit:
    here.page.goto(url)
    here.page.get_by_label("API key").fill(key)
    here.page.get_by_role("button", name="Sign in").click()
    here.expect_ready()
    return here


def test_requests_sent_while_one_is_painted_wait_as_jobs(
    visit: Visitor, page_server: RunningServer, screenshot: Screenshot
) -> None:
    here = visit()
    begin(here, "a dog", "a <b>cat</b>")
    expect(items(here)).to_have_count(2)
    expect(items(here).first).to_contain_text(re.compile(r"^a dog.*(Queued|Generating: \d+ % done)"))
    expect(items(here).last).to_contain_text("a <b>cat</b>")
    expect_no_barrier(here)
    screenshot(here, "queue")
    press(here, "Cancel a dog")
    expect(items(here)).to_have_count(1)
    here.expect_caption("1 more queued")
    press(here, "Clear the queue")
    expect(items(here)).to_have_count(0)
    here.slow_down(LATENCY_MS)
    prompt, wishes = here.field("prompt"), ["two apples", "three owls"]
    for wish in wishes:
        prompt.fill(wish)
        prompt.press("Enter")
        here.page.wait_for_timeout(LATENCY_MS / 2)
    expect(items(here)).to_have_count(2)
    expect(items(here)).to_contain_text(wishes)
    prompt.press("ArrowUp")
    expect(prompt).to_have_value("two apples")
    press(here, "Clear the queue")
    expect(items(here)).to_have_count(0)
    here.press("stop")
    here.until_rested()
    expect(here.gallery()).to_have_count(1)


def test_images_of_the_queue_join_the_gallery_and_other_pages_can_show_them(
    visit: Visitor, page_server: RunningServer, screenshot: Screenshot
) -> None:
    here = visit()
    here.write("count", 2)
    begin(here, "a crown", num_steps=4)
    here.press("stop")
    here.until_rested()
    expect(items(here)).to_contain_text("Finished")
    expect(here.gallery()).to_have_count(4)  # with the unfinished owls
    there = visit(viewport=PHONE, color_scheme="dark")
    expect(items(there)).to_have_count(1)
    expect(there.gallery()).to_have_count(0)
    press(there, "Show a crown")
    expect(there.gallery()).to_have_count(2)
    there.expect_caption("2 images, 4 steps, .*seeds 7, 8")
    assert_fits(there)
    expect_no_barrier(there)
    screenshot(there, "queue-phone-dark")
    press(here, "Show a crown")
    here.expect_caption("2 images, 4 steps, .*seeds 7, 8")
    expect(here.gallery()).to_have_count(4)
    here.press("delete")
    here.press("delete")
    expect(here.gallery()).to_have_count(3)
    there.page.reload()
    expect(there.gallery()).to_have_count(2)
    expect(items(there)).to_have_count(0)  # the job has a copy of the deleted image


def test_the_queue_survives_a_reload_and_a_restart_and_is_the_same_for_all_pages_of_a_key(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    keys = Keys(Database(tmp_path / "first" / "data"))
    mine, other = (keys.add(name, ["generate"])[0] for name in ("painter", "stranger"))
    with running_server(Path("embedded"), tmp_path / "first", page=True) as first, cable_to(first.port) as cable:
        first.wait_until_ready()
        wait_for(lambda: first.status("/login") == 200, START_S, "the page")
        here = sign_in(visit(locale="en-GB"), cable.url, mine)
        begin(here, "a dog", "a cat")
        here.page.reload()
        expect(items(here)).to_have_count(2)
        here.expect_caption("2 more queued")
        there = sign_in(visit(viewport=PHONE), cable.url, mine)
        expect(items(there)).to_have_count(2)
        stranger = sign_in(visit(locale="en-US"), cable.url, other)
        expect(items(stranger)).to_have_count(0)
        stranger.page.close()
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        for page in (here, there):
            page.expect_caption("connection lost")
        with running_server(Path("embedded"), tmp_path / "first", page=True) as second:
            cable.target_port = second.port
            for page in (here, there):
                expect(page.page.locator("html.lost")).to_have_count(0, timeout=1000 * START_S)
                expect(items(page)).to_have_count(2)
            press(there, "Cancel a dog")
            expect(items(there)).to_have_count(1)
            expect(items(here).last).to_contain_text(re.compile("a cat.*Finished"), timeout=1000 * START_S)
            expect(here.gallery()).to_have_count(1)
            expect(there.gallery()).to_have_count(0)
            expect(items(there)).to_contain_text("Finished")
            screenshot(here, "queue-after-restart")
            press(there, "Clear finished")
            expect(items(there)).to_have_count(0)
            here.page.reload()
            expect(here.gallery()).to_have_count(1)
            expect(items(here)).to_have_count(0)
            with Client(second.url, api_key=mine) as client:
                assert not client.jobs().data

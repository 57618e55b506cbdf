"""Stopping or closing the page frees the slots of that visitor only."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.visit import Screenshot, Visit, Visitor
from tests.service.server import SOON_S, RunningServer, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LONG = 1000


def start(here: Visit, num_steps: int, *, seed: int = 1, count: int = 1) -> None:
    here.set_advanced(steps=num_steps, seed=seed)
    here.write("count", count)
    here.write("prompt", "a penguin")
    here.press("generate")
    here.until_painting()


def test_stop_frees_the_slots_shows_unfinished_images_and_generation_works_again(
    visit: Visitor, page_server: RunningServer, screenshot: Screenshot
) -> None:
    here = visit()
    start(here, LONG, count=2)
    here.expect_caption("% done")
    here.press("stop")
    wait_for(lambda: page_server.num_requests() == 0, SOON_S, "the lane, long before a thousand steps are done")
    here.until_rested()
    here.expect_caption("stopped at step")
    expect(here.gallery()).to_have_count(2)
    screenshot(here, "stopped")
    here.set_advanced(steps=4)
    here.write("count", 1)
    here.paint()
    expect(here.gallery()).to_have_count(3)


def test_a_page_that_is_closed_or_left_midway_frees_its_slot(visit: Visitor, page_server: RunningServer) -> None:
    cancelled = page_server.num_ended("cancelled")  # finished requests may be the probes of an estimate
    closed, left = visit(locale="en-US"), visit(locale="en-US")
    start(closed, LONG, seed=1)
    start(left, LONG, seed=2)
    page_server.wait_for_requests(2)
    closed.page.close()
    left.page.goto("about:blank")
    wait_for(lambda: page_server.num_requests() == 0, SOON_S, "the lanes, long before a thousand steps are done")
    wait_for(lambda: page_server.num_ended("cancelled") == cancelled + 2, SOON_S, "the count of those given up")


def test_one_visitor_stops_and_the_other_finishes(
    visit: Visitor, page_server: RunningServer, screenshot: Screenshot
) -> None:
    finished = page_server.num_ended("finished")
    leaving, staying = visit(), visit()
    start(staying, 200, seed=2)
    start(leaving, LONG, seed=1, count=4)  # started last, else it may finish before the stop
    leaving.expect_caption("% done")
    leaving.press("stop")
    leaving.until_rested()
    staying.until_rested()
    expect(staying.gallery()).to_have_count(1)
    expect(leaving.gallery()).to_have_count(4)
    screenshot(staying, "the-other-finishes")
    wait_for(lambda: page_server.num_ended("finished") > finished, SOON_S, "the count of those finished")

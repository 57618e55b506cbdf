"""The page without a server or with one lost midway: it stays, shows a message, and resumes afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.cable import HOST, Cable, cable_to
from tests.browser.visit import Screenshot, Visitor
from tests.service.server import ROOT, SOON_S, START_S, STOP_S, RunningServer, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def cable(page_server: RunningServer) -> Iterator[Cable]:
    """Yield the cable between the page and the shared server."""
    with cable_to(page_server.port) as cable:
        yield cable


@pytest.fixture
def page_url(cable: Cable, tmp_path: Path) -> Iterator[str]:
    """Run ``python -m ui --server URL`` behind the cable and yield its address."""
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ui", "--server", cable.url, "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "page.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            url = f"http://{HOST}:{port}"
            wait_for(lambda: process.poll() is not None or answers(url), START_S, "the page")
            assert process.poll() is None, (tmp_path / "page.log").read_text()
            yield url
        finally:
            process.terminate()
            process.wait(STOP_S)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=60.0).is_success
    except httpx.TransportError:
        return False


def test_a_server_lost_midway_is_a_message_and_generation_works_after_its_return(
    visit: Visitor, page_url: str, cable: Cable, page_server: RunningServer, screenshot: Screenshot
) -> None:
    here = visit(page_url)
    here.set_advanced(steps=1000)
    here.write("prompt", "a penguin")
    here.press("generate")
    here.until_painting()
    cable.pull_out()
    here.until_rested()
    here.expect_caption(r"ended before the answer did.*server still running")
    screenshot(here, "server-lost")
    wait_for(lambda: page_server.num_requests() == 0, SOON_S, "the lane of who was lost")
    here.press("generate")
    here.expect_caption(r"no server answers at .*diffserve serve")
    here.until_rested()
    screenshot(here, "server-away")
    cable.plug_in()
    here.set_advanced(steps=4)
    here.paint()
    expect(here.gallery()).to_have_count(1)

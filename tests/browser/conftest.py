"""A real browser for the page: Debian's Chromium, driven by Playwright.

``TEST_CHROMIUM`` selects another browser. ``TEST_SCREENSHOTS`` is a folder for a screenshot of every scene.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, BrowserContext, ViewportSize, expect, sync_playwright
from safetensors.torch import save_file

from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.service.a1111.styles import FILE as STYLES
from tests.browser.visit import PATIENCE_S, Screenshot, Visit, Visitor
from tests.engine.controlnets import save_controlnet
from tests.engine.references import write_folder as write_references
from tests.service.server import START_S, RunningServer, running_server, wait_for

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--force-color-profile=srgb"]
ARGUMENTS += ["--process-per-site"]  # scripts of the page are compiled once instead of per visit
WINDOW: ViewportSize = {"width": 1280, "height": 900}


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Start Chromium for this folder; while Playwright runs, nothing else in this thread may use asyncio."""
    executable = os.environ.get("TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed, and TEST_CHROMIUM names no other")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def profile(browser: Browser, shared_page_server: RunningServer) -> Iterator[BrowserContext]:
    """Return the browser context that all tests share in turn.

    Its first tab keeps the process alive with all compiled scripts. Visits with other browser options get a separate
    context.
    """
    context = browser.new_context(viewport=WINDOW, accept_downloads=True)
    context.new_page().goto(f"{shared_page_server.url}/livez")
    yield context
    context.close()


@pytest.fixture(scope="package")
def equipped_server(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Start a server of the embedded model with adapters of all kinds, and of the tiny model "plain"."""
    folder = tmp_path_factory.mktemp("equipped")
    references = write_references(folder / "references", EMBEDDED_DIRECTORY)
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(EMBEDDED_DIRECTORY / "unet"))
    save_controlnet(unet, folder / "controlnets" / "edges", 1)
    (folder / "words").mkdir()
    save_file({"emb_params": torch.zeros(1, 192)}, folder / "words" / "inkstyle.safetensors")
    (folder / "data").mkdir()
    (folder / "data" / STYLES).write_text("name,prompt,negative_prompt\nNight,{prompt} at night,snow\n")
    config = f'[model]\nreference_dir = "{references}"\ncontrolnet_dir = "{folder / "controlnets"}"\n'
    config += f'embeddings_dir = "{folder / "words"}"\n[models]\nplain = "{tiny_model("sd15")}"\n'
    with running_server(Path("embedded"), folder, config=config, page=True) as server:
        server.wait_until_ready()
        wait_for(lambda: server.status("/config") == 200, START_S, "the page")
        yield server


@pytest.fixture
def visit(browser: Browser, profile: BrowserContext, page_server: RunningServer) -> Iterator[Visitor]:
    """Yield a function that opens the page; afterwards check for external requests and script errors."""
    visits: list[Visit] = []
    contexts: list[BrowserContext] = []
    first = profile.pages[0]
    first.evaluate("localStorage.clear()")
    profile.clear_cookies()
    expect.set_options(timeout=PATIENCE_S * 1000)

    def open_page(url: str | None = None, *, is_ready: bool = True, **context: Any) -> Visit:
        if context:
            contexts.append(browser.new_context(**{"viewport": WINDOW, "accept_downloads": True, **context}))
        within = contexts[-1] if context else profile
        within.set_default_timeout(PATIENCE_S * 1000)
        visits.append(Visit(within.new_page()))
        visits[-1].open(url or page_server.url, is_ready=is_ready)
        return visits[-1]

    yield open_page
    for each in contexts:
        each.close()
    for page in profile.pages:
        if page is not first:
            page.close()
    assert {host for each in visits for host in each.strangers()} == set()
    assert [error for each in visits for error in each.errors] == []


@pytest.fixture
def screenshot() -> Screenshot:
    """Return ``screenshot(visit, name)``, which saves the full page as NAME.png in TEST_SCREENSHOTS, if that is set."""
    folder = os.environ.get("TEST_SCREENSHOTS")

    def take(visit: Visit, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            visit.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True, animations="disabled")

    return take

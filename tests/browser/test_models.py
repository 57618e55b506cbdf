"""A server with several models, later with keys: selection, sign-in and sign-out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from diffserve.settings.layers import configs_dir
from diffserve.settings.quality_profile import read_profile
from diffserve.store import Database, Keys
from tests.browser.test_editing import expect_no_barrier
from tests.browser.visit import Screenshot, Visitor
from tests.service.server import START_S, RunningServer, running_server, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two-models")


@pytest.fixture(scope="module")
def two_models(folder: Path) -> Iterator[RunningServer]:
    config = '[models]\nturbo = "embedded-turbo"\n'
    with running_server(Path("embedded"), folder, config=config, page=True) as server:
        server.wait_until_ready()
        wait_for(lambda: server.status("/config") == 200, START_S, "the page")
        yield server


def test_another_model_is_selected_and_uses_its_defaults(
    visit: Visitor, screenshot: Screenshot, two_models: RunningServer
) -> None:
    here = visit(two_models.url)
    expect(here.part("leave")).to_be_hidden()
    expect(here.field("model")).to_have_value("embedded")
    points = read_profile(configs_dir() / "quality" / "embedded.toml").points
    expect(here.part("quality")).to_contain_text(f"Standard, {points.standard.num_steps} steps")
    expect(here.part("quality")).to_contain_text(f"Max, {points.max.num_steps} steps")
    here.reveal("clip-skip")
    expect(here.part("clip-skip")).to_be_visible()
    expect(here.part("switch-at")).to_be_hidden()  # there is no refiner
    here.reveal("model")
    here.field("model").click()
    here.page.get_by_role("option", name="turbo").click()
    expect(here.part("quality")).to_contain_text("Standard, 4 steps")
    expect(here.part("about")).to_contain_text("turbo on cpu")
    here.field("prompt").fill("a red apple on the beach")
    here.paint()
    here.expect_caption("4 steps")
    screenshot(here, "create-model")
    here.page.reload()
    expect(here.field("model")).to_have_value("turbo")
    expect(here.part("quality")).to_contain_text("Standard, 4 steps")


def test_visitors_sign_in_with_a_key_and_sign_out(
    visit: Visitor, screenshot: Screenshot, two_models: RunningServer, folder: Path
) -> None:
    """Run last in this file, because the server requires keys from here on."""
    text, _ = Keys(Database(folder / "data")).add("painter", ["generate"])
    wait_for(lambda: two_models.status("/config") != 200, START_S, "keys are asked for")
    here = visit()
    here.page.goto(two_models.url)
    expect_no_barrier(here)
    here.page.get_by_label("API key").fill("ds-wrong")
    here.page.get_by_role("button", name="Sign in").click()
    expect(here.page.get_by_role("alert")).to_contain_text("Invalid key")
    here.page.emulate_media(color_scheme="dark")
    expect_no_barrier(here)
    here.page.get_by_label("API key").fill(text)
    here.page.get_by_role("button", name="Sign in").click()
    here.expect_ready()
    screenshot(here, "let-in")
    here.page.get_by_role("button", name="Log out").click()
    expect(here.page.get_by_label("API key")).to_be_visible()
    here.page.goto(two_models.url)
    expect(here.page.get_by_label("API key")).to_be_visible()

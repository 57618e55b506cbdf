"""Editing in the browser: only the part marked by pointer or keyboard changes, and axe finds no barrier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import expect

from diffserve.media.images import decode_image
from tests.browser.test_manners import PHONE, assert_fits
from tests.browser.visit import Screenshot, Visit, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def expect_no_barrier(here: Visit) -> None:
    """Check that axe finds no accessibility violation."""
    violations = Axe().run(here.page).response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in violations] == []


def mark(here: Visit, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw a line with the brush between shares of width and height."""
    canvas = here.part("start-picture").locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (start, end)]
    here.page.mouse.move(*places[0])
    here.page.mouse.down()
    here.page.mouse.move(*places[1], steps=4)
    here.page.mouse.up()


def test_only_the_marked_part_is_regenerated_and_a_reload_restores_the_marks(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit()
    expect_no_barrier(here)
    here.set_advanced(steps=6, seed=5)
    here.write("prompt", "a fox on the beach")
    here.press("generate")
    expect(here.gallery()).to_have_count(1)
    here.until_rested()
    before = decode_image(here.save("download", tmp_path / "before").read_bytes()).array
    here.press("edit-this")
    here.expect_text("marked", "no mask")
    mark(here, (0.25, 0.75), (0.75, 0.75))
    here.expect_text("marked", r"\d+ % of the image is regenerated")
    status = here.part("marked").inner_text()
    screenshot(here, "edit-marked")
    here.page.reload()
    here.expect_text("marked", status)
    here.write("prompt", "a cactus on the beach")
    here.press("generate")
    expect(here.gallery()).to_have_count(2)
    here.until_rested()
    here.expect_caption("strength 1")
    after = decode_image(here.save("download", tmp_path / "after").read_bytes()).array
    height = len(before)
    assert np.array_equal(after[: height // 2], before[: height // 2]), "what is not marked comes back to the byte"
    assert not np.array_equal(after[3 * height // 4], before[3 * height // 4])
    expect_no_barrier(here)
    screenshot(here, "edit-painted")


def test_an_uploaded_image_is_marked_by_keyboard_on_a_phone_in_dark_mode(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit(viewport=PHONE, has_touch=True, is_mobile=True, color_scheme="dark")
    file = tmp_path / "own.png"
    Image.new("RGB", (96, 64), (200, 180, 90)).save(file)
    here.upload("start-choose", file)
    canvas = here.part("start-picture").locator("canvas")
    canvas.focus()
    for key in ("Space", "ArrowRight", "Shift+ArrowRight", "Space"):
        here.page.keyboard.press(key)
    here.expect_text("marked", r"\d+ % of the image is regenerated.* the brush is up")
    here.part("start-picture").get_by_role("button", name="Invert").click()
    here.expect_text("marked", r"9\d % of the image is regenerated")
    here.part("start-picture").get_by_role("button", name="Clear").click()
    here.expect_text("marked", "no mask")
    here.set_advanced(steps=4, strength=0.5)
    here.write("prompt", "an owl")
    here.press("generate")
    expect(here.gallery()).to_have_count(1)
    here.expect_caption("96x64, strength 0.5")
    assert_fits(here)
    expect_no_barrier(here)
    screenshot(here, "edit-phone")
    here.press("start-remove")
    expect(canvas).to_have_count(0)
    here.press("generate")
    expect(here.gallery()).to_have_count(2)
    here.until_rested()
    here.expect_caption("128x128, seed")

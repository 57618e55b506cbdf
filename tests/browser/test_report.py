"""The page of a sweep's report in a browser: comparison of two cells, difference maps, folded rows, print."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from diffserve.experiments.charts import StripGrid
from diffserve.experiments.report_page import Section, Tables, write_page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

RED, GREEN, BLUE = (220, 40, 30), (30, 160, 60), (30, 60, 220)


def webp(color: tuple[int, int, int]) -> bytes:
    file = BytesIO()
    Image.fromarray(np.full((64, 64, 3), color, np.uint8)).save(file, "WEBP")
    return file.getvalue()


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Page:
    """Open a report with two rows of images, of which the second is folded."""
    converged, difference = webp(BLUE), webp((9, 9, 9))
    rows = ((webp(RED), converged), (webp(GREEN), converged))
    heads, names = ("4 steps", "converged (200)"), ("DDIM", "DDPM")
    strips = {
        caption: StripGrid(heads, names, rows, 1, ((difference, None), (difference, None)))
        for caption in ("first prompt", "second prompt")
    }
    file = tmp_path / "report.html"
    file.write_text(write_page("Report", {}, (), [Section("strips", (), strips=strips)], Tables(()), []), "utf-8")
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    assert errors == []
    return page


def colors_at(page: Page, *shares: float) -> list[tuple[int, ...]]:
    """Return the colors at these shares of the width of the compared images."""
    image = np.asarray(Image.open(BytesIO(page.locator(".pair").screenshot())).convert("RGB"), np.int16)
    height, width, _ = image.shape

    def nearest(pixel: NDArray[np.int16]) -> tuple[int, ...]:
        return min((RED, GREEN, BLUE), key=lambda color: int(np.abs(pixel - color).sum()))

    return [nearest(image[height // 2, round(share * width)]) for share in shares]


def test_the_slider_clips_the_left_image_over_the_right_one(page: Page) -> None:
    left, right = page.get_by_label("left", exact=True), page.get_by_label("right", exact=True)
    slider = page.get_by_label("border between left and right")
    assert left.locator("option").all_text_contents() == ["DDIM, 4 steps", "DDIM, converged (200)", "DDPM, 4 steps"]
    assert colors_at(page, 0.2, 0.45, 0.55, 0.8) == [RED, RED, BLUE, BLUE], "a cell and the converged image, half each"
    slider.press("Home")
    assert colors_at(page, 0.2, 0.8) == [BLUE, BLUE]
    slider.press("End")
    assert colors_at(page, 0.2, 0.8) == [RED, RED]
    expect(slider).to_have_attribute("aria-valuetext", "100 % DDIM, 4 steps")
    right.select_option("DDPM, 4 steps")
    slider.fill("30")
    assert colors_at(page, 0.2, 0.4) == [RED, GREEN]
    page.get_by_label("prompt").select_option("second prompt")
    assert right.locator("option:checked").text_content() == "DDPM, 4 steps", "the choice stays for another prompt"


def test_difference_maps_replace_the_images_of_a_strip(page: Page) -> None:
    strip = page.locator("figure.strips").first
    image = strip.get_by_alt_text("DDIM, 4 steps", exact=True)
    difference = strip.get_by_alt_text("difference of DDIM, 4 steps from the converged image")
    expect(image).to_be_visible()
    expect(difference).to_be_hidden()
    strip.get_by_label("show difference maps").check()
    expect(image).to_be_hidden()
    expect(difference).to_be_visible()
    expect(strip.get_by_alt_text("DDIM, converged (200)")).to_be_visible()
    expect(page.get_by_alt_text("DDPM, 4 steps", exact=True).first).to_be_hidden()
    strip.get_by_text("1 more row").click()
    expect(strip.get_by_alt_text("difference of DDPM, 4 steps from the converged image")).to_be_visible()


def test_a_printed_report_is_light_without_controls(page: Page) -> None:
    page.emulate_media(media="print", color_scheme="dark")
    expect(page.locator(".compare")).to_be_hidden()
    expect(page.locator(".toggle").first).to_be_hidden()
    expect(page.locator("body")).to_have_css("background-color", "rgb(255, 255, 255)")
    page.emulate_media(media="screen", color_scheme="dark")
    expect(page.locator("body")).to_have_css("background-color", "rgb(22, 24, 28)")


def test_a_narrow_screen_shows_the_page_without_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400

"""First screen, settings and display options in the browser."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.test_editing import expect_no_barrier
from tests.browser.test_manners import PHONE, assert_fits
from tests.browser.visit import Screenshot, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SCALE = """() => {
    const image = document.querySelector('#picture img');
    return [image.clientWidth / image.naturalWidth, getComputedStyle(image).imageRendering];
}"""


def test_the_first_screen_has_painted_examples_and_small_images_are_enlarged_sharply(
    visit: Visitor, screenshot: Screenshot
) -> None:
    here = visit()
    pictures = here.part("examples").locator("img")
    expect(pictures).to_have_count(6)
    assert all(picture.evaluate("image => image.naturalWidth") == 128 for picture in pictures.all())
    expect(here.part("picture")).to_be_hidden()
    expect(here.part("actions")).to_be_hidden()
    expect_no_barrier(here)
    screenshot(here, "first-screen")
    here.part("examples").get_by_role("button").nth(1).click()
    expect(here.field("prompt")).to_have_value("two apples on a blue background")
    here.set_advanced(steps=4)
    here.paint()
    expect(here.part("examples")).to_be_hidden()
    here.expect_text("true-size", r"128x128 pixels, shown at \d times its size")
    factor, rendering = here.page.evaluate(SCALE)
    assert factor > 1
    assert factor == round(factor), "uneven pixels"
    assert rendering == "pixelated"


def test_an_invalid_value_is_marked_at_its_field_and_nothing_is_painted(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit(viewport=PHONE, has_touch=True, is_mobile=True)
    here.write("prompt", "an owl")
    here.set_advanced(guidance=31)
    here.reveal("seed")
    expect(here.part("guidance")).to_be_hidden()
    here.press("generate")
    expect(here.part("guidance")).to_be_visible()  # its group is shown
    error = here.part("guidance").locator(".invalid")
    expect(error).to_contain_text("from 0 to 30")
    red, green, blue = map(int, re.findall(r"\d+", error.evaluate("each => getComputedStyle(each).color"))[:3])
    assert red > green + blue
    assert_fits(here)
    screenshot(here, "invalid-phone")
    expect(here.gallery()).to_have_count(0)
    here.write("prompt", "an owl and a unicorn")
    here.expect_text("unknown-words", "unicorn")  # an event after the message, which stays until the value changes
    expect(error).to_be_visible()
    here.write("guidance", 32)
    expect(error).to_have_count(0)
    here.press("generate")
    expect(error).to_contain_text("'32'")
    here.reveal("seed")
    here.press("generate")
    expect(error).to_be_in_viewport()  # shown again
    here.write("guidance", "")
    expect(error).to_have_count(0)
    here.write("prompt", "an owl")
    here.set_advanced(steps=4)
    here.paint()
    expect(here.gallery()).to_have_count(1)
    here.expect_caption("guidance 3,")  # an empty field is the default


def test_a_lora_is_chosen_with_its_trigger_words_and_strength(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    here.reveal("loras")
    here.field("lora-choice").click()
    here.page.get_by_role("option", name="gift").click()
    expect(here.field("loras")).to_have_value("gift:1")
    here.part("lora-words").get_by_role("button", name="gift", exact=True).click()
    expect(here.field("prompt")).to_have_value("gift")
    scale = here.part("lora-scale").locator("input[type=number]")
    scale.fill("0.5")
    scale.blur()
    expect(here.field("loras")).to_have_value("gift:0.5")
    screenshot(here, "lora")
    here.set_advanced(steps=4)
    here.paint()
    here.expect_caption("gift 0.5")


def test_dark_mode_is_remembered_and_shortcuts_are_listed(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit(color_scheme="light")
    is_dark = "() => document.body.classList.contains('dark')"
    here.page.get_by_role("button", name="Switch between dark and light").click()
    here.until(is_dark)
    here.page.reload()
    here.until(is_dark)
    here.expect_ready()
    expect_no_barrier(here)
    here.field("prompt").press("?")
    expect(here.part("help")).to_be_hidden()  # it is typed
    here.part("title").click()
    here.page.keyboard.press("?")
    expect(here.part("help")).to_be_visible()
    expect_no_barrier(here)
    screenshot(here, "help-dark")
    here.page.keyboard.press("Escape")
    expect(here.part("help")).to_be_hidden()

"""The History tab in the browser: images are searched, reused, edited and deleted."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from playwright.sync_api import expect

from diffserve.client import Client
from tests.browser.test_editing import expect_no_barrier
from tests.browser.test_manners import assert_fits
from tests.browser.visit import Screenshot, Visitor
from tests.service.server import RunningServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LATE_MS = 500


def test_an_image_is_searched_reused_and_deleted(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    here.set_advanced(steps=4, seed=77, negative_prompt="night")
    for number, prompt in enumerate(("a zebra in the snow", "a zebra on the beach"), 1):
        here.write("prompt", prompt)
        here.press("generate")
        expect(here.gallery()).to_have_count(number)
        here.until_rested()

    there = visit()  # another tab without images
    there.page.get_by_role("tab", name="History").click()
    grid = there.part("history-grid").locator(".thumbnail-item")
    expect(grid.first).to_be_visible()
    there.write("history-words", "zebra snow")
    there.press("history-go")
    expect(grid).to_have_count(1)
    grid.first.click()
    there.expect_text("history-said", "a zebra in the snow.*128x128, seed 77")
    screenshot(there, "history")
    expect_no_barrier(there)
    there.press("history-restore")
    expect(there.field("prompt")).to_have_value("a zebra in the snow")
    expect(there.field("steps")).to_have_value("4")
    expect(there.field("negative-prompt")).to_have_value("night")

    there.write("prompt", "an owl")
    there.write("negative-prompt", "snow")
    there.page.get_by_role("tab", name="History").click()
    expect(grid).to_have_count(1)
    there.press("history-edit")
    expect(there.part("start-picture").locator("canvas")).to_be_visible()
    expect(there.field("prompt")).to_have_value("a zebra in the snow")
    expect(there.field("negative-prompt")).to_have_value("night")
    there.expect_caption("describe the change")
    there.page.get_by_role("tab", name="History").click()
    there.press("history-restore")
    there.expect_caption("settings loaded")
    expect(there.part("start-picture").locator("canvas")).to_have_count(0)  # that one started from noise
    there.page.wait_for_function("() => !diffserve.isEdit()")  # and so does the next one
    there.page.get_by_role("tab", name="History").click()
    there.press("history-delete")
    expect(there.part("history-delete")).to_contain_text("permanently?")
    there.press("history-delete")
    there.press("history-go")
    there.expect_text("history-said", "no image has all")
    there.page.set_viewport_size({"width": 390, "height": 844})
    there.page.emulate_media(color_scheme="dark")
    there.write("history-words", "zebra")
    there.press("history-go")
    expect(grid).to_have_count(1)
    assert_fits(there)
    expect_no_barrier(there)
    screenshot(there, "history-phone")


def test_a_late_response_does_not_replace_that_of_a_later_selection(visit: Visitor) -> None:
    here = visit()
    here.set_advanced(steps=1, seed=40)
    here.write("count", 3)
    here.write("prompt", "a dog on an orange background")
    here.paint()
    expect(here.gallery()).to_have_count(3)
    for name, seed in (("batch", 42), ("gallery", 40)):  # the gallery has the newest first
        images = here.part(name).locator(".thumbnail-item")
        images.nth(2).click()
        here.expect_caption(f"seed {seed}")
        here.delay_next_response(LATE_MS)
        images.nth(0).click()
        images.nth(1).click()
        here.expect_caption("seed 41")
        here.page.wait_for_timeout(2 * LATE_MS)
        here.expect_caption("seed 41")
    here.page.get_by_role("tab", name="History").click()
    here.write("history-words", "dog orange")
    here.press("history-go")
    boxes = here.part("history-grid").locator("label")
    expect(boxes).to_have_count(3)
    here.delay_next_response(LATE_MS)
    boxes.first.click()
    boxes.nth(2).click(modifiers=["Shift"])
    here.expect_text("history-said", "3 images are selected")
    here.page.wait_for_timeout(2 * LATE_MS)
    here.expect_text("history-said", "3 images are selected")
    here.delay_next_response(LATE_MS)
    here.press("history-go")
    boxes.nth(1).click()  # while the search redraws the images
    here.expect_text("history-said", "2 images are selected")
    here.page.wait_for_timeout(2 * LATE_MS)
    here.expect_text("history-said", "2 images are selected")
    expect(here.part("history-grid").locator(".selected")).to_have_count(2)
    expect(here.part("history-grid").get_by_role("checkbox", checked=True)).to_have_count(2)


def test_buttons_apply_to_the_marked_images_on_a_slow_connection(visit: Visitor) -> None:
    here = visit()
    here.set_advanced(steps=1, seed=50)
    here.write("count", 3)
    here.write("prompt", "a parrot on a blue background")
    here.paint()
    expect(here.gallery()).to_have_count(3)
    here.slow_down(LATE_MS)
    batch = here.part("batch").locator(".thumbnail-item")
    images = here.part("gallery").locator(".thumbnail-item")
    batch.nth(1).click()
    here.press("reuse-seed")
    expect(here.field("seed")).to_have_value("51")
    images.nth(0).click()
    assert "-52." in here.download("download").suggested_filename
    images.nth(1).click()
    images.nth(2).click()
    here.press("delete")
    expect(here.part("delete")).to_contain_text("permanently?")
    here.expect_caption("seed 50")
    images.nth(1).click()
    here.press("reuse-seed")
    images.nth(2).click()  # before the button could be applied: it meant another image
    here.expect_caption("seed 50")
    here.page.wait_for_timeout(2 * LATE_MS)
    expect(here.field("seed")).to_have_value("51")
    here.page.evaluate("diffserve.selecting('gallery')")  # an event that gradio does not send
    here.press("reuse-seed")
    expect(here.field("seed")).to_have_value("50")

    here.page.get_by_role("tab", name="History").click()
    here.write("history-words", "parrot blue")
    here.press("history-go")
    boxes = here.part("history-grid").locator("label")
    expect(boxes).to_have_count(3)
    boxes.first.click()
    here.expect_text("history-said", "seed 52")
    boxes.nth(1).click()
    here.press("history-favorite")
    expect(here.part("history-grid").locator(".star")).to_have_count(2)
    boxes.nth(1).click()
    boxes.first.click()
    boxes.nth(2).click()
    here.press("history-restore")
    expect(here.field("seed")).to_have_value("50")


def test_images_that_were_deleted_elsewhere_are_named(
    visit: Visitor, page_server: RunningServer, tmp_path: Path
) -> None:
    here = visit()
    here.set_advanced(steps=1, seed=60)
    here.write("count", 4)
    here.write("prompt", "a bicycle on a green background")
    here.paint()
    here.page.get_by_role("tab", name="History").click()
    here.write("history-words", "bicycle green")
    here.press("history-go")
    boxes = here.part("history-grid").locator("label")
    expect(boxes).to_have_count(4)
    with Client(page_server.url) as client:
        for entry in client.history(q="bicycle green").data[:2]:
            client.forget(entry.id)
    boxes.first.click()
    here.expect_text("history-said", "seed 63")
    for name in ("restore", "edit"):
        here.press(f"history-{name}")
        here.expect_text("history-said", "no longer exists; search again")
        boxes.first.click()
        boxes.first.click()
        here.expect_text("history-said", "seed 63")
    boxes.nth(3).click(modifiers=["Shift"])
    here.expect_text("history-said", "4 images are selected")
    with zipfile.ZipFile(here.save("history-download", tmp_path)) as packed:
        assert len(packed.namelist()) == 2
    here.expect_text("history-said", "2 of the selected images no longer exist")
    boxes.first.click()
    here.expect_text("history-said", "3 images are selected")
    here.press("history-favorite")
    here.expect_text("history-said", "1 of the selected images no longer exists")
    expect(here.part("history-grid").locator(".star")).to_have_count(2)
    expect(boxes).to_have_count(3)


def test_several_images_are_compared_marked_downloaded_and_found_again(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit(timezone_id="Asia/Tokyo")
    here.set_advanced(steps=2)
    here.write("count", 3)
    here.write("prompt", "a turtle on a pink background")
    here.paint()
    expect(here.gallery()).to_have_count(3)
    here.page.get_by_role("tab", name="History").click()
    here.write("history-words", "turtle pink")
    here.press("history-go")
    grid = here.part("history-grid").locator(".thumbnail-item")
    expect(grid).to_have_count(3)
    grid.first.get_by_role("checkbox").focus()
    here.page.keyboard.press("Space")
    here.expect_text("history-said", r"a turtle on a pink background.*\d{1,2}:\d\d")
    shown = here.part("history-said").locator("time")
    assert shown.inner_text() != shown.get_attribute("title"), "local time instead of UTC"
    expect(here.part("history-compare")).to_be_disabled()
    grid.nth(1).click()
    here.expect_text("history-said", "2 images are selected")
    expect(here.part("history-restore")).to_be_disabled()
    here.press("history-compare")
    expect(here.part("history-slider").locator("img")).to_have_count(2)
    screenshot(here, "history-compared")
    here.press("history-favorite")
    expect(here.part("history-grid").locator(".star")).to_have_count(2)
    archive = here.save("history-download", tmp_path)
    with zipfile.ZipFile(archive) as packed:
        assert len(packed.namelist()) == 2
    here.part("history-favorites").get_by_role("checkbox").check()
    expect(grid).to_have_count(2)
    here.press("history-full-screen")
    expect(here.part("lightbox")).to_contain_text("1 of 2")
    here.page.keyboard.press("Escape")
    here.press("history-delete")
    here.press("history-delete")
    expect(grid).to_have_count(0)
    here.expect_text("history-said", "fits the filters")

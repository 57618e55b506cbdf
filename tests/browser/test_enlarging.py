"""Larger images in the browser: the Upscale button and the second pass (hires fix)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from diffserve.media.images import decode_image, read_infotext
from diffserve.media.infotext import UPSCALE, parse_infotext
from tests.browser.test_editing import expect_no_barrier
from tests.browser.visit import Screenshot, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def fields_of(file: Path) -> dict[str, str]:
    return dict(parse_infotext(read_infotext(file.read_bytes()) or "").fields)


def test_the_selected_image_is_upscaled_and_kept_in_the_history(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit()
    here.set_advanced(steps=2, seed=40)
    here.write("count", 3)
    here.write("prompt", "a walrus in the snow")
    here.press("generate")
    expect(here.gallery()).to_have_count(3)
    here.until_rested()
    here.part("batch").locator("img").nth(1).click()
    here.expect_caption("seed 41")
    here.part("gallery").locator(".thumbnail-item").nth(1).click()
    marked = here.part("gallery").locator(".selected")
    expect(marked).to_have_count(1)
    here.press("upscale")
    here.expect_caption("upscaled in .*embedded-4x, 4 times larger, 512x512, seed 41")
    expect(here.gallery()).to_have_count(4)
    expect(marked).to_have_count(0)
    here.expect_text("true-size", r"512x512 pixels\s*$")
    expect(here.part("favorite")).to_be_enabled()
    file = here.save("download", tmp_path)
    picture = decode_image(file.read_bytes())
    assert (picture.width_px, picture.height_px) == (512, 512)
    assert (fields_of(file)["Seed"], fields_of(file)[UPSCALE]) == ("41", "embedded-4x x4")
    expect_no_barrier(here)
    screenshot(here, "upscaled")
    here.press("reuse-settings")
    here.expect_caption("press Upscale when it is generated")
    expect(here.field("seed")).to_have_value("41")
    here.press("upscale")  # 2048 px
    expect(here.gallery()).to_have_count(5)
    here.press("upscale")
    here.expect_caption("pixels")
    expect(here.part("caption").get_by_role("alert")).to_be_visible()  # too large
    here.page.get_by_role("tab", name="History").click()
    images = here.part("history-grid").locator(".thumbnail-item")
    expect(images.first).to_be_visible()
    here.write("history-words", "walrus")
    here.press("history-go")
    expect(images).to_have_count(5)
    images.nth(1).click()
    here.expect_text("history-said", "a walrus in the snow.*embedded-4x, 512x512, seed 41")


def test_a_second_pass_is_restored_from_its_file_and_reproduces_its_pixels(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit()
    here.set_advanced(steps=6, seed=9, hires_scale=1.5, hires_steps=8, hires_strength=0.5, tile_size=128)
    here.write("prompt", "an owl")
    here.press("generate")
    expect(here.gallery()).to_have_count(1)
    here.until_rested()
    here.expect_caption("192x192.*hires scale 1.5")
    screenshot(here, "second-pass")
    first = here.save("download", tmp_path)
    there = visit()
    there.upload("read-parameters", first)
    there.expect_caption("settings loaded")
    expect(there.field("hires-scale")).to_have_value("1.5")
    expect(there.field("hires-steps")).to_have_value("8")
    expect(there.field("tile-size")).to_have_value("128")
    expect(there.field("strength")).to_have_value("")
    there.press("generate")
    expect(there.gallery()).to_have_count(1)
    there.until_rested()
    again = there.save("download", tmp_path / "again")
    once, twice = (decode_image(path.read_bytes()).array for path in (first, again))
    assert np.array_equal(once, twice)
    there.write("hires-scale", 0.5)
    there.reveal("seed")
    there.press("generate")
    error = there.part("hires-scale").locator(".invalid")
    expect(error).to_be_visible()  # its group is shown
    expect(error).to_contain_text("between 1 and 8")

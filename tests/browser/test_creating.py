"""Image generation in the browser: previews, the gallery, the file, and a repeat from the file."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from diffserve.media.images import decode_image, read_infotext
from diffserve.media.infotext import parse_infotext
from tests.browser.visit import Screenshot, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FOX = "a fox next to a cactus on the beach"


def test_previews_are_shown_while_an_image_is_generated(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    here.set_advanced(steps=400)  # several seconds, so that a busy browser shows more than one preview
    here.field("prompt").fill(FOX)
    here.field("prompt").press("Enter")
    here.until_painting()
    expect(here.part("generate")).to_be_hidden()
    expect(here.part("stop")).to_be_enabled()
    screenshot(here, "create-painting")
    here.until_rested()
    expect(here.gallery()).to_have_count(1)
    screenshot(here, "create-painted")
    while_painting = [moment for moment in here.recorded_states() if moment["stop"]]
    pictures = [src for src, _ in groupby(moment["picture"] for moment in while_painting) if src]
    assert len(pictures) >= 2, "no preview was seen before the picture"
    counted = [re.search(r"step (\d+) of 400", moment["caption"], re.IGNORECASE) for moment in while_painting]
    steps = [int(match[1]) for match in counted if match]
    assert len(set(steps)) >= 3
    assert steps == sorted(steps)
    assert any(re.search(r"\d+ s(econds)? left", moment["caption"]) for moment in while_painting)


def test_the_gallery_fills_while_other_images_are_generated(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    here.set_advanced(steps=1000)
    here.write("prompt", "a castle at night")
    here.press("generate")
    here.expect_caption(r"step [1-9]\d* of 1000")
    here.set_advanced(steps=8, seed=70)
    here.write("count", 3)
    here.field("prompt").fill("an owl in the forest")
    here.field("prompt").press("Enter")
    expect(here.gallery()).to_have_count(3)
    expect(here.part("stop")).to_be_visible()
    screenshot(here, "create-three")
    for seed in (70, 71, 72):
        expect(here.part("gallery")).to_contain_text(f"seed {seed}")
    here.press("stop")
    here.until_rested()
    grown = [size for size, _ in groupby(moment["gallery"] for moment in here.recorded_states())]
    assert grown == sorted(grown)
    expect(here.gallery()).to_have_count(4)  # with the unfinished castle


def test_a_file_restores_its_settings_and_reproduces_its_pixels(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit()
    here.write("prompt", FOX)
    here.set_advanced(steps=6, guidance=2.5, negative_prompt="night")
    here.paint()
    first = here.save("download", tmp_path)
    text = read_infotext(first.read_bytes())
    assert text is not None
    parsed = parse_infotext(text)
    assert (parsed.prompt, parsed.negative_prompt) == (FOX, "night")
    assert (parsed.fields["Steps"], parsed.fields["CFG scale"]) == ("6", "2.5")

    there = visit()
    there.upload("read-parameters", first)
    expect(there.field("prompt")).to_have_value(FOX)
    expect(there.field("steps")).to_have_value("6")
    expect(there.field("guidance")).to_have_value("2.5")
    expect(there.field("negative-prompt")).to_have_value("night")
    expect(there.field("seed")).to_have_value(parsed.fields["Seed"])
    screenshot(there, "create-read")
    there.paint()
    second = there.save("download", tmp_path / "again")
    once, again = (decode_image(path.read_bytes()).array for path in (first, second))
    assert np.array_equal(once, again)
    assert read_infotext(second.read_bytes()) == text


def test_a_seed_is_shown_after_the_run_and_can_be_fixed_or_cleared(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit()
    here.set_advanced(steps=4)
    here.write("prompt", "a crown")
    here.paint()
    text = read_infotext(here.save("download", tmp_path).read_bytes())
    assert text is not None
    seed = parse_infotext(text).fields["Seed"]
    here.expect_caption(rf"seed\D*{seed}")
    screenshot(here, "create-seed")
    here.press("reuse-seed")
    expect(here.field("seed")).to_have_value(seed)
    here.press("vary")
    here.expect_caption(rf"variation 0.15, seed {seed}, variation seeds \d+ to \d+")
    screenshot(here, "varied")
    expect(here.field("variation-strength")).to_have_value("")
    expect(here.field("count")).to_have_value("1")
    here.part("batch").locator("img").last.click()
    here.expect_caption(rf"seed {seed}, variation seed \d+")
    here.press("reuse-seed")
    expect(here.field("variation-seed")).to_have_value(re.compile(r"\d+"))
    expect(here.field("variation-strength")).to_have_value("0.15")
    here.press("random-seed")
    expect(here.field("seed")).not_to_have_value(seed)


def test_an_example_is_generated_with_one_click(visit: Visitor) -> None:
    here = visit()
    example = here.part("examples").get_by_role("button").first
    text = example.inner_text().strip()
    assert len(text.split()) >= 2
    example.click()
    expect(here.field("prompt")).to_have_value(text)
    here.set_advanced(steps=4)
    here.paint()
    expect(here.gallery()).to_have_count(1)


def test_parameters_are_copied_as_the_file_has_them(visit: Visitor, tmp_path: Path) -> None:
    here = visit(permissions=["clipboard-read", "clipboard-write"])
    here.set_advanced(steps=4, negative_prompt="night")
    here.write("prompt", "a crown")
    here.paint()
    text = read_infotext(here.save("download", tmp_path).read_bytes())
    here.press("copy-parameters")
    here.until("async text => (await navigator.clipboard.readText()) === text", text)

"""Reference images, ControlNet maps, styles, presets and embeddings in the browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from tests.browser.test_editing import expect_no_barrier
from tests.browser.test_manners import PHONE, assert_fits
from tests.browser.visit import Screenshot, Visit, Visitor
from tests.service.server import RunningServer

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def open_adapters(here: Visit) -> None:
    """Show the group Adapters, which may still be empty."""
    here.part("groups").get_by_role("radio", name="Adapters").check()


def set_reference(here: Visit, number: int, **fields: float) -> None:
    """Fill in the number fields of the reference ``number``, from 0."""
    for name, value in fields.items():
        field = here.part("references").locator(f"input[data-set={name}]").nth(number)
        field.fill(f"{value:g}")
        field.blur()


def references_in(file: Path) -> list[str]:
    """Return the infotext values of the references of an image, without digests."""
    fields = parse_infotext(read_infotext(file.read_bytes()) or "").fields
    values = [value for name, value in fields.items() if name.startswith("Reference ")]
    parts = [dict(pair.split(": ") for pair in value.split(", ")) for value in values]
    names = ("Model", "Weight", "Guidance Start", "Guidance End")
    return [" ".join(part[name] for name in names) for part in parts]


def test_references_are_taken_from_images_and_files_changed_and_removed(
    visit: Visitor, screenshot: Screenshot, equipped_server: RunningServer, tmp_path: Path
) -> None:
    here = visit(equipped_server.url)
    here.set_advanced(steps=2, seed=5)
    here.write("prompt", "a fox on the beach")
    here.paint()
    expect(here.gallery()).to_have_count(1)
    here.press("use-reference")
    items = here.part("references").get_by_role("listitem")
    expect(items).to_have_count(1)
    expect(items).to_be_visible()  # the group is shown
    file = tmp_path / "own.png"
    Image.new("RGB", (96, 64), (200, 180, 90)).save(file)
    here.upload("read-reference", file)
    expect(items).to_have_count(2)
    set_reference(here, 0, scale=0.5, end=0.75)
    items.nth(1).get_by_label("Adapter").select_option("plus")
    expect_no_barrier(here)
    screenshot(here, "references")
    here.press("generate")
    expect(here.gallery()).to_have_count(2)
    here.until_rested()
    here.expect_caption("reference base 0.5, reference plus 1,")
    with_both = here.save("download", tmp_path / "both")
    assert references_in(with_both) == ["base 0.5 0 0.75", "plus 1 0 1"]
    here.page.reload()
    here.expect_ready()
    open_adapters(here)
    expect(items.first.get_by_label("Scale")).to_have_value("0.5")
    expect(items.nth(1).get_by_label("Adapter")).to_have_value("plus")
    here.press("vary")
    expect(here.gallery()).to_have_count(6)
    here.until_rested()
    here.expect_caption("reference base 0.5, reference plus 1,")  # as the image
    set_reference(here, 0, scale=9)
    here.press("generate")
    here.expect_caption("the scale of a reference is 9")
    here.part("references").get_by_role("button", name="Remove reference 1").click()
    expect(items).to_have_count(1)
    here.press("generate")
    expect(here.gallery()).to_have_count(7)
    here.until_rested()
    assert references_in(here.save("download", tmp_path / "one")) == ["plus 1 0 1"]
    here.gallery().last.click()  # painted without references
    expect(here.part("caption")).not_to_contain_text("reference")
    here.press("reuse-settings")
    expect(items).to_have_count(0)
    assert here.page.evaluate("diffserve.references()") == []


def test_buttons_pressed_in_quick_succession_all_count(visit: Visitor, equipped_server: RunningServer) -> None:
    here = visit(equipped_server.url)
    here.set_advanced(steps=2)
    here.write("prompt", "a fox on the beach")
    here.paint()
    items = here.part("references").get_by_role("listitem")
    for number in (1, 2):
        here.press("use-reference")
        expect(items).to_have_count(number)
    here.slow_down(500)
    for number in (1, 2):
        here.part("references").get_by_role("button", name=f"Remove reference {number}").click()
    for name in ("sepia", "gift"):
        here.part("lora-buttons").get_by_role("button", name=name).click()
    expect(here.field("loras")).to_have_value("sepia:1, gift:1")
    expect(items).to_have_count(0)


def test_without_adapters_a_line_says_what_to_do(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit(viewport=PHONE, has_touch=True, is_mobile=True, color_scheme="dark")
    open_adapters(here)
    here.expect_text("references-missing", "--reference-dir")
    expect(here.part("read-reference")).to_be_hidden()
    here.set_advanced(steps=2)
    here.write("prompt", "an owl")
    here.paint()
    expect(here.part("upscale")).to_be_enabled()
    expect(here.part("use-reference")).to_be_hidden()
    open_adapters(here)
    assert_fits(here)
    expect_no_barrier(here)
    screenshot(here, "no-references-phone")


def test_a_model_with_an_open_vocabulary_has_negative_presets(visit: Visitor, equipped_server: RunningServer) -> None:
    here = visit(equipped_server.url)
    here.reveal("model")
    here.field("model").click()
    here.page.get_by_role("option", name="plain").click()
    expect(here.part("about")).to_contain_text("plain on")
    open_adapters(here)
    here.field("style").click()
    here.page.get_by_role("option", name="Negative: text and watermarks").click()
    expect(here.field("negative-prompt")).to_have_value("text, watermark, signature, logo")


def test_a_control_map_is_shown_before_it_is_used(
    visit: Visitor, screenshot: Screenshot, equipped_server: RunningServer, tmp_path: Path
) -> None:
    pixels = np.full((128, 128, 3), 255, np.uint8)
    pixels[32:96, 32:96] = 0
    file = tmp_path / "square.png"
    Image.fromarray(pixels).save(file)
    here = visit(equipped_server.url)
    here.upload("read-control", file)
    expect(here.field("control-picture")).to_have_value("square.png, 128x128")
    shown = here.part("control-map").locator("img")
    expect(shown).to_be_visible()
    plain = shown.get_attribute("src")
    here.field("preprocessor").click()
    here.page.get_by_role("option", name="Edges (canny)").click()
    here.until("src => document.querySelector('#control-map img')?.src !== src", plain)
    light = here.page.evaluate("""async () => {
        const image = document.querySelector('#control-map img');
        await image.decode();
        const pen = Object.assign(document.createElement('canvas'), { width: 128, height: 128 }).getContext('2d');
        pen.drawImage(image, 0, 0, 128, 128);
        const { data } = pen.getImageData(0, 0, 128, 128);
        return data.filter((value, place) => place % 4 === 0 && value > 128).length / (128 * 128);
    }""")
    assert 0.005 < light < 0.1, "the edges of the square only"
    screenshot(here, "control-map")
    here.field("control").click()
    here.page.get_by_role("option", name="edges", exact=True).click()
    here.set_advanced(steps=2)
    here.write("prompt", "an owl")
    here.paint()
    expect(here.gallery()).to_have_count(1)
    image = here.save("download", tmp_path)
    assert "edges" in parse_infotext(read_infotext(image.read_bytes()) or "").fields["ControlNet 0"]


def test_styles_and_embeddings_add_their_words(visit: Visitor, equipped_server: RunningServer) -> None:
    here = visit(equipped_server.url)
    here.write("prompt", "an owl")
    here.reveal("style")
    here.field("style").click()
    here.page.get_by_role("option", name="Night").click()
    expect(here.field("prompt")).to_have_value("an owl at night")
    expect(here.field("negative-prompt")).to_have_value("snow")
    here.part("embeddings").get_by_role("button", name="inkstyle").click()
    expect(here.field("prompt")).to_have_value("an owl at night inkstyle")
    here.set_advanced(steps=2)
    here.paint()
    expect(here.gallery()).to_have_count(1)

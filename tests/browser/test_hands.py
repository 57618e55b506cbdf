"""Keys, drops and clicks that users try spontaneously."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from playwright.sync_api import expect

from diffserve.settings.layers import configs_dir
from diffserve.settings.quality_profile import read_profile
from tests.browser.visit import Screenshot, Visitor
from tests.service.server import SOON_S, RunningServer, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LATENCY_MS = 400
DROP = """([data, name]) => {
    const file = new File([Uint8Array.from(atob(data), each => each.charCodeAt(0))], name, { type: 'image/png' });
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(file);
    for (const kind of ['dragenter', 'dragover', 'drop'])
        document.querySelector('#title').dispatchEvent(
            new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }));
}"""
IS_BUTTON_WHOLE = """() => {
    const [box, picture] = ['#picture .icon-button-wrapper', '#picture']
        .map(name => document.querySelector(name)).map(each => each.getBoundingClientRect());
    const style = getComputedStyle(document.querySelector('#picture .icon-button-wrapper'));
    return box.top >= picture.top + 4 && box.right <= picture.right - 4
        && parseFloat(style.borderTopWidth) > 0 && parseFloat(style.borderRightWidth) > 0;
}"""
FILLS = """() => {
    const { width, height } = document.querySelector('#picture img').getBoundingClientRect();
    return Math.abs(width - innerWidth) < 2 && Math.abs(height - innerHeight) < 2;
}"""


def test_shortcuts_full_screen_and_a_dropped_image_work(
    visit: Visitor, page_server: RunningServer, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit()
    here.set_advanced(seed=3)
    here.choose("quality", "Draft")
    here.choose("aspect", "Landscape")
    here.field("prompt").fill("a penguin")
    here.field("seed").focus()
    here.page.keyboard.press("Control+Enter")
    expect(here.gallery()).to_have_count(1)
    here.until_rested()
    file = here.save("download", tmp_path)
    assert here.page.evaluate(IS_BUTTON_WHOLE), "the button of the picture is cut off at its corner"
    here.part("picture").locator("button[aria-label*=ullscreen], button[title*=ullscreen]").first.click()
    here.until(FILLS)
    screenshot(here, "full-screen")
    here.page.keyboard.press("Escape")
    here.set_advanced(steps=1000)
    assert here.part("quality").locator("input:checked").count() == 0, "steps were typed, and a quality claims others"
    here.field("prompt").fill("a crown")
    here.page.keyboard.press("Control+Enter")
    here.until_painting()
    here.page.keyboard.press("Escape")
    wait_for(lambda: page_server.num_requests() == 0, SOON_S, "the lane")
    here.until_rested()

    prompt = here.field("prompt")
    prompt.fill("an owl")
    for key, shown in (("ArrowUp", "a crown"), ("ArrowUp", "a penguin"), ("ArrowUp", "a penguin"),
                       ("ArrowDown", "a crown"), ("ArrowDown", "an owl")):  # fmt: skip
        prompt.press(key)
        expect(prompt).to_have_value(shown)

    here.page.get_by_role("tab", name="Experiment").click()
    here.page.evaluate(DROP, [base64.b64encode(file.read_bytes()).decode(), "dropped.png"])
    expect(prompt).to_have_value("a penguin")
    expect(here.field("seed")).to_have_value("3")
    points = read_profile(configs_dir() / "quality" / "embedded.toml").points
    expect(here.field("steps")).to_have_value(str(points.draft.num_steps))
    assert here.part("quality").locator("input:checked").count() == 0, "sampler and steps of the image are explicit"
    expect(here.part("aspect").locator("label.selected")).to_contain_text("Landscape")


def test_after_typing_on_a_slow_connection_the_page_sends_nothing_more(visit: Visitor) -> None:
    here, sent = visit(), list[str]()
    here.page.on("request", lambda request: sent.append(request.url))
    here.slow_down(LATENCY_MS)
    here.field("prompt").press_sequentially("an owl", delay=LATENCY_MS / 8)
    for _ in range(10):  # the first waits are for the last changes
        sent.clear()
        here.page.wait_for_timeout(4 * LATENCY_MS)
        if not sent:
            break
    assert not sent


def test_known_words_have_buttons_and_unknown_words_are_listed(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    here.choose("rewrite-mode", "Suggest")
    expect(here.part("suggest")).to_be_visible()
    here.press("suggest")
    here.expect_text("difference", "describe a picture first")
    here.choose("rewrite-mode", "Off")
    here.write("prompt", "2 doggos in teh beach")
    here.expect_text("unknown-words", "will ignore .*doggos.* and .*teh.*; try Rewrite")
    screenshot(here, "unknown-words")
    here.press("rewrite-unknown")
    expect(here.field("prompt")).to_have_value("two dogs on the beach")
    expect(here.part("unknown-words")).to_be_hidden()

    here.write("prompt", "")
    here.part("palette").get_by_role("button").first.click()
    things = here.part("palette-things")
    expect(things.get_by_role("button")).to_have_count(80)
    for name in ("fox", "beach", "cactus", "snow"):
        things.get_by_role("button", name=name, exact=True).click()
    expect(here.field("prompt")).to_have_value("a fox and a cactus in the snow")
    screenshot(here, "palette")
    for typed, name, message in (
        ("two", "cherries", "two bunches of cherries"),
        ("a fox and three", "owl", "a fox and three owls"),
        ("Two in the snow", "cactus", "Two cactuses in the snow"),
    ):
        here.field("prompt").fill(typed)
        things.get_by_role("button", name=name, exact=True).click()
        expect(here.field("prompt")).to_have_value(message)
    here.set_advanced(steps=4, seed=7)
    here.write("count", 3)
    here.press("generate")
    batch = here.part("batch").locator(".thumbnail-item img")
    expect(batch).to_have_count(3)
    expect(here.part("picture")).to_be_hidden()
    here.until_rested()
    screenshot(here, "batch")
    assert "-7." in here.download("download").suggested_filename, "the first one is selected"
    batch.nth(1).click()
    here.expect_caption(r"seed 8")
    expect(batch).to_have_count(3)
    assert "-8." in here.download("download").suggested_filename
    here.press("full-screen")
    expect(here.part("lightbox")).to_contain_text("2 of 3")
    here.page.keyboard.press("ArrowRight")
    expect(here.part("lightbox")).to_contain_text("3 of 3")
    here.page.keyboard.press("Escape")
    expect(here.part("lightbox")).to_be_hidden()
    here.press("delete")
    expect(here.part("delete")).to_contain_text("permanently?")
    here.press("delete")
    expect(batch).to_have_count(2)
    expect(here.gallery()).to_have_count(2)

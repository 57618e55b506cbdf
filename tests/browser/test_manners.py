"""Escaping of visitors' text, and the page on phones, by keyboard, and in light and dark mode."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import ViewportSize, expect

from tests.browser.visit import Screenshot, Visit, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NASTY = (
    "a <b id=bold>fox</b> <img src=x onerror=\"window.owned='image'\"> <script>window.owned='script'</script> "
    "<svg onload=\"window.owned='svg'\"> **stars** [link](javascript:window.owned=1) ![](http://192.0.2.1/spy.png) $x$ "
    "${window.owned='template'} {{#each value}}owned{{/each}} </textarea></script><h1>owned</h1>"
)
PHONE: ViewportSize = {"width": 390, "height": 844}
NARROW: ViewportSize = {"width": 360, "height": 740}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
GROWN = """() => [...document.querySelectorAll('#bold, img[src="x"], img[src*="192.0.2.1"], a[href^="javascript"]')]
    .map(element => element.outerHTML)
    .concat([...document.querySelectorAll('strong, em, .katex, script')]
        .filter(element => /stars|owned/.test(element.textContent)).map(element => element.outerHTML))"""
"""What a page that believed NASTY would have built of it."""

UNNAMED = """() => [...document.querySelectorAll('input:not([type=hidden]), textarea, button, [role=combobox]')]
    .filter(element => element.offsetParent !== null)
    .filter(element => !(element.getAttribute('aria-label') || element.getAttribute('aria-labelledby')
        || (element.labels && [...element.labels].some(label => label.innerText.trim()))
        || element.innerText.trim() || element.title || element.querySelector('img[alt]:not([alt=""])')))
    .map(element => element.outerHTML.slice(0, 200))"""
"""Visible controls without a name for who cannot see them."""

ARROWS_CUT_OFF = """() => [...document.querySelectorAll('.label-wrap .icon')]
    .map(icon => [icon.getBoundingClientRect(), icon.closest('.label-wrap').getBoundingClientRect()])
    .filter(([icon, label]) => icon.right > label.right || icon.top < label.top || icon.bottom > label.bottom)
    .map(([icon, label]) => JSON.stringify([icon, label]))"""
"""Arrows of accordions that stand out of their line."""

FOCUS = """() => {
    const element = document.activeElement, shown = getComputedStyle(element);
    const around = element.closest('label, .wrap, .block, .form') || element;
    const ring = style => style.boxShadow !== 'none'
        || (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0);
    return {
        part: [...document.querySelectorAll('[id]')].filter(each => each.contains(element)).map(each => each.id),
        visible: ring(shown) || ring(getComputedStyle(around)),
        html: element.outerHTML.slice(0, 160) };
}"""


def assert_inert(here: Visit) -> None:
    assert here.page.evaluate("window.owned") is None
    assert here.page.evaluate(GROWN) == []


def assert_fits(here: Visit) -> None:
    """Check that nothing is wider than the window."""
    wide = here.page.evaluate("""() => [document.documentElement.scrollWidth, window.innerWidth]""")
    assert wide[0] <= wide[1], f"the page is {wide[0]} px wide in a window of {wide[1]} px"


def contrast(first: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Return the WCAG contrast ratio of two colors, 1 to 21."""

    def luminance(color: NDArray[np.uint8]) -> float:
        share = color / 255.0
        linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    darker, lighter = sorted((luminance(first), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def tab_to(here: Visit, name: str, max_presses: int = 60) -> None:
    """Press Tab until the focus is within ``name``.

    Every control on the way must show its focus, in light and dark mode.
    """
    for _ in range(max_presses):
        here.page.keyboard.press("Tab")
        for scheme in SCHEMES:
            here.page.emulate_media(color_scheme=scheme)
            focus = here.page.evaluate(FOCUS)
            if focus["part"]:
                assert focus["visible"], f"no sign of the focus in the {scheme} on {focus['html']}"
        if name in focus["part"]:
            return
    raise AssertionError(f"{name} was not reached with {max_presses} presses of Tab")


def test_text_of_visitors_is_escaped(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    here.choose("rewrite-mode", "Suggest")
    here.set_advanced(steps=4, negative_prompt=NASTY)
    here.write("prompt", NASTY)
    here.press("suggest")
    expect(here.part("difference")).to_contain_text("the prompt was left as it is")  # and the words that are unknown
    assert_inert(here)
    here.choose("rewrite-mode", "Auto")
    here.paint()
    expect(here.gallery()).to_have_count(1)
    here.gallery().click()
    screenshot(here, "inert")
    assert_inert(here)


def test_text_of_visitors_in_an_experiment_is_escaped(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    here.page.get_by_role("tab", name="Experiment").click()
    here.pick("exp-samplers", "DDIM")
    here.write("exp-steps", "1, 2")
    here.write("exp-prompts", NASTY)
    here.write("exp-seeds", 1)
    here.write("exp-reference-steps", 3)
    here.expect_text("exp-estimate", r"2 combinations of sampler and steps, 1 image each, and 1 converged one: about")
    here.press("exp-run")
    expect(here.part("exp-grid")).to_contain_text("**stars**")
    expect(here.part("exp-stop")).to_be_hidden()
    screenshot(here, "inert-experiment")
    assert_inert(here)
    here.write("exp-steps", NASTY)
    expect(here.part("exp-estimate")).to_contain_text("which is not a whole number")
    assert_inert(here)


def test_a_phone_shows_everything_without_scrolling_sideways(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit(viewport=PHONE, has_touch=True, is_mobile=True)
    assert_fits(here)
    here.set_advanced(steps=4)
    here.choose("rewrite-mode", "Suggest")
    here.write("prompt", "a fox next to a cactus on the beach")
    assert_fits(here)
    here.page.evaluate("scrollTo(0, 0)")
    here.paint()
    expect(here.part("picture").locator("img").first).to_be_in_viewport(ratio=0.5)  # above the settings
    assert_fits(here)
    screenshot(here, "phone-create")
    here.page.get_by_role("tab", name="Experiment").click()
    expect(here.part("exp-run")).to_be_visible()
    assert_fits(here)
    screenshot(here, "phone-experiment")


def test_sliders_have_contrast_and_arrows_are_complete_on_a_narrow_phone(
    visit: Visitor, screenshot: Screenshot
) -> None:
    here = visit(viewport=NARROW, has_touch=True, is_mobile=True)
    assert here.page.evaluate(ARROWS_CUT_OFF) == []
    here.write("count", 4)
    slider = here.part("count").locator("input[type=range]")
    slider.scroll_into_view_if_needed()
    for scheme in SCHEMES:
        here.page.emulate_media(color_scheme=scheme)
        screenshot(here, f"phone-slider-{scheme}")
        pixels = np.asarray(Image.open(io.BytesIO(slider.screenshot(animations="disabled"))).convert("RGB"))
        middle, width = pixels[len(pixels) // 2], pixels.shape[1]
        parts = {"filled": 0.1, "thumb": 3 / 9, "rail": 0.8}
        ground = pixels[0, width // 2]
        contrasts = {name: contrast(middle[round(share * width)], ground) for name, share in parts.items()}
        assert min(contrasts.values()) >= 3.0, f"WCAG asks for 3 to 1 in the {scheme}: {contrasts}"
        edge = middle[round(3 / 9 * width) - 40 : round(3 / 9 * width) + 40]
        assert (edge == ground).all(axis=1).any(), "a gap around the thumb"


def test_an_image_can_be_generated_by_keyboard_alone(visit: Visitor, screenshot: Screenshot) -> None:
    here = visit()
    here.page.set_viewport_size(PHONE)
    tab_to(here, "prompt")
    here.page.keyboard.type("a penguin")
    here.page.keyboard.press("Enter")
    here.until_rested()
    expect(here.gallery()).to_have_count(1)
    tab_to(here, "groups")
    here.page.keyboard.press("Tab")  # gradio makes each choice a stop of its own
    here.page.keyboard.press("Space")
    expect(here.field("steps")).to_be_visible()
    tab_to(here, "steps")
    tab_to(here, "sampler")
    screenshot(here, "keyboard")
    assert here.page.evaluate(UNNAMED) == []

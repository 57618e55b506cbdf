"""Prompt rewriting in the browser: suggested and edited, or automatic and reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from diffserve.media.images import read_infotext
from diffserve.media.infotext import parse_infotext
from tests.browser.visit import Screenshot, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.slow]

WISH = "pls draw me 2 doggos chillin on teh beach"
MEANT = "two dogs on the beach"


def prompt_in(path: Path) -> str:
    text = read_infotext(path.read_bytes())
    assert text is not None
    return parse_infotext(text).prompt


def test_generate_paints_the_suggestion_after_showing_it_until_undone(
    visit: Visitor, screenshot: Screenshot, tmp_path: Path
) -> None:
    here = visit()
    here.choose("rewrite-mode", "Suggest")
    here.write("prompt", WISH)
    here.expect_text("rewrite-note", "Generate rewrites the prompt, shows the changes, then paints")
    here.set_advanced(steps=10)
    here.paint()
    expect(here.field("prompt")).to_have_value(MEANT)
    here.expect_text("difference", r"doggos.*two")
    screenshot(here, "suggested")
    assert prompt_in(here.save("download", tmp_path)) == MEANT
    expect(here.part("revert")).to_be_visible()
    here.write("prompt", "a fox")
    expect(here.part("revert")).to_be_hidden()
    expect(here.part("difference")).not_to_contain_text("doggos")
    here.write("prompt", MEANT)
    expect(here.part("revert")).to_be_visible()
    here.press("revert")
    expect(here.field("prompt")).to_have_value(WISH)
    here.set_advanced(steps=1)
    here.paint()
    expect(here.gallery()).to_have_count(2)
    here.until_rested()
    here.expect_caption("1 step,")
    assert prompt_in(here.save("download", tmp_path)) == WISH, "an undone rewrite is not repeated"


def test_a_prompt_is_rewritten_without_painting_and_edited(visit: Visitor) -> None:
    here = visit()
    here.choose("rewrite-mode", "Suggest")
    here.write("prompt", WISH)
    here.press("suggest")
    expect(here.field("prompt")).to_have_value(MEANT)
    expect(here.gallery()).to_have_count(0)
    here.press("revert")
    expect(here.field("prompt")).to_have_value(WISH)
    expect(here.part("revert")).to_be_hidden()


def test_auto_shows_the_prompt_that_was_used(visit: Visitor, screenshot: Screenshot, tmp_path: Path) -> None:
    here = visit()
    here.choose("rewrite-mode", "Auto")
    here.set_advanced(steps=10)
    here.write("prompt", WISH)
    here.paint()
    here.expect_text("painted-from", re.escape(MEANT))
    expect(here.field("prompt")).to_have_value(WISH)
    screenshot(here, "auto")
    assert prompt_in(here.save("download", tmp_path)) == MEANT

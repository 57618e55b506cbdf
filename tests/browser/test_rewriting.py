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


def test_a_suggestion_is_edited_and_used(visit: Visitor, screenshot: Screenshot, tmp_path: Path) -> None:
    here = visit()
    here.choose("rewrite-mode", "Suggest")
    here.write("prompt", WISH)
    here.press("suggest")
    expect(here.field("suggestion")).to_have_value(MEANT)
    here.expect_text("difference", r"doggos.*two")
    screenshot(here, "suggested")
    here.write("suggestion", "three dogs on the beach")
    here.expect_text("rewrite-note", "uses the prompt above; accept a suggestion")
    here.set_advanced(steps=1)
    here.paint()
    assert prompt_in(here.save("download", tmp_path)) == WISH, "it was not accepted"
    here.press("accept")
    expect(here.field("prompt")).to_have_value("three dogs on the beach")
    here.set_advanced(steps=10)
    here.paint()
    expect(here.gallery()).to_have_count(2)
    here.until_rested()
    here.expect_caption("10 steps")
    screenshot(here, "suggested-edited-painted")
    assert prompt_in(here.save("download", tmp_path)) == "three dogs on the beach"


def test_a_suggestion_can_be_taken_back(visit: Visitor) -> None:
    here = visit()
    here.choose("rewrite-mode", "Suggest")
    here.write("prompt", WISH)
    here.press("suggest")
    expect(here.field("suggestion")).to_have_value(MEANT)
    here.press("accept")
    expect(here.field("prompt")).to_have_value(MEANT)
    expect(here.part("accept")).to_be_hidden()  # it disappears after the text arrives, which moves everything below
    here.press("revert")
    expect(here.field("prompt")).to_have_value(WISH)


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

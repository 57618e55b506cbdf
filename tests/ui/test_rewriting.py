"""What stands below a suggestion that is edited."""

from __future__ import annotations

import gradio as gr
import pytest

from ui.captions import status
from ui.rewriting import compare
from ui.word_difference import difference_html

WISH = "a <small> fox"
SAID = status("Your own words are a good prompt already.")


@pytest.mark.parametrize("said", [None, "", SAID, difference_html(WISH, "a cat")])
def test_an_edit_shows_what_changed(said: str | None) -> None:
    shown, accept = compare(WISH, "a <small> red fox", said)
    assert "<ins>red </ins>" in shown
    assert accept["interactive"]


@pytest.mark.parametrize("said", [None, "", difference_html(WISH, "a <small> red fox")])
def test_an_edit_that_is_taken_back_leaves_no_marks(said: str | None) -> None:
    shown, _ = compare(WISH, WISH, said)
    assert shown == "a &lt;small&gt; fox"


def test_what_is_said_of_a_wish_that_is_a_good_prompt_stays() -> None:
    shown, _ = compare(WISH, WISH, SAID)
    assert shown == gr.skip()


def test_an_empty_suggestion_has_no_difference_and_cannot_be_accepted() -> None:
    shown, accept = compare(WISH, " ", difference_html(WISH, "a cat"))
    assert (shown, accept["interactive"]) == ("", False)

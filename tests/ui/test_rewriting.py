"""The status below a suggested prompt while it is edited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import gradio as gr
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import MAX_PROMPT_CHARS
from diffserve.client import Rewrites, RewrittenPrompt
from tests.ui.gradio_request import Request
from ui.captions import status
from ui.create.rewriting import Rewriting, accept, choose, compare, difference_html

WISH = "a <small> fox"
SAID = status("The prompt is already good.")


@pytest.mark.parametrize("suggestion", [None, "", SAID, difference_html(WISH, "a cat")])
def test_an_edit_shows_what_changed(suggestion: str | None) -> None:
    shown, accept = compare(WISH, "a <small> red fox", suggestion)
    assert "<ins>red </ins>" in shown
    assert accept["visible"]


@pytest.mark.parametrize("suggestion", [None, "", difference_html(WISH, "a <small> red fox")])
def test_a_reverted_edit_leaves_no_marks(suggestion: str | None) -> None:
    shown, accept = compare(WISH, WISH, suggestion)
    assert (shown, accept["visible"]) == ("a &lt;small&gt; fox", False)


def test_a_warning_about_a_wish_that_is_a_good_prompt_stays() -> None:
    shown, _ = compare(WISH, WISH, SAID)
    assert shown == gr.skip()


def test_an_empty_suggestion_has_no_difference_and_cannot_be_accepted() -> None:
    shown, accept = compare(WISH, " ", difference_html(WISH, "a cat"))
    assert (shown, accept["visible"]) == ("", False)


def test_the_rewriter_choice_describes_how_a_suggestion_is_used() -> None:
    panel, note = choose("Suggest")
    assert panel["visible"]
    assert "uses the prompt above" in note
    assert choose("Off")[1] == ""


TOO_LONG = "x" * (MAX_PROMPT_CHARS + 1)


def test_a_text_that_is_too_long_is_neither_compared_nor_accepted() -> None:
    for event in (lambda: compare(WISH, TOO_LONG, ""), lambda: accept(TOO_LONG, WISH), lambda: accept(WISH, TOO_LONG)):
        with pytest.raises(InvalidRequest, match="32001 characters; at most 32000"):
            event()


def test_a_too_long_wish_is_refused_and_not_stored() -> None:
    async def suggest() -> list[tuple[Any, ...]]:
        events = Rewriting(None, None)  # type: ignore[arg-type]
        return [shown async for shown in events.suggest(TOO_LONG, Request())]  # type: ignore[arg-type]

    [(suggestion, message, _, _, wish)] = asyncio.run(suggest())
    assert (suggestion, wish) == ("", gr.skip())
    assert "32001 characters" in message


class Refusing:
    """A rewriter that returns every wish unchanged."""

    client: Refusing

    def __init__(self) -> None:
        self.client = self

    @asynccontextmanager
    async def rewrite_stream(self, wish: str) -> AsyncIterator[AsyncIterator[Rewrites]]:
        async def events() -> AsyncIterator[Rewrites]:
            left = RewrittenPrompt(prompt=wish, revised_prompt=None, warning="the rewriter declined")
            yield Rewrites(id="", created=0, model="", style="", prompts=(left,), usage=None, timings=None)  # type: ignore[arg-type]

        yield events()


@pytest.mark.parametrize(("wish", "message"), [(" ", "Describe a picture first"), (WISH, "The rewriter declined.")])
def test_without_a_suggestion_nothing_can_be_accepted(wish: str, message: str) -> None:
    async def last() -> tuple[object, ...]:
        events = Rewriting(Refusing(), None)  # type: ignore[arg-type]
        return [moment async for moment in events.suggest(wish, Request())][-1]  # type: ignore[arg-type]

    _, text, can_accept, can_revert, _ = asyncio.run(last())
    assert message in str(text)
    assert can_accept == can_revert == gr.update(visible=False)


def test_an_accepted_suggestion_cannot_be_accepted_again() -> None:
    prompt, can_accept, can_revert = accept("a cat", WISH)
    assert (prompt, can_accept["visible"], can_revert["visible"]) == ("a cat", False, True)
    assert accept("a cat", "a cat")[0] == "a cat"

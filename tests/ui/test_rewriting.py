"""A rewrite replaces the prompt at its end and can be undone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import gradio as gr
import pytest

from diffserve.api.types import MAX_PROMPT_CHARS
from diffserve.client import Rewrites, RewrittenPrompt
from tests.ui.gradio_request import Request
from ui.create.rewriting import HIDDEN, SHOWN, Rewriting, Rewritten, choose, difference_html, shown
from ui.visitors import Visitors

WISH = "a <small> fox"
TOKEN = "0" * 32


def test_the_rewriter_choice_describes_how_a_suggestion_is_used() -> None:
    panel, note = choose("Suggest")
    assert panel["visible"]
    assert "shows the changes, then paints" in note
    assert choose("Off")[1] == ""


TOO_LONG = "x" * (MAX_PROMPT_CHARS + 1)


def test_a_too_long_wish_is_refused_and_not_stored() -> None:
    async def suggest() -> list[tuple[Any, ...]]:
        events = Rewriting(None, Visitors(), None)  # type: ignore[arg-type]
        return [shown async for shown in events.suggest(TOO_LONG, Request())]  # type: ignore[arg-type]

    [(prompt, message, undo)] = asyncio.run(suggest())
    assert (prompt, undo["visible"]) == (gr.skip(), False)
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
def test_without_a_suggestion_the_prompt_stays(wish: str, message: str) -> None:
    async def last() -> tuple[Any, ...]:
        events = Rewriting(Refusing(), Visitors(), None)  # type: ignore[arg-type]
        return [moment async for moment in events.suggest(wish, Request())][-1]  # type: ignore[arg-type]

    prompt, text, undo = asyncio.run(last())
    assert message in str(text)
    assert (prompt, undo["visible"]) == (gr.skip(), False)


def test_a_rewrite_changes_the_prompt_at_its_end_and_is_not_repeated() -> None:
    async def run() -> None:
        visitors = Visitors()
        visitor = visitors.of(Request.session_hash)
        partial_updates = shown(visitor, WISH, Rewritten(WISH, "a <ins>red", is_done=False))
        assert "prompt" not in partial_updates, "the visitor may still type"
        final_updates = shown(visitor, WISH, Rewritten("a red fox", difference_html(WISH, "a red fox"), is_done=True))
        assert (final_updates["prompt"], final_updates["undo"]["visible"]) == ("a red fox", True)
        assert "<ins>red </ins>" in final_updates["difference"]
        assert visitor.is_settled("a red fox")
        prompt, _, undo = await Rewriting(None, visitors, None).undo(Request())  # type: ignore[arg-type]
        assert (prompt, undo["visible"]) == (WISH, False)
        assert visitor.is_settled(WISH), "Generate paints it as it is"
        assert not visitor.is_settled("a dog")

    asyncio.run(run())


def test_undo_and_the_changes_are_shown_while_the_prompt_is_the_rewrite() -> None:
    async def run() -> None:
        visitors, request = Visitors(), Request()
        events = Rewriting(None, visitors, None)  # type: ignore[arg-type]
        unchanged = (gr.skip(), gr.skip())
        for prompt in ("", WISH, None):
            assert await events.look(prompt, request) == unchanged  # type: ignore[arg-type]
        visitor = visitors.arrive(Request.session_hash, TOKEN)
        assert visitor is visitors.arrive("after a reload", TOKEN), "a change before the arrival makes no visitor"
        marked = difference_html(WISH, "a red fox")
        shown(visitor, WISH, Rewritten("a red fox", marked, is_done=True))
        assert await events.look("a red fox", request) == (marked, SHOWN)  # type: ignore[arg-type]
        for prompt in ("a red fo", "a dog", WISH, "", None):
            assert await events.look(prompt, request) == ("", HIDDEN)  # type: ignore[arg-type]
        assert await events.look("a red fox", request) == (marked, SHOWN)  # type: ignore[arg-type]
        declined = shown(visitor, "a dog", Rewritten("a dog", "it is good", is_done=True))
        assert declined == {"difference": "it is good", "undo": HIDDEN}
        assert await events.look("a dog", request) == unchanged, "a late change leaves the reason"  # type: ignore[arg-type]

    asyncio.run(run())

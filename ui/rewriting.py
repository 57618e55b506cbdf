"""Off, Suggest, Auto: a suggestion that is written word by word, compared with the wish, and taken or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import gradio as gr

from diffserve.client import RewriteDelta, Rewrites
from diffserve.errors import DiffserveError
from ui.captions import status
from ui.create import CreateTab
from ui.events import PRIVATE
from ui.server import Server, sentence
from ui.word_difference import difference_html, is_marked

NOTES: Final = {
    "Off": "",
    "Suggest": "",
    "Auto": "The language model turns your words into a prompt before they are painted.",
}
Update = Any  # a value of a component, or what gr.update gives


class Rewriting:
    """The events of the rewriter's part, for all visitors."""

    def __init__(self, server: Server, tab: CreateTab) -> None:
        self._server = server
        self._tab = tab

    def connect(self) -> None:
        """Bind everything, within the page's context. ``wish`` remembers what stood in the prompt."""
        tab, wording = self._tab, self._tab.wording
        wish = gr.State("")
        tab.fields.rewrite_mode.change(choose, tab.fields.rewrite_mode, [wording.panel, wording.note], **PRIVATE)
        wording.suggest.click(
            self.suggest,
            tab.fields.prompt,
            [wording.suggestion, wording.difference, wording.accept, wording.revert, wish],
            api_name="suggest",
            show_progress="hidden",
            trigger_mode="once",
            concurrency_limit=None,
        )
        gr.on(
            [wording.suggestion.input, wording.suggestion.blur],  # gradio misses the first change after its own
            compare,
            [wish, wording.suggestion, wording.difference],
            [wording.difference, wording.accept],
            trigger_mode="always_last",
            **PRIVATE,
        )
        gr.on(
            [wording.accept.click, wording.suggestion.submit],
            accept,
            [wording.suggestion, tab.fields.prompt],
            [tab.fields.prompt, wording.revert],
            **PRIVATE,
        )
        wording.revert.click(
            revert,
            wish,
            [tab.fields.prompt, wording.suggestion, wording.difference, wording.accept, wording.revert],
            **PRIVATE,
        )

    async def suggest(self, prompt: str) -> AsyncIterator[tuple[Update, ...]]:
        """(suggestion, difference, accept, revert, wish), again and again while the words come."""
        written = ""
        off = gr.update(interactive=False)
        try:
            async with self._server.client.rewrite_stream(prompt) as events:
                async for event in events:
                    if isinstance(event, RewriteDelta) and event.index == 0:
                        written += event.text
                        yield written, difference_html(prompt, written), off, off, prompt
                    elif isinstance(event, Rewrites):
                        yield *_suggested(prompt, event), prompt
        except DiffserveError as error:
            yield gr.skip(), status(sentence(error), is_error=True), off, off, prompt


def choose(mode: str) -> tuple[Update, str]:
    """Show what belongs to the ``mode``."""
    return gr.update(visible=mode == "Suggest"), NOTES.get(mode, "")


def compare(wish: str, suggestion: str, said: str | None) -> tuple[Update, Update]:
    """The difference after an edit. What was ``said`` of a suggestion that is the wish itself stays, but for the marks
    of an edit that was taken back."""
    is_settled = suggestion == wish and bool(said) and not is_marked(said or "")
    shown = gr.skip() if is_settled else difference_html(wish, suggestion) if suggestion.strip() else ""
    return shown, gr.update(interactive=bool(suggestion.strip()))


def accept(suggestion: str, prompt: str) -> tuple[str, Update]:
    """The suggestion becomes the prompt; an empty one does not."""
    if not suggestion.strip():
        return prompt, gr.skip()
    return suggestion, gr.update(interactive=True)


def revert(wish: str) -> tuple[str, str, str, Update, Update]:
    """The wish is the prompt again, and the suggestion is gone."""
    off = gr.update(interactive=False)
    return wish, "", "", off, off


def _suggested(wish: str, answer: Rewrites) -> tuple[Update, ...]:
    """What the finished answer shows: the first prompt, or why the wish is better left as it is."""
    first, on = answer.prompts[0], gr.update(interactive=True)
    off = gr.update(interactive=False)
    if first.revised_prompt is None:
        why = first.warning or "Your own words are a good prompt already."
        return wish, status(why), off, off
    return first.revised_prompt, difference_html(wish, first.revised_prompt), on, off

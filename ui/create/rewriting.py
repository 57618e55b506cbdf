"""Off, Suggest, Auto: a suggestion that is written word by word, compared with the wish, and taken or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import gradio as gr

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.client import RewriteDelta, Rewrites
from ui.captions import status
from ui.create.layout import CreateTab
from ui.create.word_difference import difference_html, is_marked
from ui.events import PRIVATE, SILENT
from ui.fields import check_text
from ui.server import Server, sentence, whole
from ui.visitors import ask_for_visitor

NOTHING_TO_REWRITE: Final = "Say first what you would like to see; then it can be put into better words."
NOTES: Final = {
    "Off": "",
    "Suggest": "Generate paints what stands in the prompt; a suggestion gets there once you accept it.",
    "Auto": "The language model turns your words into a prompt before they are painted.",
}
EDITABLE: Final = "() => ({{__type__: 'update', interactive: {}}})"
"""What somebody types into a suggestion that is still being written would be written over."""

Update = Any  # a value of a component, or what gr.update gives
HIDDEN: Final[Update] = gr.update(visible=False)


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
        asked = [wording.suggest.click, tab.palette.rewrite.click]
        gr.on(asked, js=EDITABLE.format("false"), outputs=wording.suggestion, **SILENT)
        suggested = gr.on(
            asked,
            self.suggest,
            tab.fields.prompt,
            [wording.suggestion, wording.difference, wording.accept, wording.revert, wish],
            api_name="suggest",
            show_progress="hidden",
            trigger_mode="once",
            concurrency_limit=None,
        )
        suggested.then(js=EDITABLE.format("true"), outputs=wording.suggestion, **SILENT)
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
            [tab.fields.prompt, wording.accept, wording.revert],
            **PRIVATE,
        )
        wording.revert.click(
            revert,
            wish,
            [tab.fields.prompt, wording.suggestion, wording.difference, wording.accept, wording.revert],
            **PRIVATE,
        )

    async def suggest(self, prompt: str | None, request: gr.Request) -> AsyncIterator[tuple[Update, ...]]:
        """(suggestion, difference, accept, revert, wish), again and again while the words come."""
        written, prompt = "", prompt or ""
        try:
            check_text(prompt, "prompt")
        except InvalidRequest as error:
            yield *_nothing(sentence(error), is_error=True), gr.skip()
            return
        if not prompt.strip():
            yield *_nothing(NOTHING_TO_REWRITE), prompt
            return
        ask_for_visitor(request)
        try:
            async with self._server.client.rewrite_stream(prompt) as events:
                async for event in events:
                    if isinstance(event, RewriteDelta) and event.index == 0:
                        written += event.text
                        yield *_offered(prompt, written, is_done=False), prompt
                    elif isinstance(event, Rewrites):
                        yield *_suggested(prompt, event), prompt
        except DiffserveError as error:
            yield *_nothing(sentence(error), is_error=True), prompt


def choose(mode: str) -> tuple[Update, str]:
    """Show what belongs to the ``mode``."""
    return gr.update(visible=mode == "Suggest"), NOTES.get(mode, "")


def compare(wish: str, suggestion: str, said: str | None) -> tuple[Update, Update]:
    """The difference after an edit. What was ``said`` of a suggestion that is the wish itself stays, but for the marks
    of an edit that was taken back. What would change nothing cannot be accepted. InvalidRequest for a text that is too
    long to be a prompt.
    """
    check_text(suggestion, "suggestion")
    is_settled = suggestion == wish and bool(said) and not is_marked(said or "")
    shown = gr.skip() if is_settled else difference_html(wish, suggestion) if suggestion.strip() else ""
    return shown, gr.update(visible=_is_new(wish, suggestion))


def accept(suggestion: str, prompt: str) -> tuple[str, Update, Update]:
    """The suggestion becomes the prompt, and there is nothing left to accept; an empty one does not. InvalidRequest for
    one that is too long to be a prompt.
    """
    check_text(suggestion, "suggestion")
    check_text(prompt, "prompt")
    if not _is_new(prompt, suggestion):
        return prompt, gr.skip(), gr.skip()
    return suggestion, gr.update(visible=False), gr.update(visible=True)


def revert(wish: str) -> tuple[str, str, str, Update, Update]:
    """The wish is the prompt again, and the suggestion is gone."""
    return wish, "", "", HIDDEN, HIDDEN


def _is_new(wish: str, suggestion: str) -> bool:
    return bool(suggestion.strip()) and suggestion != wish


def _offered(wish: str, suggestion: str, *, is_done: bool) -> tuple[Update, ...]:
    """(suggestion, difference, accept, revert) of a suggestion; while it is being written it cannot be accepted."""
    accept = gr.update(visible=is_done and _is_new(wish, suggestion))
    return suggestion, difference_html(wish, suggestion), accept, HIDDEN


def _nothing(why: str, *, is_error: bool = False) -> tuple[Update, ...]:
    """(suggestion, difference, accept, revert) where nothing is suggested: there is nothing to be pressed."""
    return "", status(why, is_error=is_error), HIDDEN, HIDDEN


def _suggested(wish: str, answer: Rewrites) -> tuple[Update, ...]:
    """What the finished answer shows: the first prompt, or the wish and why it is better left as it is."""
    first = answer.prompts[0]
    if first.revised_prompt is None:
        return wish, status(whole(first.warning or "your own words are a good prompt already")), HIDDEN, HIDDEN
    return _offered(wish, first.revised_prompt, is_done=True)

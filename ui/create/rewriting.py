"""Prompt rewriting on the page: a streamed suggestion, its difference to the prompt, accept and revert."""

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
from ui.server import Server, as_sentence, sentence
from ui.visitors import ask_for_visitor

NOTHING_TO_REWRITE: Final = "Describe an image first, then it can be rewritten."
NOTES: Final = {
    "Off": "",
    "Suggest": "Generate uses the prompt above; accept a suggestion to use it.",
    "Auto": "The language model rewrites your prompt before generating.",
}
EDITABLE: Final = "() => ({{__type__: 'update', interactive: {}}})"
"""Locks the suggestion while it is streamed, because typed text would be overwritten."""

Update = Any  # a value of a component, or what gr.update gives
HIDDEN: Final[Update] = gr.update(visible=False)


class Rewriting:
    """Events of the prompt rewriter, shared by all visitors."""

    def __init__(self, server: Server, tab: CreateTab) -> None:
        self._server = server
        self._tab = tab

    def connect(self) -> None:
        """Bind all events; call it inside the page's context. ``wish`` stores the original prompt."""
        tab, wording = self._tab, self._tab.wording
        wish = gr.State("")
        tab.fields.rewrite_mode.change(choose, tab.fields.rewrite_mode, [wording.panel, wording.note], **PRIVATE)
        suggest_clicks = [wording.suggest.click, tab.palette.rewrite.click]
        gr.on(suggest_clicks, js=EDITABLE.format("false"), outputs=wording.suggestion, **SILENT)
        suggested = gr.on(
            suggest_clicks,
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
            [wording.suggestion.input, wording.suggestion.blur],  # gradio misses the first change after its own update
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
        """Yield (suggestion, difference, accept, revert, wish) while the suggestion is streamed."""
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
    """Return updates that show the controls and the note of ``mode``."""
    return gr.update(visible=mode == "Suggest"), NOTES.get(mode, "")


def compare(wish: str, suggestion: str, note: str | None) -> tuple[Update, Update]:
    """Return updates after an edit of the suggestion: the difference, and whether it can be accepted.

    A note about an unchanged suggestion stays.

    Raises:
        InvalidRequest: The suggestion is too long.
    """
    check_text(suggestion, "suggestion")
    is_settled = suggestion == wish and bool(note) and not is_marked(note or "")
    shown = gr.skip() if is_settled else difference_html(wish, suggestion) if suggestion.strip() else ""
    return shown, gr.update(visible=_is_new(wish, suggestion))


def accept(suggestion: str, prompt: str) -> tuple[str, Update, Update]:
    """Replace the prompt by the suggestion unless it is empty.

    Raises:
        InvalidRequest: The suggestion is too long.
    """
    check_text(suggestion, "suggestion")
    check_text(prompt, "prompt")
    if not _is_new(prompt, suggestion):
        return prompt, gr.skip(), gr.skip()
    return suggestion, gr.update(visible=False), gr.update(visible=True)


def revert(wish: str) -> tuple[str, str, str, Update, Update]:
    """Restore the original prompt and remove the suggestion."""
    return wish, "", "", HIDDEN, HIDDEN


def _is_new(wish: str, suggestion: str) -> bool:
    return bool(suggestion.strip()) and suggestion != wish


def _offered(wish: str, suggestion: str, *, is_done: bool) -> tuple[Update, ...]:
    """Return (suggestion, difference, accept, revert); a suggestion that is still streamed cannot be accepted."""
    accept = gr.update(visible=is_done and _is_new(wish, suggestion))
    return suggestion, difference_html(wish, suggestion), accept, HIDDEN


def _nothing(why: str, *, is_error: bool = False) -> tuple[Update, ...]:
    """Return (suggestion, difference, accept, revert) for no suggestion, with the reason."""
    return "", status(why, is_error=is_error), HIDDEN, HIDDEN


def _suggested(wish: str, answer: Rewrites) -> tuple[Update, ...]:
    """Return the updates for the final answer: its first prompt, or the original one and the reason."""
    first = answer.prompts[0]
    if first.revised_prompt is None:
        return wish, status(as_sentence(first.warning or "the prompt is already good")), HIDDEN, HIDDEN
    return _offered(wish, first.revised_prompt, is_done=True)

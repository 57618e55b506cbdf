"""Prompt rewriting on the page: a streamed suggestion, its difference to the prompt, accept and revert."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import groupby, islice
from typing import Any, Final, Literal, NamedTuple

import gradio as gr

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.client import RewriteDelta, Rewrites
from ui.captions import status
from ui.create.layout import CreateTab
from ui.events import PRIVATE, SILENT
from ui.fields import check_text
from ui.server import Server, as_sentence, sentence
from ui.visitors import ask_for_visitor

Kind = Literal["same", "added", "removed"]
MAX_WORDS: Final = 1000
MAX_CHARS: Final = 32 * MAX_WORDS
"""Longer texts are not compared: it would take seconds."""

_WORDS = re.compile(r"\w+(?:['’-]\w+)*\s*|[^\w\s]\s*|\s+")


class WordRun(NamedTuple):
    """A run of words that is in both texts, only in the new one, or only in the old one."""

    kind: Kind
    text: str


def difference(old: str, new: str) -> tuple[WordRun, ...]:
    """Return runs of words in order: without "added" runs they form ``old``, without "removed" runs ``new``.

    Spaces are not compared; between words of both texts they come from ``new``.
    """
    unaligned = (WordRun("same", new),) if old == new else (WordRun("removed", old), WordRun("added", new))
    if max(len(old), len(new)) > MAX_CHARS:
        return unaligned
    before, after = _words(old), _words(new)
    if max(len(before), len(after)) > MAX_WORDS:
        return unaligned
    return tuple(_joined(_compared(before, after)))


def difference_html(old: str, new: str) -> str:
    """Return the difference as escaped HTML with <del> and <ins>."""
    marks = {"same": "{}", "added": "<ins>{}</ins>", "removed": "<del>{}</del>"}
    return "".join(marks[piece.kind].format(html.escape(piece.text)) for piece in difference(old, new))


def is_marked(markup: str) -> bool:
    """Return whether ``markup`` from ``difference_html`` has changes."""
    return "<del>" in markup or "<ins>" in markup


def _words(text: str) -> list[str]:
    """Split ``text`` into words with the following spaces, at most ``MAX_WORDS`` + 1."""
    return [match[0] for match in islice(_WORDS.finditer(text), MAX_WORDS + 1)]


def _compared(before: list[str], after: list[str]) -> Iterator[WordRun]:
    matcher = difflib.SequenceMatcher(None, [*map(str.strip, before)], [*map(str.strip, after)], autojunk=False)
    for tag, start, end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            yield WordRun("same", "".join(after[new_start:new_end]))
            continue
        yield WordRun("removed", _apart("".join(before[start:end]), new_end > new_start))
        yield WordRun("added", _apart("".join(after[new_start:new_end]), new_end < len(after)))


def _apart(text: str, goes_on: bool) -> str:
    """Append a space to ``text`` if another word would follow it directly."""
    return f"{text} " if text and goes_on and text[-1].isalnum() else text


def _joined(pieces: Iterable[WordRun]) -> Iterator[WordRun]:
    """Drop empty runs and join neighbors of the same kind."""
    for kind, run in groupby((piece for piece in pieces if piece.text), key=lambda piece: piece.kind):
        yield WordRun(kind, "".join(piece.text for piece in run))


NOTHING_TO_REWRITE: Final = "Describe a picture first; then the prompt can be rewritten."
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

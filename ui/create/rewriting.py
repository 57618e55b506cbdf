"""Prompt rewriting on the page: the streamed rewrite, its difference to the prompt, and undo."""

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
from ui.events import LATEST, PRIVATE
from ui.fields import check_text
from ui.server import Server, as_sentence, sentence
from ui.visitors import Visitor, Visitors, ask_for_visitor

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
    "Suggest": "Generate rewrites the prompt, shows the changes, then paints.",
    "Auto": "Each request is rewritten before painting; your prompt stays as it is.",
}

Update = Any  # a value of a component, or what gr.update gives


class Rewritten(NamedTuple):
    """State of a rewrite: the prompt to use, the difference as HTML, and whether the rewrite is finished."""

    prompt: str
    difference: str
    is_done: bool


async def rewritten(server: Server, wish: str) -> AsyncIterator[Rewritten]:
    """Yield the states of the rewrite of ``wish``; a rewrite that fails ends with ``wish`` and the reason."""
    if not wish.strip():
        yield Rewritten(wish, status(NOTHING_TO_REWRITE), is_done=True)
        return
    text = ""
    try:
        async with server.client.rewrite_stream(wish) as events:
            async for event in events:
                if isinstance(event, RewriteDelta) and event.index == 0:
                    text += event.text
                    yield Rewritten(wish, difference_html(wish, text), is_done=False)
                elif isinstance(event, Rewrites):
                    first = event.prompts[0]
                    if first.revised_prompt is None or first.revised_prompt == wish:
                        reason = as_sentence(first.warning or "the prompt is already good")
                        yield Rewritten(wish, status(reason), is_done=True)
                    else:
                        marked = difference_html(wish, first.revised_prompt)
                        yield Rewritten(first.revised_prompt, marked, is_done=True)
    except DiffserveError as error:
        yield Rewritten(wish, status(sentence(error), is_error=True), is_done=True)


def shown(visitor: Visitor, wish: str, state: Rewritten) -> dict[str, Update]:
    """Return the updates of ``CreateOutputs`` for ``state``; a finished rewrite replaces the prompt, until undone."""
    if not state.is_done:
        return {"difference": state.difference, "undo": HIDDEN}
    if state.prompt == wish:
        visitor.settle("", "")
        return {"difference": state.difference, "undo": HIDDEN}
    visitor.settle(wish, state.prompt)
    return {"prompt": state.prompt, "difference": state.difference, "undo": SHOWN}


SHOWN: Final[Update] = gr.update(visible=True)
HIDDEN: Final[Update] = gr.update(visible=False)


class Rewriting:
    """Events of the prompt rewriter, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors, tab: CreateTab) -> None:
        self._server = server
        self._visitors = visitors
        self._tab = tab

    def connect(self) -> None:
        """Bind all events; call it inside the page's context."""
        tab, wording, showing = self._tab, self._tab.wording, self._tab.showing
        tab.fields.rewrite_mode.change(choose, tab.fields.rewrite_mode, [wording.panel, wording.note], **PRIVATE)
        outputs = [showing.prompt, showing.difference, showing.undo]
        gr.on(
            [wording.rewrite.click, tab.palette.rewrite.click],
            self.suggest,
            tab.fields.prompt,
            outputs,
            api_name="suggest",
            show_progress="hidden",
            trigger_mode="once",
            concurrency_limit=None,
        )
        showing.undo.click(self.undo, None, outputs, **PRIVATE)
        tab.fields.prompt.change(self.look, tab.fields.prompt, outputs[1:], **LATEST)

    async def suggest(self, prompt: str | None, request: gr.Request) -> AsyncIterator[tuple[Update, ...]]:
        """Yield (prompt, difference, undo) while the rewrite is streamed; the prompt changes at its end."""
        wish = prompt or ""
        try:
            check_text(wish, "prompt")
        except InvalidRequest as error:
            yield gr.skip(), status(sentence(error), is_error=True), HIDDEN
            return
        ask_for_visitor(request)
        visitor = self._visitors.of(request.session_hash)
        async for state in rewritten(self._server, wish):
            update = shown(visitor, wish, state)
            yield update.get("prompt", gr.skip()), update["difference"], update["undo"]

    async def look(self, prompt: str | None, request: gr.Request) -> tuple[Update, ...]:
        """Return (difference, undo) after a change of the prompt: visible while the prompt is the last rewrite.

        Without a rewrite both stay the same, because on a busy server this event may follow the answer to a suggestion.
        """
        wish, rewrite = self._visitors.rewrite_of(request.session_hash)
        if not rewrite:
            return gr.skip(), gr.skip()
        if prompt and prompt == rewrite:
            return difference_html(wish, rewrite), SHOWN
        return "", HIDDEN

    async def undo(self, request: gr.Request) -> tuple[Update, ...]:
        """Return the original prompt, which Generate then does not rewrite again."""
        return self._visitors.of(request.session_hash).wish, "", HIDDEN


def choose(mode: str) -> tuple[Update, str]:
    """Return updates that show the controls and the note of ``mode``."""
    return gr.update(visible=mode == "Suggest"), NOTES.get(mode, "")

"""What changed between a wish and a prompt, word by word."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Final, Literal, NamedTuple

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
    """Pieces in order: without the "added" ones they have the words of ``old``, without the "removed" those of ``new``.

    Blanks are not compared; those between words that are in both texts come from ``new``.
    """
    whole = (WordRun("same", new),) if old == new else (WordRun("removed", old), WordRun("added", new))
    if max(len(old), len(new)) > MAX_CHARS:
        return whole
    before, after = _words(old), _words(new)
    if max(len(before), len(after)) > MAX_WORDS:
        return whole
    return tuple(_joined(_compared(before, after)))


def difference_html(old: str, new: str) -> str:
    """The same for a page, <del> and <ins> around what changed; every character of the texts is escaped."""
    marks = {"same": "{}", "added": "<ins>{}</ins>", "removed": "<del>{}</del>"}
    return "".join(marks[piece.kind].format(html.escape(piece.text)) for piece in difference(old, new))


def is_marked(markup: str) -> bool:
    """Whether ``markup`` from ``difference_html`` says that anything changed."""
    return "<del>" in markup or "<ins>" in markup


def _words(text: str) -> list[str]:
    """The words of ``text`` with the blanks behind them, one more than ``MAX_WORDS`` at most."""
    return [found[0] for found in islice(_WORDS.finditer(text), MAX_WORDS + 1)]


def _compared(before: list[str], after: list[str]) -> Iterator[WordRun]:
    matcher = difflib.SequenceMatcher(None, [*map(str.strip, before)], [*map(str.strip, after)], autojunk=False)
    for tag, start, end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            yield WordRun("same", "".join(after[new_start:new_end]))
            continue
        yield WordRun("removed", _apart("".join(before[start:end]), new_end > new_start))
        yield WordRun("added", _apart("".join(after[new_start:new_end]), new_end < len(after)))


def _apart(text: str, goes_on: bool) -> str:
    """``text`` with a blank behind it where other words follow that would stick to it."""
    return f"{text} " if text and goes_on and text[-1].isalnum() else text


def _joined(pieces: Iterable[WordRun]) -> Iterator[WordRun]:
    """Without empty ones, and neighbours of one kind as one."""
    for kind, run in groupby((piece for piece in pieces if piece.text), key=lambda piece: piece.kind):
        yield WordRun(kind, "".join(piece.text for piece in run))

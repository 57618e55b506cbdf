"""Word-by-word difference between a prompt and its rewrite."""

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

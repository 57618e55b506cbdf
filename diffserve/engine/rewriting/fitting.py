"""Too long an answer loses its last tags or sentences, so that nothing of it is cut by the image model. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from diffserve.engine.rewriting.keeping import lost
from diffserve.engine.rewriting.style import Parts
from diffserve.engine.rewriting.window import TextWindow

_QUOTES: Final = r"\"[^\"]*\"|“[^”]*”|«[^»]*»"
_TAG: Final = re.compile(rf"(?:{_QUOTES}|\([^()]*\)|[^,])+")
_SENTENCE_END: Final = re.compile(r"[.!?]+[\"”»]?\s+")
_GLUE: Final = {"tags": ", ", "sentences": " "}


def fit(prompt: str, parts: Parts, window: TextWindow, kept: Sequence[str]) -> str | None:
    """``prompt`` as long as it fits ``window``; None when it cannot be made to fit without losing any of ``kept``.

    Tags come out once each. The parts that hold a text of ``kept`` stay, and so does the first; of the others the last
    go first. A single sentence that is still too long loses its last clauses.
    """
    if parts == "tags":
        unique: dict[str, str] = {}
        for tag in filter(None, map(str.strip, _TAG.findall(prompt))):
            unique.setdefault(tag.casefold(), tag)
        return _shorten(list(unique.values()), _GLUE[parts], window, kept)
    if window.fits(prompt) or parts == "whole":
        return prompt if window.fits(prompt) else None
    sentences = list(_sentences(prompt))
    found = _shorten(sentences, _GLUE[parts], window, kept)
    return found if found is not None else _shorten_clauses(sentences, window, kept)


def _sentences(prose: str) -> Iterator[str]:
    """Its sentences, one after another; a full stop inside quotation marks ends none."""
    start = 0
    for end in _SENTENCE_END.finditer(prose):
        piece = prose[start : end.end()]
        if piece.count('"') % 2 == 0 and piece.count("“") <= piece.count("”") and piece.count("«") <= piece.count("»"):
            yield piece.strip()
            start = end.end()
    if prose[start:].strip():
        yield prose[start:].strip()


def _shorten_clauses(sentences: list[str], window: TextWindow, kept: Sequence[str]) -> str | None:
    needed = [sentence for at, sentence in enumerate(sentences) if at == 0 or _holds_any(sentence, kept)]
    clauses = [clause.strip() for sentence in needed for clause in _TAG.findall(sentence.rstrip(".!?"))]
    return _shorten(clauses, ", ", window, kept)


def _shorten(parts: list[str], glue: str, window: TextWindow, kept: Sequence[str]) -> str | None:
    left = list(parts)
    for at in range(len(parts) - 1, 0, -1):
        if window.fits(glue.join(left)):
            break
        if not _holds_any(left[at], kept):
            del left[at]
    text = glue.join(left)
    return text if window.fits(text) else None


def _holds_any(part: str, kept: Sequence[str]) -> bool:
    return any(not lost(part, (), (text,)) for text in kept)

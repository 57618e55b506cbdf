"""Judge: whether what a model said is taken as the prompt, and what the person who asked is told when it is not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from diffserve.api.rewrite_types import FallbackReason, Rewrite
from diffserve.api.text_types import TextResult
from diffserve.rewriting.cleaning import clean, find_lost, find_lost_numbers, find_names, find_quotes
from diffserve.rewriting.style import Parts, Style
from diffserve.rewriting.window import TextWindow

MOST_COPIES: Final = 3
"""Words said once more than so often in a row are a loop: four times "cat", or "a cat and" four times."""

LONGEST_LOOP: Final = 12
LEFT: Final = "the prompt was left as it is."
MOST_SHOWN: Final = 3


class Doubt(NamedTuple):
    """Why an answer is not taken, and the reason in words."""

    reason: FallbackReason
    because: str


@dataclass(frozen=True)
class Judge:
    """Judges answers in ``style`` for an image model that reads ``window``.

    max_entropy  mean nats a token above which the model counts as unsure
    """

    style: Style
    window: TextWindow
    max_entropy: float

    def rewrite(self, wish: str, result: TextResult, *, force: bool = False) -> Rewrite:
        """The prompt that ``result`` gives for ``wish``, or the wish itself with the reason.

        force: take an answer of which the model was unsure; nothing else is forgiven.
        """
        quotes = find_quotes(wish) if self.style.answer.keep_quotes else ()
        names = find_names(wish) if self.style.answer.keep_names else ()
        cleaned = clean(result.text, self.style.answer.parts)
        numbers = find_lost_numbers(wish, cleaned) if self.style.answer.language == "captions" else ()
        doubt = self._doubt(cleaned, result) or self._loss(cleaned, quotes, names, numbers)
        fitted = None if doubt else fit(cleaned, self.style.answer.parts, self.window, (*quotes, *names))
        if fitted is None and doubt is None:
            has, most = self.window.count(cleaned), self.window.num_tokens
            because = f"the rewritten prompt has {has} tokens, the image model reads {most}, and it cannot be shortened"
            doubt = Doubt("too_long", because)
        if doubt is None and not force and result.mean_entropy > self.max_entropy:
            doubt = Doubt("unsure", "the rewriter was not sure enough of its words")
        return Rewrite(
            prompt=wish if fitted is None or doubt else fitted,
            answer=result.text,
            mean_entropy=result.mean_entropy,
            fallback=doubt.reason if doubt else None,
            warning=f"{doubt.because}; {LEFT}" if doubt else None,
        )

    def _doubt(self, cleaned: str, result: TextResult) -> Doubt | None:
        """What is wrong with an answer whatever the wish was."""
        if refuses(cleaned, self.style.answer.refusals):
            return Doubt("refused", "the rewriter declined to rewrite the prompt")
        if result.finish_reason == "length":
            return Doubt("runaway", f"the rewriter had not come to an end after {len(result.token_ids)} tokens")
        if not any(letter.isalnum() for letter in cleaned):
            return Doubt("empty", "the rewriter said nothing")
        if loops(cleaned.casefold().split()):
            return Doubt("runaway", "the rewriter went round in circles")
        return None

    def _loss(self, cleaned: str, quotes: Sequence[str], names: Sequence[str], numbers: Sequence[str]) -> Doubt | None:
        missing = [*find_lost(cleaned, quotes, names), *numbers]
        if not missing:
            return None
        shown = ", ".join(f'"{text}"' for text in missing[:MOST_SHOWN])
        shown += ", ..." if len(missing) > MOST_SHOWN else ""
        if self.style.answer.language == "captions":
            return Doubt("lost_words", f"the image model's language has no words for {shown}")
        return Doubt("lost_words", f"the rewriter left out {shown}")


def refuses(answer: str, refusals: Sequence[str]) -> bool:
    """Whether ``answer`` begins with one of the lower-case phrases, at a word's end."""
    said = " ".join(answer.casefold().replace("’", "'").split())
    return any(said.startswith(phrase) and not said[len(phrase) : len(phrase) + 1].isalnum() for phrase in refusals)


def loops(words: Sequence[str]) -> bool:
    """Whether up to ``LONGEST_LOOP`` words are said over and over, more than ``MOST_COPIES`` times in a row."""
    for period in range(1, LONGEST_LOOP + 1):
        equal = 0
        for before, after in zip(words, words[period:], strict=False):
            equal = equal + 1 if before == after else 0
            if equal >= MOST_COPIES * period:
                return True
    return False


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
    return any(not find_lost(part, (), (text,)) for text in kept)

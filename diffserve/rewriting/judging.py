"""Decides whether a model's answer is accepted as the prompt, and shortens it to the image model's text window."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from diffserve.api.prompt_syntax import parse_prompt
from diffserve.api.rewrite_types import FallbackReason, Rewrite
from diffserve.api.text_types import TextResult
from diffserve.rewriting.cleaning import clean, find_lost, find_lost_numbers, find_names, find_quotes
from diffserve.rewriting.style import Parts, Style

if TYPE_CHECKING:
    from diffserve.runtime import TextEncoderRunner


MARKS = 2
"""Number of start and end tokens in every window."""


@dataclass(frozen=True)
class TextWindow:
    """Text window of ``num_tokens`` tokens (75 of CLIP's 77); ``count`` returns the number of tokens of a prompt."""

    num_tokens: int
    count: Callable[[str], int]

    @classmethod
    def of(cls, text: TextEncoderRunner) -> Self:
        """Build the window of an image model; with several text encoders the largest token count applies."""
        tokenizers = [encoder.tokenizer for encoder in text.encoders]
        return cls(text.window_tokens - MARKS, partial(_num_tokens, tokenizers))

    @classmethod
    def of_tokenizer(cls, tokenizer: Callable[..., Any], window_tokens: int) -> Self:
        """Build the window for one tokenizer; ``window_tokens`` includes the start and end tokens."""
        return cls(window_tokens - MARKS, partial(_num_tokens, [tokenizer]))

    def fits(self, prompt: str) -> bool:
        """Return whether ``prompt`` fits the window."""
        return self.count(prompt) <= self.num_tokens


def _num_tokens(tokenizers: Sequence[Callable[..., Any]], prompt: str) -> int:
    """Count the tokens of a prompt without start and end tokens, brackets and weights."""
    texts = [piece.text for section in parse_prompt(prompt) for piece in section]
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    return max(sum(len(tokenizer(text, **options)["input_ids"]) for text in texts) for tokenizer in tokenizers)


MIN_LOOP_REPEATS: Final = 3
"""Number of repetitions after the first occurrence that count as a loop: "cat" four times in a row."""

LONGEST_LOOP: Final = 12
UNCHANGED: Final = "the prompt was left as it is."
MAX_SHOWN: Final = 3


class Rejection(NamedTuple):
    """Reason why an answer is not accepted, as a code and as text."""

    reason: FallbackReason
    message: str


@dataclass(frozen=True)
class Judge:
    """Decides whether answers are accepted as prompts.

    Attributes:
        style: Style of the prompts.
        window: Text window of the image model.
        max_entropy: Mean entropy in nats per token above which the model counts as unsure.
    """

    style: Style
    window: TextWindow
    max_entropy: float

    def rewrite(self, wish: str, result: TextResult, *, force: bool = False) -> Rewrite:
        """Return the prompt extracted from ``result``, or ``wish`` itself with a warning.

        Args:
            wish: The user's prompt.
            result: The model's answer.
            force: Accept an answer even if the model was unsure; other rejections still apply.
        """
        quotes = find_quotes(wish) if self.style.answer.keep_quotes else ()
        names = find_names(wish) if self.style.answer.keep_names else ()
        cleaned = clean(result.text, self.style.answer.parts)
        numbers = find_lost_numbers(wish, cleaned) if self.style.answer.language == "captions" else ()
        rejection = self._check_answer(cleaned, result) or self._check_loss(cleaned, quotes, names, numbers)
        fitted = None if rejection else fit(cleaned, self.style.answer.parts, self.window, (*quotes, *names))
        if fitted is None and rejection is None:
            num_tokens, limit = self.window.count(cleaned), self.window.num_tokens
            length = f"the rewritten prompt has {num_tokens} tokens, but the image model reads only {limit}"
            rejection = Rejection("too_long", f"{length}, and it cannot be shortened")
        if rejection is None and not force and result.mean_entropy > self.max_entropy:
            rejection = Rejection("unsure", "the rewriter was not confident enough")
        return Rewrite(
            prompt=wish if fitted is None or rejection else fitted,
            answer=result.text,
            mean_entropy=result.mean_entropy,
            fallback=rejection.reason if rejection else None,
            warning=f"{rejection.message}; {UNCHANGED}" if rejection else None,
        )

    def _check_answer(self, cleaned: str, result: TextResult) -> Rejection | None:
        """Check an answer independently of the user's prompt."""
        if refuses(cleaned, self.style.answer.refusals):
            return Rejection("refused", "the rewriter declined to rewrite the prompt")
        if result.finish_reason == "length":
            return Rejection("runaway", f"the rewriter did not finish within {len(result.token_ids)} tokens")
        if not any(letter.isalnum() for letter in cleaned):
            return Rejection("empty", "the rewriter returned no text")
        if loops(cleaned.casefold().split()):
            return Rejection("runaway", "the rewriter repeated itself")
        return None

    def _check_loss(
        self, cleaned: str, quotes: Sequence[str], names: Sequence[str], numbers: Sequence[str]
    ) -> Rejection | None:
        """Check that no quote, name or number of the user's prompt was lost."""
        missing = [*find_lost(cleaned, quotes, names), *numbers]
        if not missing:
            return None
        shown = ", ".join(f'"{text}"' for text in missing[:MAX_SHOWN])
        shown += ", ..." if len(missing) > MAX_SHOWN else ""
        if self.style.answer.language == "captions":
            return Rejection("lost_words", f"the image model does not know {shown}")
        return Rejection("lost_words", f"the rewriter left out {shown}")


def refuses(answer: str, refusals: Sequence[str]) -> bool:
    """Return whether ``answer`` starts with one of the lower-case phrases, followed by a word boundary."""
    text = " ".join(answer.casefold().replace("’", "'").split())
    return any(text.startswith(phrase) and not text[len(phrase) : len(phrase) + 1].isalnum() for phrase in refusals)


def loops(words: Sequence[str]) -> bool:
    """Return whether a sequence of up to ``LONGEST_LOOP`` words repeats ``MIN_LOOP_REPEATS`` times in a row."""
    for period in range(1, LONGEST_LOOP + 1):
        num_equal = 0
        for before, after in zip(words, words[period:], strict=False):
            num_equal = num_equal + 1 if before == after else 0
            if num_equal >= MIN_LOOP_REPEATS * period:
                return True
    return False


_QUOTES: Final = r"\"[^\"]*\"|“[^”]*”|«[^»]*»"
_TAG: Final = re.compile(rf"(?:{_QUOTES}|\([^()]*\)|[^,])+")
_SENTENCE_END: Final = re.compile(r"[.!?]+[\"”»]?\s+")
_GLUE: Final = {"tags": ", ", "sentences": " "}


def fit(prompt: str, parts: Parts, window: TextWindow, required: Sequence[str]) -> str | None:
    """Shorten ``prompt`` until it fits ``window``.

    Duplicate tags are removed. Parts are dropped from the end, except the first part and parts that contain a required
    text. If dropping sentences is not enough, clauses are dropped.

    Args:
        prompt: The prompt.
        parts: Kind of parts that may be dropped.
        window: Text window of the image model.
        required: Texts that must not be lost.

    Returns:
        The prompt, or None if it cannot fit without losing a required text.
    """
    if parts == "tags":
        unique: dict[str, str] = {}
        for tag in filter(None, map(str.strip, _TAG.findall(prompt))):
            unique.setdefault(tag.casefold(), tag)
        return _shorten(list(unique.values()), _GLUE[parts], window, required)
    if window.fits(prompt) or parts == "whole":
        return prompt if window.fits(prompt) else None
    sentences = list(_sentences(prompt))
    shortened = _shorten(sentences, _GLUE[parts], window, required)
    return shortened if shortened is not None else _shorten_clauses(sentences, window, required)


def _sentences(prose: str) -> Iterator[str]:
    """Split ``prose`` into sentences; a period inside quotation marks does not end a sentence."""
    start = 0
    for end in _SENTENCE_END.finditer(prose):
        piece = prose[start : end.end()]
        if piece.count('"') % 2 == 0 and piece.count("“") <= piece.count("”") and piece.count("«") <= piece.count("»"):
            yield piece.strip()
            start = end.end()
    if prose[start:].strip():
        yield prose[start:].strip()


def _shorten_clauses(sentences: list[str], window: TextWindow, required: Sequence[str]) -> str | None:
    needed = [sentence for index, sentence in enumerate(sentences) if index == 0 or _contains_any(sentence, required)]
    clauses = [clause.strip() for sentence in needed for clause in _TAG.findall(sentence.rstrip(".!?"))]
    return _shorten(clauses, ", ", window, required)


def _shorten(parts: list[str], glue: str, window: TextWindow, required: Sequence[str]) -> str | None:
    remaining = list(parts)
    for index in range(len(parts) - 1, 0, -1):
        if window.fits(glue.join(remaining)):
            break
        if not _contains_any(remaining[index], required):
            del remaining[index]
    text = glue.join(remaining)
    return text if window.fits(text) else None


def _contains_any(part: str, required: Sequence[str]) -> bool:
    return any(not find_lost(part, (), (text,)) for text in required)

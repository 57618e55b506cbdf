"""Constraints to texts of words in any order, to test with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from diffserve.runtime.decoding import Phrase, TokenConstraint, allowed_sentences
from diffserve.runtime.decoding.constraint import Arc


def word_constraint(
    first: Iterable[Sequence[int]], later: Iterable[Sequence[int]] = (), *, end_ids: Collection[int]
) -> TokenConstraint:
    """Return a constraint to one word of ``first``, followed by any number of ``later``; words are token ids."""
    arcs = [*(Arc("nothing", word, "word") for word in first), *(Arc("word", word, "word") for word in later)]
    return TokenConstraint(arcs, start="nothing", ends=["word"], end_ids=end_ids)


def allowed_words(
    tokenizer: Any, words: Iterable[str], *, attached: Iterable[str] = (), end_ids: Collection[int]
) -> TokenConstraint:
    """Return a constraint to ``words`` with spaces between them; ``attached`` follow a word without a space."""
    first = [Phrase("nothing", word, "word") for word in words]
    later = [Phrase("word", text, "word") for text in (*words, *attached)]
    return allowed_sentences(tokenizer, [*first, *later], start="nothing", ends=["word"], end_ids=end_ids)

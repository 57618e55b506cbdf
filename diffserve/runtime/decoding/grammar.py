"""From words, or from the phrases of a small language, to a TokenConstraint, whatever the tokenizer.

Each word is spelled as the tokenizer itself spells it: first in a text, and after a space. That covers tokenizers
that mark a word's end (CLIP: ``cat</w>``), those that put the space into the token (GPT-2: ``Ġcat``, Llama: ``▁cat``)
and words of several tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from diffserve.api.errors import ConfigError
from diffserve.runtime.decoding.constraint import Arc, TokenConstraint

TRIED_ANCHORS: Final = 8


class Phrase(NamedTuple):
    """``text``, a few words or a mark, leads a sentence from node ``source`` to node ``target``."""

    source: str
    text: str
    target: str


def allowed_words(
    tokenizer: Any, words: Iterable[str], *, attached: Iterable[str] = (), end_ids: Collection[int]
) -> TokenConstraint:
    """Only texts made of ``words`` with single spaces between them; ``attached`` follow a word without a space.

    tokenizer  any transformers tokenizer
    words      words, or several words that belong together ("next to")
    attached   such as ``,`` and ``'s``: after any word, never first
    end_ids    the tokens that end a text

    Raises ConfigError naming a word that the tokenizer cannot spell.
    """
    known = list(dict.fromkeys(words))
    if not known:
        raise ConfigError("the list of allowed words is empty: give at least one word.")
    first = [_spell(tokenizer, word) for word in known]
    later = [_spell_after(tokenizer, known, f" {word}") for word in known]
    marks = [_spell_after(tokenizer, known, mark) for mark in dict.fromkeys(attached)]
    return TokenConstraint(first, later + marks, end_ids=end_ids)


def one_of(tokenizer: Any, texts: Iterable[str], *, end_ids: Collection[int]) -> TokenConstraint:
    """Exactly one of ``texts``, as the tokenizer spells it. Raises ConfigError as :func:`allowed_words` does."""
    return TokenConstraint([_spell(tokenizer, text) for text in texts], end_ids=end_ids)


def allowed_sentences(
    tokenizer: Any, phrases: Iterable[Phrase], *, start: str, ends: Collection[str], end_ids: Collection[int]
) -> TokenConstraint:
    """Only sentences that lead from ``start`` to one of ``ends``; no phrase leads back to ``start``.

    A phrase that begins with a letter or a digit is parted from the one before it by a space, any other is not. Raises
    ConfigError as :func:`allowed_words` and ``TokenConstraint.of_graph`` do.
    """
    known = list(phrases)
    anchors = list(dict.fromkeys(phrase.text for phrase in known if phrase.source == start))
    arcs = []
    for source, text, target in known:
        if source == start:
            ids = _spell(tokenizer, text)
        else:
            ids = _spell_after(tokenizer, anchors, f" {text}" if text[:1].isalnum() else text)
        arcs.append(Arc(source, ids, target))
    return TokenConstraint.of_graph(arcs, start=start, ends=ends, end_ids=end_ids)


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    return ids


def _spell(tokenizer: Any, text: str) -> list[int]:
    return _checked(tokenizer, text, _token_ids(tokenizer, text))


def _spell_after(tokenizer: Any, anchors: Sequence[str], text: str) -> list[int]:
    """How ``text`` is spelled after a word: what it adds to the first of ``anchors`` that it leaves as it was."""
    for anchor in anchors[:TRIED_ANCHORS]:
        alone, together = _token_ids(tokenizer, anchor), _token_ids(tokenizer, anchor + text)
        if together[: len(alone)] == alone and len(together) > len(alone):
            return _checked(tokenizer, text, together[len(alone) :])
    raise ConfigError(f"the tokenizer joins {text!r} to the word before it: leave it out of the allowed words.")


def _checked(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    if not text.strip() or not ids or tokenizer.unk_token_id in ids:
        raise ConfigError(f"the tokenizer cannot spell {text!r}: leave it out of the allowed words.")
    return ids

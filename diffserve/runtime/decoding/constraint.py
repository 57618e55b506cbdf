"""Constraint: which tokens may follow; TokenConstraint implements it by an automaton over token ids.

The allowed texts are a graph: an arc is a word in token ids, and a text is a walk from the start to one of the ends.
Words in any order are a graph of two nodes, because most tokenizers spell a word differently after a space. A word can
be the beginning of another in token ids, so after some tokens several places of the graph are possible: a state of the
automaton is the set of them (subset construction, Rabin and Scott, 1959), built on the first visit and cached with its
mask. ::

                a, sun                 _cat, _sun, _sun ny
    (nothing) ----------> (a word) ----.
                              ^--------'

    after "sun": {a word}    after "sun _sun": {a word, half of "_sun ny"}, so next: ny, _cat, _sun, or the end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from cachetools import LRUCache
from torch import Tensor

from diffserve.api.errors import ConfigError

DEAD: Final = -1
"""State after a token that was not allowed; nothing may follow."""

KEPT_MASK_BYTES: Final = 64 * 2**20

USUAL_SHARE: Final = 0.5
"""Share of the practice texts in which a token must follow to be usual."""


class Arc(NamedTuple):
    """A word from node ``source`` to node ``target``."""

    source: Hashable
    token_ids: Sequence[int]
    target: Hashable


StateT = TypeVar("StateT")


class Constraint(ABC, Generic[StateT]):
    """Set of tokens that may follow. One object serves many sequences, which hold their own immutable states.

    Attributes:
        start: State before the first token.
        end_ids: Tokens that end a text, allowed wherever it may end.
    """

    start: StateT
    end_ids: frozenset[int]

    @abstractmethod
    def advance(self, state: StateT, token_id: int) -> StateT:
        """Return the state after ``token_id``; nothing may follow a token that was not allowed."""

    @abstractmethod
    def mask(self, state: StateT, vocab_size: int) -> Tensor:
        """Return a (vocab_size,) bool mask on the CPU, True where a token is allowed. Must not be modified."""

    @abstractmethod
    def num_allowed(self, state: StateT, token_ids: Sequence[int]) -> int:
        """Return how many of ``token_ids`` may follow one after another, to shorten a draft."""

    @abstractmethod
    def forced(self, state: StateT, limit: int) -> list[int]:
        """Return at most ``limit`` tokens without a likely alternative, as a draft that is mostly accepted."""

    def moves(self, state: StateT) -> Mapping[int, StateT] | None:
        """Return the next state by allowed token id, or None if there are too many to list."""
        return None

    def usual(self, state: StateT) -> int | None:
        """Return the usual next token, if known."""
        return None

    def ending(self, state: StateT, mask: Tensor, num_left: int, max_tokens: int) -> Tensor:
        """Return the part of ``mask`` that lets a text of at most ``max_tokens`` tokens end within ``num_left``."""
        return mask

    def problem(self, state: StateT) -> str:
        """Return why nothing may follow although all tokens were allowed, or an empty string."""
        return ""


AnyConstraint = Constraint[Any]


class TokenConstraint(Constraint[int]):
    """Automaton of allowed token ids: texts that lead along arcs from ``start`` to one of ``ends``; a state is an int.

    Args:
        arcs: Words as token ids, each with the nodes that it leads from and to.
        start: Node at which texts begin.
        ends: Nodes at which texts may end.
        end_ids: Tokens that end a text.

    Raises:
        ConfigError: A node that is no end has no arc, a word has no tokens, or there is no end token.
    """

    def __init__(
        self, arcs: Iterable[Arc], *, start: Hashable, ends: Collection[Hashable], end_ids: Collection[int]
    ) -> None:
        arcs = list(arcs)
        stuck = ({start} | {arc.target for arc in arcs}) - {arc.source for arc in arcs} - set(ends)
        if stuck:
            raise ConfigError(f"nothing can follow {min(map(repr, stuck))} in a constraint, and it is not an end.")
        if not end_ids:
            raise ConfigError("a constraint needs an end token.")
        self._steps: list[dict[int, set[int]]] = []  # for each place: next places by token
        self._inner: dict[tuple[int, int], int] = {}  # places inside words; words with a common beginning share them
        nodes = {node: self._new_place() for node in dict.fromkeys([start, *(arc.source for arc in arcs), *ends])}
        for arc in arcs:
            self._plant(nodes[arc.source], arc.token_ids, nodes[arc.target])
        self._ends = frozenset(nodes[end] for end in ends)
        self.end_ids = frozenset(end_ids)
        self._sets: list[frozenset[int]] = []
        self._moves: list[dict[int, int] | None] = []
        self._states: dict[frozenset[int], int] = {}
        self._masks: LRUCache[tuple[int, int], Tensor] = LRUCache(KEPT_MASK_BYTES, getsizeof=len)
        self._habits: dict[int, Counter[int]] = {}
        self.start = self._state_of(frozenset({nodes[start]}))

    def advance(self, state: int, token_id: int) -> int:
        """Return the state after ``token_id``; ``DEAD`` when it was not allowed."""
        return self.moves(state).get(token_id, DEAD)

    def moves(self, state: int) -> dict[int, int]:
        """Return the next state by allowed token id, empty when nothing may follow. Must not be modified."""
        if state == DEAD:
            return {}
        moves = self._moves[state]
        if moves is None:
            moves = self._moves[state] = self._find_moves(self._sets[state])
        return moves

    def may_end(self, state: int) -> bool:
        """Whether a text may end here."""
        return state != DEAD and not self._ends.isdisjoint(self._sets[state])

    def mask(self, state: int, vocab_size: int) -> Tensor:
        """Return a cached (vocab_size,) bool mask on the CPU, True where a token is allowed. Must not be modified."""
        key = (state, vocab_size)
        allowed = self._masks.get(key)
        if allowed is None:
            allowed = torch.zeros(vocab_size, dtype=torch.bool)  # (V,)
            allowed[[token_id for token_id in self.moves(state) if token_id < vocab_size]] = True
            self._masks[key] = allowed
        return allowed

    def num_allowed(self, state: int, token_ids: Sequence[int]) -> int:
        """Return how many of ``token_ids`` may follow one after another, to shorten a draft."""
        count = 0
        for token_id in token_ids:
            state = self.advance(state, token_id)
            if state == DEAD:
                break
            count += 1
        return count

    def forced(self, state: int, limit: int) -> list[int]:
        """Return at most ``limit`` tokens without an alternative, as a draft that is always accepted."""
        tokens: list[int] = []
        moves = self.moves(state)
        while len(tokens) < limit and len(moves) == 1:
            (token_id, state) = next(iter(moves.items()))
            tokens.append(token_id)
            moves = self.moves(state)
        return tokens

    def observe(self, texts: Iterable[Sequence[int]]) -> None:
        """Record the usual continuations in ``texts``, which must be allowed, as a fallback for drafts."""
        for token_ids in texts:
            state = self.start
            for token_id in token_ids:
                self._habits.setdefault(state, Counter())[token_id] += 1
                state = self.advance(state, token_id)

    def usual(self, state: int) -> int | None:
        """Return the token that followed in most of the observed texts, if any."""
        counts = self._habits.get(state)
        if not counts:
            return None
        ((token_id, count),) = counts.most_common(1)
        return token_id if count >= USUAL_SHARE * counts.total() else None

    def _plant(self, source: int, token_ids: Sequence[int], target: int) -> None:
        if not token_ids:
            raise ConfigError("a word of the constraint has no tokens: leave it out, or check the tokenizer.")
        place = source
        for token_id in token_ids[:-1]:
            inner = self._inner.get((place, token_id))
            if inner is None:
                inner = self._inner[place, token_id] = self._new_place()
                self._steps[place].setdefault(token_id, set()).add(inner)
            place = inner
        self._steps[place].setdefault(token_ids[-1], set()).add(target)

    def _new_place(self) -> int:
        self._steps.append({})
        return len(self._steps) - 1

    def _find_moves(self, places: frozenset[int]) -> dict[int, int]:
        reached: dict[int, set[int]] = {}
        for place in places:
            for token_id, targets in self._steps[place].items():
                reached.setdefault(token_id, set()).update(targets)
        moves = {token_id: self._state_of(frozenset(targets)) for token_id, targets in reached.items()}
        if not self._ends.isdisjoint(places):
            moves.update(dict.fromkeys(self.end_ids, self._state_of(frozenset())))
        return moves

    def _state_of(self, places: frozenset[int]) -> int:
        state = self._states.setdefault(places, len(self._sets))
        if state == len(self._sets):
            self._sets.append(places)
            self._moves.append(None)
        return state


TRIED_ANCHORS: Final = 8


class Phrase(NamedTuple):
    """``text``, a few words or a mark, leads a sentence from node ``source`` to node ``target``."""

    source: str
    text: str
    target: str


def allowed_sentences(
    tokenizer: Any, phrases: Iterable[Phrase], *, start: str, ends: Collection[str], end_ids: Collection[int]
) -> TokenConstraint:
    """Return a constraint to sentences that lead from ``start`` to one of ``ends``; no phrase leads back to ``start``.

    A phrase that begins with a letter or a digit is separated from the one before it by a space, any other is not.

    Raises:
        ConfigError: The tokenizer cannot spell a phrase, or as ``TokenConstraint`` does.
    """
    phrase_list = list(phrases)
    anchors = list(dict.fromkeys(phrase.text for phrase in phrase_list if phrase.source == start))
    arcs = []
    for source, text, target in phrase_list:
        if source == start:
            ids = _spell(tokenizer, text)
        else:
            ids = _spell_after(tokenizer, anchors, f" {text}" if text[:1].isalnum() else text)
        arcs.append(Arc(source, ids, target))
    return TokenConstraint(arcs, start=start, ends=ends, end_ids=end_ids)


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    return ids


def _spell(tokenizer: Any, text: str) -> list[int]:
    return _checked(tokenizer, text, _token_ids(tokenizer, text))


def _spell_after(tokenizer: Any, anchors: Sequence[str], text: str) -> list[int]:
    """Return the tokens of ``text`` after a word: those added to the first of ``anchors`` that keeps its own tokens."""
    for anchor in anchors[:TRIED_ANCHORS]:
        alone, together = _token_ids(tokenizer, anchor), _token_ids(tokenizer, anchor + text)
        if together[: len(alone)] == alone and len(together) > len(alone):
            return _checked(tokenizer, text, together[len(alone) :])
    raise ConfigError(f"the tokenizer joins {text!r} to the word before it: leave it out of the allowed words.")


def _checked(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    if not text.strip() or not ids or tokenizer.unk_token_id in ids:
        raise ConfigError(f"the tokenizer cannot spell {text!r}: leave it out of the allowed words.")
    return ids

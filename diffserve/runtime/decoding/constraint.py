"""TokenConstraint: which tokens may come next, as an automaton over token ids.

The words that may be said stand in tries of token ids. A text is one word of the trie of first words, then any number
of words of the trie of later ones (most tokenizers spell a word differently after a space), and may end after each.
A word can be the beginning of another in token ids, so after some tokens several places in the tries are possible:
a state of the automaton is the set of them (the subset construction of Rabin and Scott, 1959), made when first
visited and then kept, with its mask. ::

    first     root -> a  -> | end of a word          later   root -> _cat -> |
                   -> sun -> |                                      -> _sun -> | -> ny -> |

    after "sun": {sun|}     after "sun _sun": {_sun|}, so next: ny, _cat, _sun, or the end
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from diffserve.errors import ConfigError

DEAD: Final = -1
"""The state after a token that was not allowed: nothing may follow."""

KEPT_MASK_BYTES: Final = 64 * 2**20


class TokenConstraint:
    """An automaton that says which token ids may follow. One serves many sequences: each holds its own state, an int.

    first    the words that a text may begin with, each a sequence of token ids
    later    the words that may follow another word; empty: the text is exactly one of ``first``
    end_ids  tokens that end a text; allowed after every whole word

    Raises ConfigError when there is no first word, no end token, or a word without tokens.
    """

    def __init__(
        self, first: Iterable[Sequence[int]], later: Iterable[Sequence[int]] = (), *, end_ids: Collection[int]
    ) -> None:
        self._children: list[dict[int, int]] = [{}, {}]  # places in the tries; 0 and 1 are their roots
        self._word_ends: set[int] = set()
        for root, words in enumerate((first, later)):
            for word in words:
                self._plant(root, word)
        if not self._children[0] or not end_ids:
            raise ConfigError("a constraint needs at least one word that a text may begin with, and an end token.")
        self.end_ids = frozenset(end_ids)
        self._sets: list[frozenset[int]] = []
        self._moves: list[dict[int, int] | None] = []
        self._states: dict[frozenset[int], int] = {}
        self._masks: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self.start = self._state_of(frozenset({0}))

    @property
    def num_states(self) -> int:
        """States visited so far, or about to be."""
        return len(self._sets)

    def advance(self, state: int, token_id: int) -> int:
        """The state after ``token_id``; ``DEAD`` when it was not allowed."""
        return self.moves(state).get(token_id, DEAD)

    def moves(self, state: int) -> dict[int, int]:
        """Allowed token id -> next state; empty when nothing may follow. Not to be changed."""
        if state == DEAD:
            return {}
        known = self._moves[state]
        if known is None:
            known = self._moves[state] = self._find_moves(self._sets[state])
        return known

    def may_end(self, state: int) -> bool:
        """Whether a text may end here."""
        return state != DEAD and not self._word_ends.isdisjoint(self._sets[state])

    def mask(self, state: int, vocab_size: int) -> Tensor:
        """(vocab_size,) bool on the CPU, True where a token is allowed. Kept; not to be changed."""
        key = (state, vocab_size)
        if key in self._masks:
            self._masks.move_to_end(key)
            return self._masks[key]
        allowed = torch.zeros(vocab_size, dtype=torch.bool)  # (V,)
        allowed[[token_id for token_id in self.moves(state) if token_id < vocab_size]] = True
        self._masks[key] = allowed
        if len(self._masks) * vocab_size > KEPT_MASK_BYTES and len(self._masks) > 1:
            self._masks.popitem(last=False)
        return allowed

    def num_allowed(self, state: int, token_ids: Iterable[int]) -> int:
        """How many of ``token_ids`` may follow one after another: what is left of a draft."""
        count = 0
        for token_id in token_ids:
            state = self.advance(state, token_id)
            if state == DEAD:
                break
            count += 1
        return count

    def forced(self, state: int, limit: int) -> list[int]:
        """At most ``limit`` tokens to which there is no alternative: a draft that is always accepted."""
        tokens: list[int] = []
        moves = self.moves(state)
        while len(tokens) < limit and len(moves) == 1:
            (token_id, state) = next(iter(moves.items()))
            tokens.append(token_id)
            moves = self.moves(state)
        return tokens

    def _plant(self, root: int, word: Sequence[int]) -> None:
        if not word:
            raise ConfigError("a word of the constraint has no tokens: leave it out, or check the tokenizer.")
        place = root
        for token_id in word:
            nxt = self._children[place].setdefault(token_id, len(self._children))
            if nxt == len(self._children):
                self._children.append({})
            place = nxt
        self._word_ends.add(place)

    def _find_moves(self, places: frozenset[int]) -> dict[int, int]:
        reached: dict[int, set[int]] = {}
        starts = set(places) if self._word_ends.isdisjoint(places) else {*places, 1}
        for place in starts:
            for token_id, child in self._children[place].items():
                reached.setdefault(token_id, set()).add(child)
        moves = {token_id: self._state_of(frozenset(found)) for token_id, found in reached.items()}
        if not self._word_ends.isdisjoint(places):
            moves.update(dict.fromkeys(self.end_ids, self._state_of(frozenset())))
        return moves

    def _state_of(self, places: frozenset[int]) -> int:
        state = self._states.setdefault(places, len(self._sets))
        if state == len(self._sets):
            self._sets.append(places)
            self._moves.append(None)
        return state

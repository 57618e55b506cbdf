"""Prompts as A1111 users write them: weights, and chunks that the text encoder can read. No torch.

    a (red) hat        weight 1.1        a (red:1.3) hat     weight 1.3
    a [red] hat        weight 1 / 1.1    a ((red)) hat       weights multiply
    a \\(red\\) hat      plain brackets    a cat BREAK a dog   a new chunk starts after BREAK, but not \\BREAK

Malformed input is never an error: a closing bracket with no partner and a ``:1.2`` outside brackets are text, an
opening bracket with no partner weighs everything after it, as there.

A chunk holds as many tokens as the encoder's window minus the start and end marks (75 for CLIP). Where a cut would fall
inside a phrase, the cut moves back to the last comma if one is near.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diffserve.errors import InvalidRequest

ROUND_WEIGHT = 1.1
SQUARE_WEIGHT = 1 / 1.1
MAX_WEIGHT = 100.0

_TOKEN = re.compile(r"\\(?:[()\[\]\\<]|BREAK\b)|[()\[\]]|:\s*[+-]?(?:\d+(?:\.\d*)?|\.\d+)\s*\)|[^\\()\[\]:]+|[\\:]")
_BREAK = re.compile(r"(?<!\\)\bBREAK\b")
MAX_CHUNKS = 32
COMMA_BACKTRACK = (20, 75)  # a comma at most 20 tokens back, in a chunk of 75
Token = tuple[int, float]


class Piece(NamedTuple):
    """A run of text and the weight of its tokens."""

    text: str
    weight: float


@dataclass
class _Brackets:
    """One family of brackets as a forest: node 0 is the root; a child's factor is known when it closes."""

    default: float
    parents: list[int] = field(default_factory=lambda: [0])
    factors: list[float] = field(default_factory=lambda: [1.0])
    current: int = 0

    def open(self) -> None:
        self.parents.append(self.current)
        self.factors.append(self.default)
        self.current = len(self.parents) - 1

    def close(self, factor: float | None = None) -> None:
        if factor is not None:
            self.factors[self.current] = factor
        self.current = self.parents[self.current]

    def weights(self) -> list[float]:
        """Weight of each node: its factor times its ancestors' (parents come before their children)."""
        totals = [1.0]
        for parent, factor in zip(self.parents[1:], self.factors[1:], strict=True):
            totals.append(totals[parent] * factor)
        return totals


def parse_prompt(prompt: str) -> list[list[Piece]]:
    """The sections of ``prompt`` between BREAKs, each a list of pieces with neighbours of equal weight joined.

    Raises InvalidRequest for a weight beyond +-100.
    """
    runs, rounds, squares = _read(prompt)
    round_weights, square_weights = rounds.weights(), squares.weights()
    sections: list[list[Piece]] = [[]]
    for text, in_round, in_square in runs:
        weight = round_weights[in_round] * square_weights[in_square]
        if not math.isfinite(weight) or abs(weight) > MAX_WEIGHT:
            raise InvalidRequest(
                f"the weight of {text[:40]!r} in the prompt is {weight:g}; keep it within {MAX_WEIGHT:g}.",
                param="prompt",
            )
        parts = _BREAK.split(text)
        for index, part in enumerate(parts):  # the blanks around a BREAK go with it
            part = part.replace("\\BREAK", "BREAK")
            before = part if index == len(parts) - 1 else part.rstrip()
            if index:
                sections.append([])
            _append(sections[-1], before.lstrip() if index else before, weight)
    return [section or [Piece("", 1.0)] for section in sections]


def _append(section: list[Piece], text: str, weight: float) -> None:
    if not text:
        return
    if section and section[-1].weight == weight:
        section[-1] = Piece(section[-1].text + text, weight)
    else:
        section.append(Piece(text, weight))


def _read(prompt: str) -> tuple[list[tuple[str, int, int]], _Brackets, _Brackets]:
    """(text, innermost round bracket, innermost square bracket) runs and the two forests of brackets."""
    rounds, squares = _Brackets(ROUND_WEIGHT), _Brackets(SQUARE_WEIGHT)
    runs: list[tuple[str, int, int]] = []
    for token in _TOKEN.findall(prompt):
        if token == "(":
            rounds.open()
        elif token == "[":
            squares.open()
        elif token == ")" and rounds.current:
            rounds.close()
        elif token == "]" and squares.current:
            squares.close()
        elif token[0] == ":" and token[-1] == ")" and rounds.current:
            rounds.close(float(token[1:-1]))
        else:
            text = token[1:] if len(token) == 2 and token[0] == "\\" else token
            runs.append((text, rounds.current, squares.current))
    return runs, rounds, squares


class SpecialTokens(NamedTuple):
    """Ids of the start and end marks, of padding, and of a comma (-1: none)."""

    start: int
    end: int
    pad: int
    comma: int


class Chunk(NamedTuple):
    """One window of the text encoder: token ids with marks and padding, and the weight of each."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def chunk_prompt(
    sections: Sequence[Sequence[Piece]],
    tokenize: Callable[[str], Sequence[int]],
    special: SpecialTokens,
    window_tokens: int,
    whole: Mapping[int, int] | None = None,
) -> list[Chunk]:
    """Chunks of ``window_tokens`` ids each for the parsed prompt; at least one.

    ``tokenize`` gives the ids of a text without marks. ``whole``: how many tokens from one on are never cut apart, for
    those that begin such a run. Raises InvalidRequest beyond MAX_CHUNKS chunks.
    """
    room = window_tokens - 2
    bodies: list[list[Token]] = []
    for index, section in enumerate(sections):
        tokens = [(token, piece.weight) for piece in section for token in tokenize(piece.text)]
        parts = _cut(tokens, room, special.comma, whole or {})
        is_trailing_break = index == len(sections) - 1 and index > 0 and not tokens
        bodies.extend([] if is_trailing_break else parts)
        _check_num(bodies, room, "the prompt")
    return [_seal(body, special, window_tokens) for body in bodies]


def chunk_tokens(
    tokens: Sequence[int], special: SpecialTokens, window_tokens: int, whole: Mapping[int, int] | None = None
) -> list[tuple[tuple[int, ...], int]]:
    """The same of ``tokens`` that weigh nothing: the ids of each chunk, and how many of them are no marks or padding.

    Raises InvalidRequest beyond MAX_CHUNKS chunks.
    """
    bodies = _cut([(token, 1.0) for token in tokens], window_tokens - 2, special.comma, whole or {})
    _check_num(bodies, window_tokens - 2, "the text")
    return [(_seal(body, special, window_tokens).ids, len(body)) for body in bodies]


def _check_num(bodies: Sequence[object], room: int, what: str) -> None:
    if len(bodies) > MAX_CHUNKS:
        raise InvalidRequest(
            f"{what} needs more than {MAX_CHUNKS} chunks of {room} tokens; shorten it.",
            param="prompt",
            code="string_above_max_length",
        )


def _cut(tokens: Sequence[Token], room: int, comma: int, whole: Mapping[int, int]) -> list[list[Token]]:
    backtrack = room * COMMA_BACKTRACK[0] // COMMA_BACKTRACK[1]
    parts: list[list[Token]] = [[]]
    after_comma = 0  # length of the current part up to and with its last comma
    for token in tokens:
        part = parts[-1]
        if len(part) < room < len(part) + whole.get(token[0], 1):
            parts.append([])
            after_comma = 0
        elif len(part) == room:
            is_near = after_comma and token[0] != comma and room - after_comma < backtrack
            keep = after_comma if is_near else room
            parts.append(part[keep:])
            del part[keep:]
            after_comma = 0
        parts[-1].append(token)
        if token[0] == comma:
            after_comma = len(parts[-1])
    return parts


def _seal(body: Sequence[Token], special: SpecialTokens, window_tokens: int) -> Chunk:
    padding = window_tokens - 2 - len(body)
    ids = (special.start, *(token for token, _ in body), special.end, *[special.pad] * padding)
    weights = (1.0, *(weight for _, weight in body), 1.0, *[1.0] * padding)
    return Chunk(ids, weights)

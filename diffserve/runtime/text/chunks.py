"""Cut a weighted prompt into chunks that the text encoder can read. No torch.

A chunk holds as many tokens as the encoder's window minus the start and end marks (75 for CLIP). Where a cut would fall
inside a phrase, the cut moves back to the last comma if one is near, as in A1111.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from diffserve.errors import InvalidRequest
from diffserve.runtime.text.prompt import Piece

MAX_CHUNKS = 32
COMMA_BACKTRACK = (20, 75)  # a comma at most 20 tokens back, in a chunk of 75


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


Token = tuple[int, float]


def chunk_prompt(
    sections: Sequence[Sequence[Piece]],
    tokenize: Callable[[str], Sequence[int]],
    special: SpecialTokens,
    window_tokens: int,
) -> list[Chunk]:
    """Chunks of ``window_tokens`` ids each for the parsed prompt; at least one.

    ``tokenize`` gives the ids of a text without marks. Raises InvalidRequest beyond MAX_CHUNKS chunks.
    """
    room = window_tokens - 2
    bodies: list[list[Token]] = []
    for index, section in enumerate(sections):
        tokens = [(token, piece.weight) for piece in section for token in tokenize(piece.text)]
        parts = _cut(tokens, room, special.comma)
        is_trailing_break = index == len(sections) - 1 and index > 0 and not tokens
        bodies.extend([] if is_trailing_break else parts)
        if len(bodies) > MAX_CHUNKS:
            raise InvalidRequest(
                f"the prompt needs more than {MAX_CHUNKS} chunks of {room} tokens; shorten it.",
                param="prompt",
                code="string_above_max_length",
            )
    return [_seal(body, special, window_tokens) for body in bodies]


def _cut(tokens: Sequence[Token], room: int, comma: int) -> list[list[Token]]:
    backtrack = room * COMMA_BACKTRACK[0] // COMMA_BACKTRACK[1]
    parts: list[list[Token]] = [[]]
    after_comma = 0  # length of the current part up to and with its last comma
    for token in tokens:
        part = parts[-1]
        if len(part) == room:
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

"""Chunks of a prompt that a text encoder can read, made from its parsed pieces. No torch.

A chunk holds as many tokens as the encoder's window minus the start and end marks (75 for CLIP). Where a cut would fall
inside a phrase, the cut moves back to the last comma if one is near.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from diffserve.api.errors import InvalidRequest
from diffserve.api.prompt_syntax import Piece
from diffserve.runtime.kv import salt_of

MAX_CHUNKS = 32
MAX_TOTAL_CHUNKS = 64
"""Chunks of all texts of an image with prompt editing, alternation or AND."""
COMMA_BACKTRACK = (20, 75)  # a comma at most 20 tokens back, in a chunk of 75
Token = tuple[int, float]


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
    unbroken: Mapping[int, int] | None = None,
) -> list[Chunk]:
    """Split a parsed prompt into at least one chunk of ``window_tokens`` ids.

    Args:
        sections: The parsed prompt.
        tokenize: Returns the ids of a text, without special tokens.
        special: The tokenizer's special tokens.
        window_tokens: Number of ids of a chunk.
        unbroken: By first token, lengths of token runs that must stay in one chunk.

    Raises:
        InvalidRequest: There are more than MAX_CHUNKS chunks.
    """
    room = window_tokens - 2
    bodies: list[list[Token]] = []
    for index, section in enumerate(sections):
        tokens: list[Token] = []
        for piece in section:
            tokens += [(token, piece.weight) for token in tokenize(piece.text)]
            if len(tokens) > (MAX_CHUNKS - len(bodies)) * room:  # thousands of pieces would take seconds to tokenize
                raise _too_long(room, "the prompt")
        parts = _cut(tokens, room, special.comma, unbroken or {})
        is_trailing_break = index == len(sections) - 1 and index > 0 and not tokens
        bodies.extend([] if is_trailing_break else parts)
        if len(bodies) > MAX_CHUNKS:
            raise _too_long(room, "the prompt")
    return [_seal(body, special, window_tokens) for body in bodies]


def chunk_tokens(
    tokens: Sequence[int], special: SpecialTokens, window_tokens: int, unbroken: Mapping[int, int] | None = None
) -> list[tuple[tuple[int, ...], int]]:
    """Split ``tokens`` without weights into chunks: the ids of each, and how many of them belong to the text.

    ``unbroken`` is as in ``chunk_prompt``. Raises InvalidRequest beyond MAX_CHUNKS chunks.
    """
    bodies = _cut([(token, 1.0) for token in tokens], window_tokens - 2, special.comma, unbroken or {})
    if len(bodies) > MAX_CHUNKS:
        raise _too_long(window_tokens - 2, "the text")
    return [(_seal(body, special, window_tokens).ids, len(body)) for body in bodies]


def check_total_chunks(count: int, window_tokens: int) -> None:
    """Raise InvalidRequest if the texts of an image that changes its prompt have more than MAX_TOTAL_CHUNKS chunks."""
    if count > MAX_TOTAL_CHUNKS:
        message = (
            f"the texts of the prompts over all steps and parts need {count} chunks of {window_tokens - 2} tokens; at "
            f"most {MAX_TOTAL_CHUNKS} are allowed: shorten them, or use fewer of them."
        )
        raise InvalidRequest(message, param="prompt", code="string_above_max_length")


@contextmanager
def negative_prompt_errors() -> Iterator[None]:
    """Make an InvalidRequest about the prompt that the block raises one about the negative prompt."""
    try:
        yield
    except InvalidRequest as error:
        message = error.message.replace("the prompt", "the negative prompt")
        raise InvalidRequest(message, param="negative_prompt", code=error.code) from None


def _too_long(room: int, what: str) -> InvalidRequest:
    message = f"{what} needs more than {MAX_CHUNKS} chunks of {room} tokens; shorten it."
    return InvalidRequest(message, param="prompt", code="string_above_max_length")


def _cut(tokens: Sequence[Token], room: int, comma: int, run_lengths: Mapping[int, int]) -> list[list[Token]]:
    backtrack = room * COMMA_BACKTRACK[0] // COMMA_BACKTRACK[1]
    parts: list[list[Token]] = [[]]
    after_comma = 0  # length of the current part up to and with its last comma
    for token in tokens:
        part = parts[-1]
        if len(part) < room < len(part) + run_lengths.get(token[0], 1):
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


TOKEN_BITS = 31
"""A token id of one encoder; two fit into the 64 bits that the pool takes."""

WindowName = tuple[bytes, tuple[int, ...]]
"""A salt and token ids: what the pages of a window, or of its beginning, are filed under."""


@dataclass(frozen=True)
class Window:
    """Inputs of all text encoders for one window of a prompt: one chunk each, with equal numbers of tokens.

    A text encoder reads each window of a prompt from its first token, so a window is a separate sequence: a long prompt
    has several, and a shorter negative prompt is padded with the empty prompt's window. CLIP is causal, so windows with
    a common beginning share their leading pages in the pool. The key of a window's pages depends on its kind:

    plain     the tokens, of both encoders for SDXL. A common beginning is shared, logical page by logical page.
    weighted  ``(fox:1.3)`` multiplies token rows and then rescales all of them to the mean of the window, so a token's
              values depend on every other token: the key is all tokens and weights, and only equal windows share.
    silent    SDXL's empty negative prompt, which is zeros (no encoder runs): one key for all.

    Attributes:
        adapters: Digest of adapters that change the encoders or the UNet's keys and values. Only windows with equal
            digests share pages.
        clip_skip: As in ``DiffusionParams``.
    """

    chunks: tuple[Chunk, ...]
    is_silent: bool = False
    adapters: bytes = b""
    clip_skip: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens, marks and padding included."""
        return len(self.chunks[0].ids)

    @cached_property
    def is_weighted(self) -> bool:
        """Whether any token counts more or less than 1."""
        return any(weight != 1.0 for chunk in self.chunks for weight in chunk.weights)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """One number for each position, made from the ids of all encoders."""
        places = zip(*(chunk.ids for chunk in self.chunks), strict=True)
        return tuple(sum(token << TOKEN_BITS * index for index, token in enumerate(place)) for place in places)

    @cached_property
    def salt(self) -> bytes:
        """Key of everything except the leading tokens; empty for plain windows without adapters."""
        parts = [b"adapters", self.adapters] if self.adapters else []
        if self.is_silent:
            return salt_of(*parts, b"silent")
        if self.clip_skip != 1:
            parts += [b"clip skip", str(self.clip_skip).encode()]
        if self.is_weighted:
            weights = array("d", itertools.chain.from_iterable(chunk.weights for chunk in self.chunks))
            parts += [b"weighted", weights.tobytes(), array("q", self.token_ids).tobytes()]
        return salt_of(*parts)

    @property
    def name(self) -> WindowName:
        """Cache key of the window; equal names mean equal conditioning."""
        return self.salt, self.token_ids

    def logical_page_names(self, page_tokens: int) -> set[WindowName]:
        """Return one name for each logical page of the window; windows share the pages whose names are equal."""
        ends = [*range(page_tokens, self.num_tokens, page_tokens), self.num_tokens]
        return {(self.salt, self.token_ids[:end]) for end in ends}

"""What the page pool knows a piece of a prompt by: one window of the text encoders, and which pages it may share.

A text encoder reads each window of a prompt from its first token, so a window is a sequence of its own: a long prompt
is several, and the empty window that fills up a shorter negative prompt is the empty prompt's. CLIP is causal: what a
token becomes depends on the tokens before it in its window, so windows that begin alike share their leading pages.

Three things decide what a window's pages are filed under:

plain     the tokens, of both encoders for SDXL. A common beginning is shared, logical page by logical page.
weighted  ``(fox:1.3)`` multiplies token rows and then rescales all of them to the mean of the whole window, so a
          token's values depend on every other token: tokens and weights together are one name, shared whole or not
          at all.
silent    SDXL's empty negative prompt, which is zeros and no text: one name for everybody.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass
from functools import cached_property

from diffserve.runtime.kv import salt_of
from diffserve.runtime.text.prompt import Chunk

TOKEN_BITS = 31
"""A token id of one encoder; two fit into the 64 bits that the pool takes."""


@dataclass(frozen=True)
class Window:
    """What every encoder of the model reads in one window: one chunk each, of equally many tokens.

    is_silent: the UNet is told zeros, and no encoder runs.
    """

    chunks: tuple[Chunk, ...]
    is_silent: bool = False

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
        """One number for each place: the ids that the encoders read there."""
        places = zip(*(chunk.ids for chunk in self.chunks), strict=True)
        return tuple(sum(token << TOKEN_BITS * index for index, token in enumerate(place)) for place in places)

    @cached_property
    def salt(self) -> bytes:
        """What must be equal besides the leading tokens; empty for plain windows."""
        if self.is_silent:
            return salt_of(b"silent")
        if not self.is_weighted:
            return b""
        weights = array("d", itertools.chain.from_iterable(chunk.weights for chunk in self.chunks))
        return salt_of(b"weighted", weights.tobytes(), array("q", self.token_ids).tobytes())

    def logical_page_names(self, page_tokens: int) -> set[tuple[bytes, tuple[int, ...]]]:
        """One name for each logical page that the window takes; windows share the logical pages whose names they
        share."""
        ends = [*range(page_tokens, self.num_tokens, page_tokens), self.num_tokens]
        return {(self.salt, self.token_ids[:end]) for end in ends}

"""Which rows of a mixed batch attend together, and who may see what.

Rows of one new token (decode) read whole sequences and compute little: side by side, padded to the longest. Rows of a
few (a draft to be checked) go the same way, padded in both directions. A prefill chunk computes much: alone. Rows of
very different lengths are not put together, because padding is copied as well::

    decode   |------------------------|.        chunk   |-----------|.......
             |----------------------|..                     gathered   new
             |---------------------|...         fresh   ...........  (nothing to gather)

Within a query head group, the heads that share keys are packed as further rows of one product, so that keys and
values are never repeated (measured on a CPU: half the time of ``enable_gqa`` for eight decode rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from diffserve.runtime.transfer import send_together

FEW_TOKENS: Final = 16
"""Rows of at most so many new tokens are padded and put side by side."""

WASTED_TOKENS: Final = {"cpu": 1024}
"""Padding that a group of rows may have before another group is cheaper, by kind of device."""

WASTED_ELSEWHERE: Final = 16_384


LONG_CONTEXT: Final = {"cpu": 1 << 30}
"""A decode row of so many tokens is read in chunks (``context_chunks``), by kind of device; on a CPU none is, because
whole contexts were faster up to 8192 tokens there (benchmarks/LOG.md)."""

LONG_ELSEWHERE: Final = 4096
"""Estimated, not measured: eight more launches a layer, against a head's context read by one block of the GPU."""


class Span(NamedTuple):
    """One sequence of the batch: ``num_new`` tokens at the end of ``length`` tokens."""

    num_new: int
    length: int


def is_long(span: Span, device: torch.device) -> bool:
    """Whether a row is read in chunks. It depends on the row alone, so that its bytes do not depend on neighbours."""
    return span.num_new == 1 and span.length >= LONG_CONTEXT.get(device.type, LONG_ELSEWHERE)


def arrange(spans: Sequence[Span], device: torch.device) -> list[list[int]]:
    """Group the indices of ``spans`` that attend together.

    The groups are decode rows, all long rows in one group, rows of a few tokens, and each other chunk by itself.
    """
    most_wasted = WASTED_TOKENS.get(device.type, WASTED_ELSEWHERE)
    long = [index for index, span in enumerate(spans) if is_long(span, device)]
    single = [index for index, span in enumerate(spans) if span.num_new == 1 and index not in long]
    few = [index for index, span in enumerate(spans) if 1 < span.num_new <= FEW_TOKENS]
    together = {*single, *long, *few}
    groups = [*_split(single, spans, most_wasted), *([long] if long else []), *_split(few, spans, most_wasted)]
    return [*groups, *([index] for index in range(len(spans)) if index not in together)]


def _split(indices: Sequence[int], spans: Sequence[Span], most_wasted: int) -> list[list[int]]:
    groups: list[list[int]] = []
    longest = wasted = 0
    for index in sorted(indices, key=lambda index: -spans[index].length):
        wasted += longest - spans[index].length
        if not groups or wasted > most_wasted:
            groups.append([])
            longest, wasted = spans[index].length, 0
        groups[-1].append(index)
    return groups


class RowGroup:
    """B rows that attend together: Q new tokens at most, T tokens at most; of one forward, for all layers.

    tokens   where the group's new tokens stand among all new tokens of the forward
    is_fresh one row without history: its keys and values are those just computed
    pages    int64 (num_layer_groups, B, P)
    positions  int64, of the forward's new tokens
    """

    def __init__(
        self, spans: Sequence[Span], first_token: int, pages: Tensor, positions: Tensor, page_tokens: int
    ) -> None:
        self.num_rows = len(spans)
        self.num_queries = max(span.num_new for span in spans)
        self.num_keys = max(span.length for span in spans)
        self.num_tokens = sum(span.num_new for span in spans)
        self.tokens = slice(first_token, first_token + self.num_tokens)
        self.is_fresh = self.num_rows == 1 and self.num_queries == self.num_keys
        device = pages.device
        num_logical_pages = -(-self.num_keys // page_tokens)
        self.pages = [layers.reshape(-1) for layers in pages[:, :, :num_logical_pages].contiguous()]  # (B * P,) each
        self.pages_shape = (self.num_rows, num_logical_pages * page_tokens)
        self.is_ragged = self.num_tokens < self.num_rows * self.num_queries
        host_tensors = [_padding(spans, self.num_keys, self.pages_shape[1])]
        if self.is_ragged:
            host_tensors += _query_places(spans, self.num_queries)
        self.padding, *places = (
            send_together(host_tensors, device) if self.is_ragged or host_tensors[0].numel() else host_tensors
        )
        if self.is_ragged:
            self._query, self._real = places
        self._positions = positions[self.tokens]
        self._masks: dict[tuple[int | None, int], Tensor | None] = {}

    def take(self, query: Tensor) -> Tensor:
        """(B, Q, H, D) from (num_tokens, H, D), padded where the group is ragged."""
        if self.is_ragged:
            query = query.index_select(0, self._query)
        return query.reshape(self.num_rows, self.num_queries, *query.shape[1:])

    def give(self, output: Tensor) -> Tensor:
        """(num_tokens, H, D) from (B, Q, H, D); the inverse of ``take``."""
        flat = output.reshape(-1, *output.shape[2:])
        return flat.index_select(0, self._real) if self.is_ragged else flat

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask that is added to the scores, (B, 1, repeats * Q, T) of 0 or -inf; None without a mask.

        Args:
            window: Number of tokens back that a query sees, itself included; None for all.
            repeats: Query heads packed into one key head, each with its own Q rows.
            dtype: The dtype of the mask.
        """
        if self.num_queries == 1:
            repeats = 1  # the one row is broadcast
        key = (window if window is not None and window < self.num_keys else None, repeats)
        if key not in self._masks:
            self._masks[key] = self._make_mask(key[0], repeats, dtype)
        return self._masks[key]

    def _make_mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor | None:
        if window is None and self.num_queries == 1 and not self.padding.numel():
            return None
        position = self.take(self._positions[:, None])  # (B, Q, 1); padded queries repeat the last one
        column = torch.arange(self.num_keys, device=position.device)
        hidden = column > position  # (B, Q, T)
        if window is not None:
            hidden |= column <= position - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=position.device).masked_fill_(hidden, -torch.inf)
        return mask.repeat(1, repeats, 1)[:, None]


def _padding(spans: Sequence[Span], num_keys: int, row_tokens: int) -> Tensor:
    """Flat indices into (B, row_tokens) of the places between a row's length and the longest."""
    if all(span.length == num_keys for span in spans):
        return torch.empty(0, dtype=torch.int64)
    column = torch.arange(row_tokens)
    lengths = torch.tensor([span.length for span in spans])[:, None]
    return ((column >= lengths) & (column < num_keys)).reshape(-1).nonzero().reshape(-1)


def _query_places(spans: Sequence[Span], num_queries: int) -> list[Tensor]:
    """For each of B * Q padded queries its token (the last one repeated), and for each token its padded query."""
    query: list[int] = []
    real: list[int] = []
    first = 0
    for row, span in enumerate(spans):
        query += [first + min(at, span.num_new - 1) for at in range(num_queries)]
        real += [row * num_queries + at for at in range(span.num_new)]
        first += span.num_new
    return [torch.tensor(query), torch.tensor(real)]


class Workspace:
    """Memory that gathered keys and values are copied to; it grows to the largest forward and is used by all layers."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def gather(self, name: str, source: Tensor, pages: Tensor) -> Tensor:
        """Return ``source[pages]`` in the buffer ``name``, for source (num_pages, page_tokens, heads, head_dim)."""
        shape = (len(pages), *source.shape[1:])
        count = len(pages) * source[0].numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != source.dtype:
            buffer = self._buffers[name] = torch.empty(count + count // 4, dtype=source.dtype, device=source.device)
        return torch.index_select(source, 0, pages, out=buffer[:count].view(shape))

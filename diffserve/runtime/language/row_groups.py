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

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffserve.runtime.kv import LayerView
from diffserve.runtime.transfer import send_together

FEW_TOKENS: Final = 16
"""Rows of at most so many new tokens are padded and put side by side."""

WASTED_TOKENS: Final = {"cpu": 1024}
"""Padding that a group of rows may have before another group is cheaper, by kind of device."""

WASTED_ELSEWHERE: Final = 16_384


LONG_CONTEXT: Final = {"cpu": 1 << 30}
"""A decode row of so many tokens is read in chunks (``ChunkedRows``), by kind of device; on a CPU none is, because
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

    def gather(self, name: str, source: Tensor, pages: Tensor, padding: Tensor) -> Tensor:
        """Copy pages to the buffer ``name``.

        Args:
            name: The buffer.
            source: Keys or values (num_pages, page_tokens, heads, head_dim).
            pages: Numbers of the pages.
            padding: Indices of tokens of the result to set to zero.

        Returns:
            (tokens of all pages, heads, head_dim).
        """
        shape = (len(pages), *source.shape[1:])
        count = len(pages) * source[0].numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count or buffer.dtype != source.dtype:
            buffer = self._buffers[name] = torch.empty(count + count // 4, dtype=source.dtype, device=source.device)
        tokens = torch.index_select(source, 0, pages, out=buffer[:count].view(shape)).flatten(0, 1)
        if padding.numel():
            tokens.index_fill_(0, padding, 0)  # pages hold what was last written, NaN included
        return tokens


logger = logging.getLogger(__name__)

CHUNK_TOKENS: Final = 512
ROUND_BYTES: Final = {"cpu": 1 << 20}
"""Of keys gathered at a time, by kind of device: on a CPU what fits a cache. Values take as much again."""
ROUND_ELSEWHERE: Final = 64 << 20
CPU_QUERIES: Final = 8
"""Queries of a head on a CPU are a multiple of this. Each thread has Q (514 + D) floats of scratch memory there, one
behind the other, and MKL rounds by how they lie: only where all lie alike does no byte depend on which thread works."""
AGREES: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest difference of the fused attention from the one that is written out, of numbers about 1."""


class ChunkedRows:
    """Decode over long contexts: B rows of one new token each, which read N chunks of pages that are then merged.

    One new token has too few queries to keep a GPU busy, and a long context gathered completely is as large as the
    context. So every context is cut into chunks of ``CHUNK_TOKENS`` tokens, and all chunks of all rows are rows of one
    attention, a bounded number at a time. Each gives its output o_i and the logarithm l_i of its sum of exponentials;
    with l = log(sum(exp(l_i))) the result is sum(exp(l_i - l) o_i) ("flash decoding", Dao et al. 2023)::

        row 0  |--------|--------|---....|        four parts and two: six rows of one attention, padded only at
        row 1  |--------|-.......|                the ends, then merged to two

    Chunks begin at the beginning and are of one length, so what a row reads does not depend on its neighbors.

    pages        int64 (num_layer_groups, B, at least the longest row's)
    token_bytes  of one token's keys in the widest layer
    """

    def __init__(self, spans: Sequence[Span], pages: Tensor, page_tokens: int, token_bytes: int) -> None:
        chunk_pages = max(1, CHUNK_TOKENS // page_tokens)
        tokens = self._chunk_tokens = chunk_pages * page_tokens
        counts = [-(-span.length // tokens) for span in spans]
        max_chunks = max(counts)
        self._shape = (len(spans), max_chunks)
        owners = [row for row, count in enumerate(counts) for _ in range(count)]
        cells = [row * max_chunks + at for row, count in enumerate(counts) for at in range(count)]
        firsts = list(accumulate(counts, initial=0))
        places = [firsts[row] + min(at, count - 1) for row, count in enumerate(counts) for at in range(max_chunks)]
        weighs = [at < count for count in counts for at in range(max_chunks)]  # other cells repeat a chunk
        ends = {firsts[row + 1] - 1: span.length for row, span in enumerate(spans)}
        at_a_time = max(1, ROUND_BYTES.get(pages.device.type, ROUND_ELSEWHERE) // (tokens * token_bytes))
        self._rounds = [range(first, min(first + at_a_time, len(cells))) for first in range(0, len(cells), at_a_time)]
        padding = [
            [
                (place - part.start) * tokens + at
                for place in part
                if place in ends
                for at in _beyond(ends[place], tokens)
            ]
            for part in self._rounds
        ]
        host_tensors = [torch.tensor(part, dtype=torch.int64) for part in (owners, cells, places, weighs, *padding)]
        self._owners, cells_there, self._places, weighs_there, *self._padding = send_together(
            host_tensors, pages.device
        )
        self._is_even = len(cells) == len(places)
        self._level = torch.where(weighs_there.view(*self._shape, 1, 1) > 0, 0.0, -torch.inf)
        padded_pages = F.pad(pages, (0, max(0, max_chunks * chunk_pages - pages.shape[2])))[
            :, :, : max_chunks * chunk_pages
        ]
        self._pages = padded_pages.reshape(len(pages), -1, chunk_pages).index_select(1, cells_there)
        self._masks: list[Tensor | None] | None = None

    def attend(self, query: Tensor, view: LayerView, workspace: Workspace, scale: float | None) -> Tensor:
        """(B, H, D) from query (B, H, D) and the pages of ``view``."""
        B, H, D = query.shape
        G = view.keys.shape[2]
        packed = query.view(B, G, H // G, D).index_select(0, self._owners)  # (N, G, H / G, D)
        masks = self._masks = self._masks or [self._mask(part, padding, query.dtype) for part, padding in self._parts()]
        parts = []
        for (part, padding), mask in zip(self._parts(), masks, strict=True):
            pages = self._pages[view.group, part.start : part.stop].reshape(-1)
            read = [("keys", view.keys), ("values", view.values)]
            keys, values = (self._gather(workspace, name, source, pages, padding) for name, source in read)
            parts.append(attend_weighed(packed[part.start : part.stop], keys, values, mask, scale))
        return self._merge(parts).view(B, H, D).to(query.dtype)

    def _parts(self) -> list[tuple[range, Tensor]]:
        return list(zip(self._rounds, self._padding, strict=True))

    def _gather(self, workspace: Workspace, name: str, source: Tensor, pages: Tensor, padding: Tensor) -> Tensor:
        """(n, G, chunk tokens, D), zero beyond each row's length."""
        tokens = workspace.gather(name, source, pages, padding)
        return tokens.view(-1, self._chunk_tokens, *tokens.shape[1:]).transpose(1, 2)

    def _mask(self, part: range, padding: Tensor, dtype: torch.dtype) -> Tensor | None:
        if not padding.numel():
            return None
        mask = torch.zeros(len(part) * self._chunk_tokens, dtype=dtype, device=padding.device)
        return mask.index_fill_(0, padding, -torch.inf).view(len(part), 1, 1, -1)

    def _merge(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """(B, G, H / G, D) float32."""
        outputs, levels = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        if not self._is_even:
            outputs, levels = (part.index_select(0, self._places) for part in (outputs, levels))
        spread = levels.view(*self._shape, *levels.shape[1:]) + self._level
        row_outputs = outputs.view(*self._shape, *outputs.shape[1:])
        return (spread.softmax(1)[..., None] * row_outputs).sum(1)


def _beyond(length: int, tokens: int) -> range:
    """Places of a context's last chunk that it does not fill."""
    return range((length - 1) % tokens + 1, tokens)


def attend_weighed(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output (N, G, Q, D) and, as float32 (N, G, Q), the logarithm of the sum of exponentials of its scores.

    query  (N, G, Q, D); keys and values (N, G, T, D); mask (N, 1, 1, T) is added to the scores
    """
    if query.device.type == "meta" or _is_right(query.device, query.dtype, query.shape[-1]):
        return _fused(query, keys, values, mask, scale)
    return written_out(query, keys, values, mask, scale)


def written_out(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention and level in float32 without fused kernels, as fallback and reference."""
    scores = torch.matmul(query.float(), keys.float().transpose(2, 3)) * (scale or query.shape[-1] ** -0.5)
    scores = scores if mask is None else scores + mask
    level = scores.logsumexp(-1)
    return torch.matmul((scores - level[..., None]).exp(), values.float()).to(query.dtype), level


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Run torch's fused attention directly, as ``scaled_dot_product_attention`` omits the log-sum-exp."""
    if query.device.type == "cpu":
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        padded = F.pad(query, (0, 0, 0, -query.shape[2] % CPU_QUERIES))
        output, level = attention(padded, keys, values, 0.0, False, attn_mask=mask, scale=scale)
        output = output[:, :, : query.shape[2]]
    else:
        N, G, Q, _ = query.shape
        bias = None if mask is None else mask.expand(N, G, Q, -1)
        attention = torch.ops.aten._scaled_dot_product_efficient_attention
        output, level = attention(query, keys, values, bias, True, 0.0, False, scale=scale)[:2]
    return output, level[..., : query.shape[2]]


@lru_cache
@torch.inference_mode()
def _is_right(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the fused attention of ``device`` runs and agrees with the explicit one; cached."""
    query, keys, values = torch.randn((3, 2, 2, 64, head_dim), generator=torch.Generator().manual_seed(0)).to(
        device, dtype
    )
    mask = torch.zeros((2, 1, 1, 64), dtype=dtype)
    mask[1, ..., 40:] = -torch.inf
    try:
        fused = _fused(query[:, :, :3], keys, values, mask.to(device), None)
    except Exception as error:
        logger.warning("no fused attention over chunks on %s: %s", device, error)
        return False
    expected = written_out(query[:, :, :3], keys, values, mask.to(device), None)
    off = max(
        float((actual.float() - reference.float()).abs().max())
        for actual, reference in zip(fused, expected, strict=True)
    )
    if not off <= AGREES.get(dtype, 0.0):
        logger.warning("the fused attention over chunks on %s is off by %.3g in %s and is not used", device, off, dtype)
        return False
    return True

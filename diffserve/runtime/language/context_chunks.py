"""Decode over long contexts: read in chunks of pages that attend side by side, and merged by what each of them weighs.

One new token has too few queries to keep a GPU busy, and a long context gathered whole is as large as the context. So
every context is cut into chunks of ``CHUNK_TOKENS`` tokens, all chunks of all rows are rows of one attention, a bounded
number at a time, and each gives its output o_i and the logarithm l_i of its sum of exponentials; with
l = log(sum(exp(l_i))) the whole is sum(exp(l_i - l) o_i) ("flash decoding", Dao et al. 2023)::

    row 0  |--------|--------|---....|        four parts and two: six rows of one attention, padded only at
    row 1  |--------|-.......|                the ends, then merged to two

Chunks begin at the beginning and are of one length, so what a row reads does not depend on its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from diffserve.runtime.kv import LayerView
from diffserve.runtime.language.row_groups import Span, Workspace
from diffserve.runtime.transfer import send_together

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
    """B rows of one new token each; N chunks in all.

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
        tokens = workspace.gather(name, source, pages).flatten(0, 1)
        if padding.numel():
            tokens.index_fill_(0, padding, 0)  # pages hold what was last written, NaN included
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

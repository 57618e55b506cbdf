"""Paged attention, which transformers calls in every layer in place of its own attention.

transformers passes each layer's queries, keys and values of the flattened batch to a registered function. This one
writes keys and values to the pool's pages and attends over the pages. No mask is registered for it, so transformers
creates none (``masking_utils._preprocess_mask_arguments``); masks are made here, per group of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffserve.runtime.kv import LayerView, PagedBatch, PagePool, PageTable
from diffserve.runtime.language.row_groups import FEW_TOKENS, ChunkedRows, RowGroup, Span, Workspace, arrange, is_long
from diffserve.runtime.loading.library_imports import import_quietly

PAGED: Final = "diffserve_paged"
"""The name under which transformers knows it."""


class Scoring(NamedTuple):
    """How a layer weighs keys: factor of the products, how many tokens back a query sees, and the bound of scores."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


LayerCall = Callable[[int, Tensor, Tensor, Tensor, Scoring], Tensor]
"""What a forward does in each layer: (N, H, D) from its number, queries (N, H, D), keys and values (N, key heads, D) of
the forward's N new tokens. Idle ones may stand behind them: they leave no keys and values, and are given zero."""


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: LayerCall | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend over pages: query (1, H, N, D), key and value (1, key heads, N, D) -> (1, N, H, D).

    This is transformers' attention interface.
    """
    if paged is None or attention_mask is not None:
        raise RuntimeError("this attention runs over pages only: call the network through LanguageRunner.")
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return paged(module.layer_idx, queries, keys, values, Scoring(scaling, sliding_window, softcap))[None], None


def register() -> str:
    """Register ``PAGED`` with transformers and return it; may be repeated."""
    import_quietly("transformers", "AttentionInterface").register(PAGED, paged_attention)
    return PAGED


@dataclass
class _Group:
    """Rows that attend together; ``rows`` is made when it is first needed, which in long contexts may be never."""

    tokens: slice
    make: Callable[[], RowGroup]
    chunked: ChunkedRows | None

    @cached_property
    def rows(self) -> RowGroup:
        return self.make()


class PagedCall:
    """One forward over ``tables``: ``spans[i]`` are row i's new tokens and length. See ``LayerCall``.

    order  the rows in the order in which their new tokens are to be flattened
    """

    def __init__(
        self, pool: PagePool, tables: Sequence[PageTable], spans: Sequence[Span], workspace: Workspace
    ) -> None:
        arranged = arrange(spans, pool.arena.data.device)
        self.order = [index for group in arranged for index in group]
        self.batch: PagedBatch = pool.batch(
            [tables[index] for index in self.order],
            [spans[index].length - spans[index].num_new for index in self.order],
            [spans[index].length for index in self.order],
        )
        plan = tables[0].plan
        self._views: list[LayerView] = [pool.keys_values(plan.spec.tenant, n) for n in range(len(plan.spec.layers))]
        self._workspace = workspace
        self._groups: list[_Group] = []
        token_bytes = max(layer.num_heads * layer.head_dim for layer in plan.spec.layers) * plan.spec.dtype.itemsize
        row = token = 0
        for group in arranged:
            pages = self.batch.pages[:, row : row + len(group)]
            group_spans = [spans[index] for index in group]
            num_tokens = sum(span.num_new for span in group_spans)
            make = partial(RowGroup, group_spans, token, pages, self.batch.positions, plan.spec.page_tokens)
            is_chunked = is_long(group_spans[0], pages.device)
            chunked = ChunkedRows(group_spans, pages, plan.spec.page_tokens, token_bytes) if is_chunked else None
            self._groups.append(_Group(slice(token, token + num_tokens), make, chunked))
            row, token = row + len(group), token + num_tokens

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Write keys and values to the pages, then attend; see ``LayerCall``."""
        num_tokens = self._groups[-1].tokens.stop
        self.batch.write(layer, key[:num_tokens], value[:num_tokens])
        outputs = []
        for part in self._groups:
            if part.chunked is not None and scoring.window is None and scoring.softcap is None:
                group_query = query[part.tokens]
                outputs.append(part.chunked.attend(group_query, self._views[layer], self._workspace, scoring.scale))
                continue
            group = part.rows
            if group.is_fresh:
                keys, values = key[None, group.tokens].transpose(1, 2), value[None, group.tokens].transpose(1, 2)
            else:
                keys, values = self._gather(layer, group)
            queries = group.take(query[group.tokens])
            outputs.append(group.give(_attend(group, queries, keys, values, scoring)))
        if len(query) > num_tokens:
            outputs.append(torch.zeros_like(query[num_tokens:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _gather(self, layer: int, group: RowGroup) -> tuple[Tensor, Tensor]:
        """Keys and values (B, key heads, T, D), zero beyond each row's length."""
        view = self._views[layer]
        pages = group.pages[view.group]
        gathered = []
        for name, source in (("keys", view.keys), ("values", view.values)):
            tokens = self._workspace.gather(name, source, pages, group.padding)  # (B * P * page_tokens, heads, D)
            gathered.append(tokens.view(*group.pages_shape, *tokens.shape[1:])[:, : group.num_keys].transpose(1, 2))
        return gathered[0], gathered[1]


def _attend(group: RowGroup, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """(B, Q, H, D) from query (B, Q, H, D), keys and values (B, G, T, D)."""
    scale, window, softcap = scoring
    B, Q, H, D = query.shape
    G = keys.shape[1]
    repeats = H // G
    if softcap is None and group.num_rows == 1 and FEW_TOKENS < Q:
        return _attend_chunk(group, query, keys, values, scale, window)
    packed = query.view(B, Q, G, repeats, D).permute(0, 2, 3, 1, 4).reshape(B, G, repeats * Q, D)
    mask = group.mask(window, repeats, query.dtype)
    if softcap is None:
        output = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    else:
        output = _softcapped(packed, keys, values, mask, D**-0.5 if scale is None else scale, softcap)
    return output.view(B, G, repeats, Q, D).permute(0, 3, 1, 2, 4).reshape(B, Q, H, D)


def _attend_chunk(
    group: RowGroup, query: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
) -> Tensor:
    is_plain = group.is_fresh and (window is None or window >= group.num_keys)
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys,
        values,
        attn_mask=None if is_plain else group.mask(window, 1, query.dtype),
        is_causal=is_plain,
        scale=scale,
        enable_gqa=query.shape[2] != keys.shape[1],
    )
    return output.transpose(1, 2)


def _softcapped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Scores squeezed into (-softcap, softcap) before the softmax (Gemma 2, section 2 of its report)."""
    scores = torch.tanh(torch.matmul(query, keys.transpose(2, 3)) * scale / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(query.dtype), values)

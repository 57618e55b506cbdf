"""Batch of one tenant's sequences: index tensors are built once, then each layer needs one scatter and one gather."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from diffserve.runtime.kv.layout import LayerView
from diffserve.runtime.kv.ledger import PageTableError
from diffserve.runtime.kv.page_table import PageTable
from diffserve.runtime.transfer import send, send_together


class Gathered(NamedTuple):
    """Keys and values of a batch, copied out of the pages: (B, T, heads, head_dim), T the longest length.

    Positions at or beyond a row's length are zero.
    """

    keys: torch.Tensor
    values: torch.Tensor


class PagedBatch:
    """``lengths[b]`` tokens of ``tables[b]``, of which those from ``starts[b]`` are new and will be written.

    Made by ``PagePool.batch`` once per forward, used by all layers, stale as soon as one of its tables gets other
    logical pages (PageTableError on use). ``N`` counts the new tokens of all rows, row after row; ``P`` the most
    logical pages of a row.

    pages: int64 (num_groups, B, P), page ids by layer group, padded with 0: what paged attention kernels take.
    positions: int64 (N,), where each new token stands in its own sequence.
    num_new: N, the tokens that every ``write`` must bring.

    One is made for each decode step, so it is made of few tensors: indices are counted in lists, which is faster for as
    many tokens as a forward takes, and what only ``gather`` needs is made by the first ``gather``.
    """

    def __init__(
        self,
        views: Sequence[LayerView],
        tables: Sequence[PageTable],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        self.tables = tuple(tables)
        self.plan = tables[0].plan
        self.max_length = max(lengths)
        self.num_new = sum(lengths) - sum(starts)
        self._row_logical_pages = self.plan.spec.num_logical_pages(self.max_length)
        self._views = views
        self._versions = [table.version for table in tables]
        self._starts, self._lengths = starts, lengths
        page_tokens = self.plan.spec.page_tokens
        positions = [at for first, end in zip(starts, lengths, strict=True) for at in range(first, end)]
        logical_pages = [at // page_tokens for at in positions]
        pages = self._padded_pages()  # (B, P, num_groups)
        written = pages[self._new_rows(), logical_pages] if positions else pages.new_zeros((0, pages.shape[2]))
        self._device = views[0].keys.device
        at = torch.tensor(positions, dtype=torch.int64)
        host_tensors = (written.T, at % page_tokens, pages.permute(2, 0, 1), at)
        device_tensors = send_together(host_tensors, self._device)
        self._written_pages, self._written_slots, self.pages, self.positions = device_tensors  # (num_groups, N), (N,)

    @torch.no_grad()
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new tokens' keys and values of ``layer``, each (N, heads, head_dim) in the tenant's dtype.

        Raises PageTableError for another shape or dtype, or when the batch is stale.
        """
        self._check_fresh()
        view = self._views[layer]
        for name, target, source in (("keys", view.keys, keys), ("values", view.values, values)):
            expected = (self.num_new, *target.shape[2:])
            if source.shape != expected or source.dtype != target.dtype:
                raise PageTableError(
                    f"{name} of layer {layer} of {self.plan.spec.tenant!r} are {tuple(source.shape)} {source.dtype}, "
                    f"expected {expected} {target.dtype}: flatten the rows, and cast where the precision is decided."
                )
            target.index_put_((self._written_pages[view.group], self._written_slots), source)

    def gather(self, layer: int) -> Gathered:
        """Copy all ``lengths[b]`` tokens of every row of ``layer``, those just written included.

        Raises PageTableError when the batch is stale.
        """
        self._check_fresh()
        view = self._views[layer]
        pages = self.pages[view.group].reshape(-1)  # (B * P,)
        return Gathered(self._select(view.keys, pages), self._select(view.values, pages))

    def _select(self, source: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        tokens = torch.index_select(source, 0, pages).flatten(0, 1)  # (B * P * page_tokens, heads, head_dim)
        if self._padding.numel():
            tokens.index_fill_(0, self._padding, 0)
        shape = (len(self.tables), self._row_logical_pages * self.plan.spec.page_tokens)
        return tokens.view(*shape, *tokens.shape[1:])[:, : self.max_length]

    def _padded_pages(self) -> torch.Tensor:
        ids = [table.page_ids()[: self._row_logical_pages] for table in self.tables]
        return ids[0][None] if len(ids) == 1 else pad_sequence(ids, batch_first=True)

    def _new_rows(self) -> list[int]:
        spans = zip(self._starts, self._lengths, strict=True)
        return [row for row, (first, end) in enumerate(spans) for _ in range(first, end)]

    @cached_property
    def _padding(self) -> torch.Tensor:
        """Flat indices into (B, P * page_tokens) of the places between a row's length and the longest."""
        width = self._row_logical_pages * self.plan.spec.page_tokens
        places = [row * width + at for row, end in enumerate(self._lengths) for at in range(end, self.max_length)]
        return send(torch.tensor(places, dtype=torch.int64), self._device)

    def _check_fresh(self) -> None:
        for table, version in zip(self.tables, self._versions, strict=True):
            if table.version != version or not table.is_open:
                raise PageTableError(f"{table} has other pages than when this batch was made: make a new one.")

"""Pages of reference images: keys and values of image tokens, in the pool and with the layers of the UNet's prompts.

A reference takes as many tokens of a page table as its IP-Adapter makes of an image, usually 4 or 16. Equal images with
equal adapters share pages, and so do all unconditional rows of an adapter.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffserve.runtime.ip_adapter import IPAdapter
from diffserve.runtime.kv import KVSpec, PagePool, PageTable
from diffserve.runtime.transfer import send
from diffserve.runtime.unet.cross_attention import ImagePart, Pair


@dataclass(frozen=True, eq=False)
class PagedReference:
    """Reference of one image, with pages that are held until ``close``.

    Attributes:
        cond: Table of the image.
        uncond: Table for the unconditional row; ``None`` for images without guidance.
        scale: Weight of the attention to the image.
    """

    pool: PagePool
    cond: PageTable
    uncond: PageTable | None
    scale: float

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return self.cond.num_pages + (0 if self.uncond is None else self.uncond.num_pages)

    def row(self, *, is_uncond: bool) -> tuple[PageTable, float]:
        """Return the table and the scale for one of the image's rows."""
        table = self.uncond if is_uncond else self.cond
        assert table is not None
        return table, self.scale

    def close(self) -> None:
        """Release the pages."""
        for table in filter(None, (self.cond, self.uncond)):
            self.pool.close(table)


@torch.inference_mode()
def open_image(pool: PagePool, spec: KVSpec, adapter: IPAdapter, tokens: Tensor, key: bytes) -> PageTable:
    """Return a table with keys and values of ``tokens`` (tokens, dim), computed now if they are not cached.

    Args:
        pool: The page pool.
        spec: Tenant of the UNet.
        adapter: The adapter that made the tokens.
        tokens: Image tokens.
        key: Identity of adapter and image; different tokens need different keys.

    Raises:
        PoolBusy: The pages do not fit now; then none are held.
        PoolTooSmall: They can never fit.
    """
    ids, salt = range(len(tokens)), hashlib.sha256(b"reference " + key).digest()
    table, num_cached = pool.open(spec.tenant, ids, salt, reserve=len(ids))
    try:
        if num_cached < len(ids):
            batch = pool.batch([table], [num_cached])
            for layer in range(len(spec.layers)):  # all tokens at once, so that the bytes do not depend on the cache
                batch.write(layer, *(tensor[num_cached:] for tensor in adapter.project(layer, tokens)))
            pool.commit(table, ids)
    except BaseException:
        pool.close(table)
        raise
    return table


def gather_images(
    pool: PagePool, spec: KVSpec, rows: Sequence[Sequence[tuple[PageTable, float]]], *, is_exact: bool
) -> tuple[ImagePart, ...]:
    """Copy the keys and values of the references of a call's rows out of their pages.

    Args:
        pool: The page pool.
        spec: Tenant of the UNet.
        rows: The references of each row, each with its scale.
        is_exact: Make one part of each reference, so that the bytes of a row do not depend on other rows; else one part
            of the first, second, ... references of all rows with equally many tokens.
    """
    parts = defaultdict[tuple[int, ...], list[tuple[int, PageTable, float]]](list)
    for row, references in enumerate(rows):
        for place, (table, scale) in enumerate(references):
            parts[(place, row) if is_exact else (place, table.num_tokens)].append((row, table, scale))
    return tuple(_part(pool, spec, parts[key]) for key in sorted(parts))


def _part(pool: PagePool, spec: KVSpec, entries: Sequence[tuple[int, PageTable, float]]) -> ImagePart:
    rows, tables, scales = zip(*entries, strict=True)
    batch = pool.batch(tables)
    layers = tuple(Pair(*batch.gather(layer)) for layer in range(len(spec.layers)))
    places = None
    if len(rows) > 1:
        device = layers[0].keys.device
        places = send(torch.tensor(rows), device), send(torch.tensor(scales), device).view(-1, 1, 1, 1)
    return ImagePart(rows, layers, scales, places)

"""The paged key/value pool that the rewriter, the text encoder and the UNet's cross-attention share.

Ten pages, and one tenant whose logical pages of four tokens are two pages: one for each of its two layers.

>>> import torch
>>> llm = KVSpec("llm", layers=(LayerSpec(2, 8), LayerSpec(2, 8)), dtype=torch.float32, page_tokens=4)
>>> pool = PagePool(num_pages=10, page_bytes=PagePlan.smallest_page_bytes([llm]))
>>> pool.register(llm).num_groups
2

Sequence A has ten tokens on three logical pages. Two are full: once committed, other sequences can reuse them. The
drawing shows for each page the number of tables that hold it::

    tokens   0  1  2  3 | 4  5  6  7 | 8  9
    pages    (0, 1)       (2, 3)       (4, 5)

>>> seq_a, num_cached = pool.open("llm", range(10), reserve=10)
>>> num_cached, seq_a
(0, PageTable('llm', 10 tokens on [(0, 1), (2, 3), (4, 5)]))
>>> pool.commit(seq_a, range(10))
>>> pool.draw()
'1 1 1 1 1 1 . . . .'

Sequence B starts with the same eight tokens, so only the tokens after them have to be computed::

    A        0  1  2  3 | 4  5  6  7 | 8  9               (4, 5)
             ------ shared ----------
    B        0  1  2  3 | 4  5  6  7 | 50 51 52           (6, 7)

>>> seq_b, num_cached = pool.open("llm", [*range(8), 50, 51, 52], reserve=11)
>>> num_cached, seq_b
(8, PageTable('llm', 11 tokens on [(0, 1), (2, 3), (6, 7)]))
>>> pool.draw()
'2 2 2 2 1 1 1 1 . .'

A second beam of A takes no page until it continues differently: then the partly filled logical page is copied::

    A        0  1  2  3 | 4  5  6  7 | 8  9               (4, 5)
    beam     0  1  2  3 | 4  5  6  7 | 8  9 | 60          (4, 5) -> copy (8, 9)

>>> beam = pool.fork(seq_a)
>>> pool.draw()
'3 3 3 3 2 2 1 1 . .'
>>> pool.reserve(beam, 11)
>>> pool.draw()
'3 3 3 3 1 1 1 1 1 1'

Now the pool is full. The error differs for sequences that can never fit:

>>> pool.open("llm", [7], reserve=1)
Traceback (most recent call last):
diffserve.runtime.kv.ledger.PoolBusy: 2 pages are needed and 0 of 10 can be had now: wait until a running request gives
its pages back, or give the pool more bytes.
>>> pool.can_hold(12)
Traceback (most recent call last):
diffserve.runtime.kv.ledger.PoolTooSmall: 12 pages are needed at once and the whole pool has 10: shorten the text, ask
for fewer tokens or beams, or give the pool more bytes.

After all tables are closed, committed pages stay in the index, idle, for the next equal sequence:

>>> for table in (beam, seq_b, seq_a):
...     pool.close(table)
>>> pool.draw()
'o o o o . . . . . .'

Sequence C has sixteen tokens on eight pages: six are free, and the later logical page of the idle prefix is evicted:

>>> seq_c, num_cached = pool.open("llm", range(100, 116), reserve=16)
>>> pool.draw()
'o o 1 1 1 1 1 1 1 1'
>>> pool.num_cached("llm", range(10))
4
>>> pool.check_integrity()
"""

from __future__ import annotations

from diffserve.runtime.kv.batch import Gathered, PagedBatch
from diffserve.runtime.kv.layout import KVSpec, LayerPlace, LayerSpec, LayerView, PagePlan
from diffserve.runtime.kv.ledger import (
    PageTableError,
    PoolBusy,
    PoolIntegrityError,
    PoolStats,
    PoolTooSmall,
    TenantStats,
    salt_of,
)
from diffserve.runtime.kv.page_table import PageTable
from diffserve.runtime.kv.pool import PagePool

__all__ = [
    "Gathered",
    "KVSpec",
    "LayerPlace",
    "LayerSpec",
    "LayerView",
    "PagePlan",
    "PagePool",
    "PageTable",
    "PageTableError",
    "PagedBatch",
    "PoolBusy",
    "PoolIntegrityError",
    "PoolStats",
    "PoolTooSmall",
    "TenantStats",
    "salt_of",
]

"""The paged key/value pool that the rewriter, the text encoder and the UNet's cross-attention share.

Ten pages, and one tenant whose logical pages of four tokens are two pages: one for each of its two layers.

>>> import torch
>>> llm = KVSpec("llm", layers=(LayerSpec(2, 8), LayerSpec(2, 8)), dtype=torch.float32, page_tokens=4)
>>> pool = PagePool(num_pages=10, page_bytes=PagePlan.smallest_page_bytes([llm]))
>>> pool.register(llm).num_groups
2

Anna's ten tokens touch three logical pages. Two are full: committed, they can be found by others. The pages are drawn
with the number of tables that hold them::

    tokens   0  1  2  3 | 4  5  6  7 | 8  9
    logical page      (0, 1)       (2, 3)     (4, 5)

>>> anna, num_cached = pool.open("llm", range(10), reserve=10)
>>> num_cached, anna
(0, PageTable('llm', 10 tokens on [(0, 1), (2, 3), (4, 5)]))
>>> pool.commit(anna, range(10))
>>> pool.draw()
'1 1 1 1 1 1 . . . .'

Ben says the same eight tokens first, so only the rest has to be computed::

    Anna     0  1  2  3 | 4  5  6  7 | 8  9               (4, 5)
             ------ shared ----------
    Ben      0  1  2  3 | 4  5  6  7 | 50 51 52           (6, 7)

>>> ben, num_cached = pool.open("llm", [*range(8), 50, 51, 52], reserve=11)
>>> num_cached, ben
(8, PageTable('llm', 11 tokens on [(0, 1), (2, 3), (6, 7)]))
>>> pool.draw()
'2 2 2 2 1 1 1 1 . .'

A second beam of Anna's takes no page until it goes on its own way: then the logical page that is still open is copied::

    Anna     0  1  2  3 | 4  5  6  7 | 8  9               (4, 5)
    beam     0  1  2  3 | 4  5  6  7 | 8  9 | 60          (4, 5) -> copy (8, 9)

>>> beam = pool.fork(anna)
>>> pool.draw()
'3 3 3 3 2 2 1 1 . .'
>>> pool.reserve(beam, 11)
>>> pool.draw()
'3 3 3 3 1 1 1 1 1 1'

Now nobody else gets in, and says so; what would never fit is told apart from what has to wait:

>>> pool.open("llm", [7], reserve=1)
Traceback (most recent call last):
diffserve.runtime.kv.errors.PoolBusy: 2 pages are needed and 0 of 10 can be had now: wait until a running request gives
its pages back, or give the pool more bytes.
>>> pool.can_hold(12)
Traceback (most recent call last):
diffserve.runtime.kv.errors.PoolTooSmall: 12 pages are needed at once and the whole pool has 10: shorten the text, ask
for fewer tokens or beams, or give the pool more bytes.

When all have left, what was committed stays, idle, for whoever says it again:

>>> for table in (beam, ben, anna):
...     pool.close(table)
>>> pool.draw()
'o o o o . . . . . .'

A stranger's sixteen tokens need eight pages: six are free, and the later logical page of the idle prefix goes first:

>>> stranger, num_cached = pool.open("llm", range(100, 116), reserve=16)
>>> pool.draw()
'o o 1 1 1 1 1 1 1 1'
>>> pool.num_cached("llm", range(10))
4
>>> pool.check_integrity()
"""

from __future__ import annotations

from diffserve.runtime.kv.batch import Gathered, PagedBatch
from diffserve.runtime.kv.errors import PageTableError, PoolBusy, PoolIntegrityError, PoolTooSmall
from diffserve.runtime.kv.layout import KVSpec, LayerPlace, LayerSpec, LayerView, PagePlan
from diffserve.runtime.kv.ledger import salt_of
from diffserve.runtime.kv.page_table import PageTable
from diffserve.runtime.kv.pool import PagePool
from diffserve.runtime.kv.tenant import PoolStats, TenantStats

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

"""Who has which page: the books of the pool. No torch, no bytes.

Every page is in exactly one of three places::

              allocate                 unlock (last holder)
      free ----------------> held ------------------------------> idle      filed in the prefix index
        ^                     | ^                                  |  |
        |   unlock, not filed | '------------ lock ----------------'  |
        '---------------------'                                       |
        '------------------------ evict (least recently used) --------'
"""

from __future__ import annotations

from collections import Counter

from diffserve.runtime.kv.errors import PoolBusy, PoolTooSmall
from diffserve.runtime.kv.prefix_index import LogicalPage, PrefixIndex


class PageLedger:
    """``num_pages`` pages, free, held by open tables, or idle in the prefix index."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(reversed(range(num_pages)))
        self.index = PrefixIndex()
        self.held: Counter[str] = Counter()
        """Pages held, by tenant."""
        self.idle: Counter[str] = Counter()
        """Pages idle, by tenant."""
        self.evicted: Counter[str] = Counter()
        """Pages evicted since birth, by tenant."""

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones, and idle ones by eviction."""
        return len(self.free) + self.idle.total()

    def require(self, num_pages: int, *, spoken_for: int = 0) -> None:
        """Make sure that ``num_pages`` can be had now when ``spoken_for`` of the available ones are not to be touched.

        Raises PoolBusy otherwise.
        """
        available = self.num_available - spoken_for
        if num_pages > available:
            raise PoolBusy(
                f"{num_pages} pages are needed and {available} of {self.num_pages} can be had now: wait until a "
                "running request gives its pages back, or give the pool more bytes."
            )

    def require_ever(self, num_pages: int) -> None:
        """Raises PoolTooSmall when ``num_pages`` are more than the pool has."""
        if num_pages > self.num_pages:
            raise PoolTooSmall(
                f"{num_pages} pages are needed at once and the whole pool has {self.num_pages}: shorten the text, ask "
                "for fewer tokens or beams, or give the pool more bytes."
            )

    def allocate(self, tenant: str, num_logical_pages: int, num_groups: int) -> list[LogicalPage]:
        """``num_logical_pages`` new logical pages of ``num_groups`` pages, each with one holder; all of them or none.

        Raises PoolBusy, with nothing evicted, when they cannot be had now.
        """
        need = num_logical_pages * num_groups
        self.require(need)
        while len(self.free) < need:
            self._evict()
        pages = [self.free.pop() for _ in range(need)]
        self.held[tenant] += need
        return [LogicalPage(tenant, tuple(pages[at : at + num_groups])) for at in range(0, need, num_groups)]

    def lock(self, logical: LogicalPage) -> None:
        """One holder more."""
        if logical.num_holders == 0:
            self.index.wake(logical)
            self._move(logical, self.idle, self.held)
        logical.num_holders += 1

    def unlock(self, logical: LogicalPage) -> None:
        """One holder less; with the last one a filed logical page becomes idle and any other is free."""
        logical.num_holders -= 1
        if logical.num_holders:
            return
        if logical.key is None:
            self.held[logical.tenant] -= len(logical.pages)
            self._free(logical)
        else:
            self.index.rest(logical)
            self._move(logical, self.held, self.idle)

    def forget(self, tenant: str) -> int:
        """Withdraw every logical page of ``tenant``; idle ones become free. Returns the number of pages freed."""
        before = len(self.free)
        for logical in [logical for _, logical in self.index if logical.tenant == tenant]:
            self._drop(logical)
        return len(self.free) - before

    def _evict(self) -> None:
        logical = self.index.oldest_idle()
        assert logical is not None, "idle pages are counted, and no idle logical page is there"
        self.evicted[logical.tenant] += len(logical.pages)
        self._drop(logical)

    def _drop(self, logical: LogicalPage) -> None:
        self.index.withdraw(logical)
        if not logical.num_holders:
            self.idle[logical.tenant] -= len(logical.pages)
            self._free(logical)

    def _free(self, logical: LogicalPage) -> None:
        self.free.extend(reversed(logical.pages))

    def _move(self, logical: LogicalPage, source: Counter[str], target: Counter[str]) -> None:
        source[logical.tenant] -= len(logical.pages)
        target[logical.tenant] += len(logical.pages)

"""Page pool bookkeeping: errors, index of logical pages by content, order of eviction, and tenants. No tensors.

The key of a logical page is a hash chain::

    root   = H(tenant digest, epoch, salt)
    key[0] = H(root,   tokens  0..15)
    key[1] = H(key[0], tokens 16..31)        so equal keys mean equal tokens all the way back to the first

A logical page without holders stays in the index, idle, until its pages are needed. The least recently used ones are
evicted first, and of one sequence the last logical page first, so that a usable prefix remains.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.runtime.kv.layout import LayerView, PagePlan


class PoolBusy(QueueFull):
    """Error for too few free pages now. Nothing was changed: close or truncate a table, or wait, and try again."""

    default_code = "pool_busy"


class PoolTooSmall(InvalidRequest):
    """Error for a request that needs more pages than the pool has, so that waiting would not help."""

    default_code = "pool_too_small"


class PageTableError(DiffserveError, ValueError):
    """A closed or stale table, a shared page about to be written, a tensor of the wrong shape or dtype."""

    default_code = "page_table_error"


class PoolIntegrityError(DiffserveError):
    """Error of ``check_integrity`` that lists all lost, doubly held or miscounted pages; it is a bug."""

    default_code = "pool_corrupt"


KEY_BYTES = 32


@dataclass(eq=False, slots=True)
class LogicalPage:
    """Storage of ``page_tokens`` tokens of one sequence in all layers of a tenant.

    Attributes:
        num_holders: Number of open tables that contain this logical page.
        key: Key in the index; None while it is still written. An indexed logical page is never written.
        is_full: Whether the key stands for all of its tokens, not only for the first ones (the end of a whole
            sequence).
    """

    tenant: str
    pages: tuple[int, ...]
    num_holders: int = 1
    key: bytes | None = None
    is_full: bool = False


def salt_of(*parts: bytes) -> bytes:
    """One salt from whatever must divide the cache: the API key's secret, the adapter's digest, prompt weights.

    Different lists of parts give different salts; no parts, or only empty ones, give ``b""``, the shared cache.
    """
    if not any(parts):
        return b""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def root_key(tenant_digest: bytes, epoch: int, salt: bytes) -> bytes:
    """Return the start of the key chain of a tenant and a salt; a new ``epoch`` invalidates all earlier keys."""
    return salt_of(tenant_digest, epoch.to_bytes(8, "little"), salt)


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a logical page with ``token_ids`` that follows the logical page with key ``parent``."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


class PrefixIndex:
    """Map from key to logical page, with idle pages in order of last use."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, LogicalPage] = {}
        self._idle: OrderedDict[bytes, LogicalPage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[tuple[bytes, LogicalPage]]:
        return iter(self._by_key.items())

    @property
    def idle(self) -> tuple[LogicalPage, ...]:
        """Return registered logical pages without holders, the next to evict first."""
        return tuple(self._idle.values())

    def find(self, key: bytes) -> LogicalPage | None:
        """Return the logical page registered under ``key``, or None."""
        return self._by_key.get(key)

    def file(self, key: bytes, logical: LogicalPage, *, is_full: bool = True) -> None:
        """File ``logical``, which is held, under ``key``, which must be free; an older key of it is free then."""
        self.withdraw(logical)
        self._by_key[key] = logical
        logical.key, logical.is_full = key, is_full

    def withdraw(self, logical: LogicalPage) -> None:
        """Take ``logical`` out: it is found no more, and may be written by a sole holder."""
        if logical.key is not None:
            self._idle.pop(logical.key, None)
            del self._by_key[logical.key]
            logical.key = None

    def mark_idle(self, logical: LogicalPage) -> None:
        """Mark a registered logical page without holders as most recently used idle page."""
        if logical.key is not None:
            self._idle[logical.key] = logical

    def mark_held(self, logical: LogicalPage) -> None:
        """Remove a registered logical page from the idle list because it has a holder again."""
        if logical.key is not None:
            del self._idle[logical.key]

    def oldest_idle(self) -> LogicalPage | None:
        """Return the next idle logical page to evict, or None."""
        return next(iter(self._idle.values()), None)


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
        """Return the number of pages that are free or can be evicted."""
        return len(self.free) + self.idle.total()

    def require(self, num_pages: int, *, num_reserved: int = 0) -> None:
        """Check that ``num_pages`` are available in addition to ``num_reserved`` pages that must not be used.

        Raises PoolBusy otherwise.
        """
        available = self.num_available - num_reserved
        if num_pages > available:
            raise PoolBusy(
                f"{num_pages} pages are needed and {available} of {self.num_pages} can be had now: wait until a "
                "running request gives its pages back, or give the pool more bytes."
            )

    def require_ever(self, num_pages: int) -> None:
        """Raise PoolTooSmall when ``num_pages`` are more than the pool has."""
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
        """Add one holder."""
        if logical.num_holders == 0:
            self.index.mark_held(logical)
            self._move(logical, self.idle, self.held)
        logical.num_holders += 1

    def unlock(self, logical: LogicalPage) -> None:
        """Remove one holder; without holders a registered page becomes idle, any other is freed."""
        logical.num_holders -= 1
        if logical.num_holders:
            return
        if logical.key is None:
            self.held[logical.tenant] -= len(logical.pages)
            self._free(logical)
        else:
            self.index.mark_idle(logical)
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


@dataclass(frozen=True)
class TenantStats:
    """Statistics of one tenant. Page numbers are current, the others count since creation."""

    held_pages: int
    """In the tables that are open; a shared page counts once."""
    idle_pages: int
    """Pages kept for a later sequence with the same tokens; evicted when memory is needed."""
    evicted_pages: int
    opened: int
    """Sequences opened."""
    asked_tokens: int
    """Tokens of the sequences opened."""
    found_tokens: int
    """Of them, tokens whose keys and values were there already."""
    merged_pages: int
    """Logical pages computed twice at the same time, one of which was given back at commit."""

    @property
    def hit_rate(self) -> float:
        """Share of requested tokens that were cached, 0 without requests."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0


@dataclass(frozen=True)
class PoolStats:
    """Statistics of the pool: ``free + held + idle == num_pages``."""

    num_pages: int
    page_bytes: int
    free_pages: int
    held_pages: int
    idle_pages: int
    num_tables: int
    """Tables open now."""
    tenants: dict[str, TenantStats]


@dataclass
class Tenant:
    """A registered plan, its views into the arena, and its counters since birth."""

    plan: PagePlan
    views: tuple[LayerView, ...]
    epoch: int = 0
    """Part of every key; rises when all that was filed must not be found."""
    opened: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    merged_pages: int = 0

    def root(self, salt: bytes) -> bytes:
        """Return the start of the key chain of sequences with ``salt``."""
        return root_key(self.plan.spec.digest, self.epoch, salt)

    def stats(self, ledger: PageLedger) -> TenantStats:
        """Return the tenant's counters together with its pages in ``ledger``."""
        name = self.plan.spec.tenant
        return TenantStats(
            held_pages=ledger.held[name],
            idle_pages=ledger.idle[name],
            evicted_pages=ledger.evicted[name],
            opened=self.opened,
            asked_tokens=self.asked_tokens,
            found_tokens=self.found_tokens,
            merged_pages=self.merged_pages,
        )

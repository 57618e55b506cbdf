"""Pages of one sequence: prefix search, copy on write, filing and merging; and the integrity check of all tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from diffserve.runtime.kv.layout import Arena, KVSpec, PagePlan
from diffserve.runtime.kv.ledger import (
    LogicalPage,
    PageLedger,
    PageTableError,
    PoolIntegrityError,
    PrefixIndex,
    next_key,
)


class PageTable:
    """Logical pages with the keys and values of one sequence, and the number of tokens that have a place on them.

    Created by ``PagePool.open`` and ``PagePool.fork`` and changed by the pool only. ``logical_pages[i]`` holds tokens
    ``i * page_tokens`` onward; the last may be partly filled. Logical pages may be shared with other tables: shared and
    indexed ones are read-only, see ``PagePool.reserve``.
    """

    __slots__ = ("_page_ids", "is_open", "keys", "logical_pages", "num_tokens", "plan", "root", "version")

    def __init__(self, plan: PagePlan, root: bytes) -> None:
        self.plan = plan
        self.root = root
        self.is_open = True
        self.num_tokens = 0
        self.logical_pages: list[LogicalPage] = []
        self.keys: list[bytes] = []
        """Hash chain of the leading full logical pages whose tokens are known (committed or found)."""
        self.version = 0
        """Rises whenever ``logical_pages`` changes, so that a stale ``PagedBatch`` is detected."""
        self._page_ids: tuple[int, torch.Tensor] | None = None

    @property
    def tenant(self) -> str:
        """Name of the tenant it belongs to."""
        return self.plan.spec.tenant

    @property
    def pages(self) -> tuple[tuple[int, ...], ...]:
        """Page ids: for each logical page one for each group of layers."""
        return tuple(logical.pages for logical in self.logical_pages)

    @property
    def num_pages(self) -> int:
        """Number of pages held, shared ones included."""
        return len(self.logical_pages) * self.plan.num_groups

    @property
    def last_key(self) -> bytes:
        """Key of the last full logical page, where the key chain continues."""
        return self.keys[-1] if self.keys else self.root

    def page_ids(self) -> torch.Tensor:
        """Page ids as int64 (num_logical_pages, num_groups) on the CPU, cached until the logical pages change."""
        if self._page_ids is None or self._page_ids[0] != self.version:
            ids = torch.tensor(self.pages, dtype=torch.int64).reshape(len(self.logical_pages), self.plan.num_groups)
            self._page_ids = (self.version, ids)
        return self._page_ids[1]

    def __repr__(self) -> str:
        state = f"{self.num_tokens} tokens on {list(self.pages)}" if self.is_open else "closed"
        return f"PageTable({self.tenant!r}, {state})"


class Match(NamedTuple):
    """Cached prefix of a sequence: leading logical pages, the keys of the full ones, and the number of their tokens."""

    logical_pages: list[LogicalPage]
    keys: list[bytes]
    num_tokens: int


def find_prefix(
    index: PrefixIndex, spec: KVSpec, root: bytes, token_ids: Sequence[int], most_cached: int | None
) -> Match:
    """Return the longest indexed prefix of ``token_ids``; hashing stops at the first missing logical page."""
    limit = len(token_ids) if spec.whole_sequences else max(0, len(token_ids) - 1)
    limit = limit if most_cached is None else min(limit, most_cached)
    logical_pages: list[LogicalPage] = []
    keys: list[bytes] = []
    num_tokens, key = 0, root
    for first in range(0, limit, spec.page_tokens):
        ids = token_ids[first : first + spec.page_tokens]
        if first + len(ids) > limit:
            break
        key = next_key(key, ids)
        logical = index.find(key)
        if logical is None:
            break
        logical_pages.append(logical)
        num_tokens += len(ids)
        if len(ids) == spec.page_tokens:
            keys.append(key)
    return Match(logical_pages, keys, num_tokens)


def num_logical_wanted(
    plan: PagePlan, logical_pages: Sequence[LogicalPage], start: int, num_tokens: int, *, joining: bool
) -> int:
    """Return the number of new logical pages needed to write tokens ``start .. num_tokens - 1``.

    These are the pages beyond ``logical_pages``, and copies of shared ones. With ``joining`` the sequence is not yet
    counted among the holders of ``logical_pages``.
    """
    total = plan.spec.num_logical_pages(num_tokens)
    touched = logical_pages[start // plan.spec.page_tokens : total]
    return max(0, total - len(logical_pages)) + sum(logical.num_holders + joining > 1 for logical in touched)


def make_writable(
    ledger: PageLedger, arena: Arena, table: PageTable, start: int, num_tokens: int, fresh: list[LogicalPage]
) -> None:
    """Give ``table`` exclusive logical pages for tokens ``start .. num_tokens - 1``; ``fresh`` are the new ones."""
    unused = iter(fresh)
    first = start // table.plan.spec.page_tokens
    sources: list[int] = []
    targets: list[int] = []
    for at in range(first, min(len(table.logical_pages), table.plan.spec.num_logical_pages(num_tokens))):
        logical = table.logical_pages[at]
        if logical.num_holders == 1:
            ledger.index.withdraw(logical)
            continue
        table.logical_pages[at] = next(unused)
        sources += logical.pages
        targets += table.logical_pages[at].pages
        ledger.unlock(logical)
    arena.copy(sources, targets)
    table.logical_pages.extend(unused)
    table.version += bool(fresh)
    del table.keys[first:]


def file_tokens(ledger: PageLedger, table: PageTable, token_ids: Sequence[int]) -> int:
    """Index the newly full logical pages of ``table``, whose first tokens are ``token_ids``; see ``PagePool.commit``.

    Returns the number of logical pages that were freed because equal ones were indexed already.
    """
    spec = table.plan.spec
    num_full, num_rest = divmod(len(token_ids), spec.page_tokens)
    num_merged = 0
    for at in range(len(table.keys), num_full):
        key = next_key(table.last_key, token_ids[at * spec.page_tokens : (at + 1) * spec.page_tokens])
        num_merged += _file(ledger, table, at, key, is_full=True)
        table.keys.append(key)
    if num_rest and spec.whole_sequences and len(token_ids) == table.num_tokens:
        key = next_key(table.last_key, token_ids[num_full * spec.page_tokens :])
        num_merged += _file(ledger, table, num_full, key, is_full=False)
    return num_merged


def _file(ledger: PageLedger, table: PageTable, at: int, key: bytes, *, is_full: bool) -> bool:
    """Index logical page ``at`` under ``key``; returns True if an equal page was indexed already and replaces it."""
    logical, twin = table.logical_pages[at], ledger.index.find(key)
    if twin is logical:
        return False
    if logical.key is not None and logical.is_full:
        if is_full:
            raise PageTableError(
                f"logical page {at} of {table} is filed as other tokens: commit the tokens it was given."
            )
        return False
    if twin is None:
        if logical.key is None or is_full:  # a fork that ends earlier may have filed it by its first tokens
            ledger.index.file(key, logical, is_full=is_full)
        return False
    ledger.lock(twin)
    ledger.unlock(logical)
    table.logical_pages[at] = twin
    table.version += 1
    return True


def check_row(table: PageTable, start: int, length: int) -> None:
    """Raise PageTableError if ``table`` has fewer than ``length`` tokens, or shares one from ``start`` on."""
    if not 0 <= start <= length <= table.num_tokens:
        raise PageTableError(f"tokens {start} to {length} are asked of {table}: reserve them first.")
    page_tokens = table.plan.spec.page_tokens
    for at in range(start // page_tokens, table.plan.spec.num_logical_pages(length) if start < length else 0):
        logical = table.logical_pages[at]
        if logical.num_holders > 1 or logical.key is not None:
            raise PageTableError(
                f"token {max(start, at * page_tokens)} of {table} lies on a page that others see: call "
                f"reserve(table, {length}, start={start}) before writing."
            )


def check_integrity(ledger: PageLedger, tables: Iterable[PageTable]) -> None:
    """Recount everything from the open ``tables``, the index and the free list.

    Raises PoolIntegrityError with all findings.
    """
    open_tables = list(tables)
    holders = Counter(logical for table in open_tables for logical in table.logical_pages)
    idle = ledger.index.idle
    findings = [
        *_pages_in_one_place(ledger, holders, idle),
        *_holders_counted(holders),
        *_index_consistent(ledger, idle),
        *_tenants_counted(ledger, holders, idle),
        *(finding for table in open_tables for finding in _table_consistent(table)),
    ]
    if findings:
        raise PoolIntegrityError("the page pool does not balance: " + "; ".join(findings) + ".")


def draw(ledger: PageLedger, tables: Iterable[PageTable]) -> str:
    """Draw one sign for each page of the pool; see ``PagePool.draw``."""
    signs = ["."] * ledger.num_pages
    for logical in (*ledger.index.idle, *(logical for table in tables for logical in table.logical_pages)):
        sign = str(logical.num_holders) if 0 < logical.num_holders < 10 else "+" if logical.num_holders else "o"
        for page in logical.pages:
            signs[page] = sign
    return " ".join(signs)


def _pages_in_one_place(
    ledger: PageLedger, holders: Iterable[LogicalPage], idle: Iterable[LogicalPage]
) -> Iterator[str]:
    places = Counter(ledger.free)
    for logical in (*holders, *idle):
        places.update(logical.pages)
    duplicates = sorted(page for page, count in places.items() if count > 1)
    missing = sorted(set(range(ledger.num_pages)) - set(places))
    out_of_range = sorted(set(places) - set(range(ledger.num_pages)))
    for what, pages in (("in two places", duplicates), ("nowhere", missing), ("outside the pool", out_of_range)):
        if pages:
            yield f"pages {pages} are {what}"


def _holders_counted(holders: Counter[LogicalPage]) -> Iterator[str]:
    for logical, count in holders.items():
        if logical.num_holders != count:
            yield f"logical page {logical.pages} has {count} holders and counts {logical.num_holders}"


def _index_consistent(ledger: PageLedger, idle: Iterable[LogicalPage]) -> Iterator[str]:
    resting = set(idle)
    for key, logical in ledger.index:
        if logical.key != key:
            yield f"logical page {logical.pages} is filed under another key than its own"
        if (logical.num_holders == 0) != (logical in resting):
            is_idle = "is" if logical in resting else "is not"
            yield f"logical page {logical.pages} has {logical.num_holders} holders and {is_idle} idle"
    for logical in resting:
        if logical.key is None or ledger.index.find(logical.key) is not logical:
            yield f"logical page {logical.pages} is idle and not filed"


def _tenants_counted(ledger: PageLedger, holders: Iterable[LogicalPage], idle: Iterable[LogicalPage]) -> Iterator[str]:
    for name, counted, logical_pages in (("held", ledger.held, holders), ("idle", ledger.idle, idle)):
        recount: Counter[str] = Counter()
        for logical in logical_pages:
            recount[logical.tenant] += len(logical.pages)
        if +recount != +counted:
            yield f"{name} pages by tenant are {dict(recount)} and counted as {dict(counted)}"


def _table_consistent(table: PageTable) -> Iterator[str]:
    if len(table.logical_pages) != table.plan.spec.num_logical_pages(table.num_tokens):
        yield f"{table} has {len(table.logical_pages)} logical pages for {table.num_tokens} tokens"
    if len(table.keys) * table.plan.spec.page_tokens > table.num_tokens:
        yield f"{table} knows {len(table.keys)} full logical pages and has {table.num_tokens} tokens"
    if any(
        logical.tenant != table.tenant or len(logical.pages) != table.plan.num_groups for logical in table.logical_pages
    ):
        yield f"{table} holds a logical page of another tenant or shape"

"""Integrity check of the page pool, which finds lost, doubly held or miscounted pages; and a drawing of the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from diffserve.runtime.kv.errors import PoolIntegrityError
from diffserve.runtime.kv.ledger import LogicalPage, PageLedger
from diffserve.runtime.kv.page_table import PageTable


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

"""The proof that no page is lost, held twice or wrongly counted; and a drawing of who has what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from diffserve.runtime.kv.errors import PoolIntegrityError
from diffserve.runtime.kv.ledger import PageLedger
from diffserve.runtime.kv.page_table import PageTable
from diffserve.runtime.kv.prefix_index import Sheet


def check_integrity(ledger: PageLedger, tables: Iterable[PageTable]) -> None:
    """Recount everything from the open ``tables``, the index and the free list.

    Raises PoolIntegrityError with all findings.
    """
    open_tables = list(tables)
    holders = Counter(sheet for table in open_tables for sheet in table.sheets)
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
    """See ``PagePool.draw``."""
    signs = ["."] * ledger.num_pages
    for sheet in (*ledger.index.idle, *(sheet for table in tables for sheet in table.sheets)):
        sign = str(sheet.num_holders) if 0 < sheet.num_holders < 10 else "+" if sheet.num_holders else "o"
        for page in sheet.pages:
            signs[page] = sign
    return " ".join(signs)


def _pages_in_one_place(ledger: PageLedger, holders: Iterable[Sheet], idle: Iterable[Sheet]) -> Iterator[str]:
    places = Counter(ledger.free)
    for sheet in (*holders, *idle):
        places.update(sheet.pages)
    twice = sorted(page for page, count in places.items() if count > 1)
    lost = sorted(set(range(ledger.num_pages)) - set(places))
    alien = sorted(set(places) - set(range(ledger.num_pages)))
    for what, pages in (("in two places", twice), ("nowhere", lost), ("outside the pool", alien)):
        if pages:
            yield f"pages {pages} are {what}"


def _holders_counted(holders: Counter[Sheet]) -> Iterator[str]:
    for sheet, count in holders.items():
        if sheet.num_holders != count:
            yield f"sheet {sheet.pages} has {count} holders and counts {sheet.num_holders}"


def _index_consistent(ledger: PageLedger, idle: Iterable[Sheet]) -> Iterator[str]:
    resting = set(idle)
    for key, sheet in ledger.index:
        if sheet.key != key:
            yield f"sheet {sheet.pages} is filed under another key than its own"
        if (sheet.num_holders == 0) != (sheet in resting):
            is_idle = "is" if sheet in resting else "is not"
            yield f"sheet {sheet.pages} has {sheet.num_holders} holders and {is_idle} idle"
    for sheet in resting:
        if sheet.key is None or ledger.index.find(sheet.key) is not sheet:
            yield f"sheet {sheet.pages} is idle and not filed"


def _tenants_counted(ledger: PageLedger, holders: Iterable[Sheet], idle: Iterable[Sheet]) -> Iterator[str]:
    for name, counted, sheets in (("held", ledger.held, holders), ("idle", ledger.idle, idle)):
        found: Counter[str] = Counter()
        for sheet in sheets:
            found[sheet.tenant] += len(sheet.pages)
        if +found != +counted:
            yield f"{name} pages by tenant are {dict(found)} and counted as {dict(counted)}"


def _table_consistent(table: PageTable) -> Iterator[str]:
    if len(table.sheets) != table.plan.spec.num_sheets(table.num_tokens):
        yield f"{table} has {len(table.sheets)} sheets for {table.num_tokens} tokens"
    if len(table.keys) * table.plan.spec.page_tokens > table.num_tokens:
        yield f"{table} knows {len(table.keys)} full sheets and has {table.num_tokens} tokens"
    if any(sheet.tenant != table.tenant or len(sheet.pages) != table.plan.num_groups for sheet in table.sheets):
        yield f"{table} holds a sheet of another tenant or shape"

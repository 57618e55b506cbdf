"""PagePool: one budget of pages for all tenants' keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from diffserve.api.errors import ConfigError
from diffserve.runtime.kv.batch import PagedBatch
from diffserve.runtime.kv.layout import Arena, KVSpec, LayerView, PagePlan
from diffserve.runtime.kv.ledger import LogicalPage, PageLedger, PageTableError, PoolStats, Tenant
from diffserve.runtime.kv.page_table import (
    Match,
    PageTable,
    check_integrity,
    check_row,
    draw,
    file_tokens,
    find_prefix,
    make_writable,
    num_logical_wanted,
)


class PagePool:
    """Pool of ``num_pages`` pages of ``page_bytes`` on ``device``, shared by all registered tenants. Not thread-safe.

    Life of a sequence: ``open`` finds cached pages, ``reserve`` adds pages for the next tokens, a ``batch`` writes and
    gathers them layer by layer, ``commit`` indexes full logical pages for reuse, ``close`` releases all.

    Raises ConfigError when the pages cannot be allocated.
    """

    def __init__(self, num_pages: int, page_bytes: int, *, device: torch.device | str = "cpu") -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.arena = Arena(num_pages, page_bytes, torch.device(device))
        self._ledger = PageLedger(num_pages)
        self._tenants: dict[str, Tenant] = {}
        self._tables: set[PageTable] = set()

    @classmethod
    def for_specs(
        cls,
        budget_bytes: int,
        specs: Sequence[KVSpec],
        *,
        page_bytes: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Create a pool of at most ``budget_bytes``, with all ``specs`` registered and pages that suit them.

        ``page_bytes`` overrides the page size. Raises ConfigError when the budget does not hold a single page.
        """
        page_bytes = page_bytes or PagePlan.smallest_page_bytes(specs)
        if budget_bytes < page_bytes:
            raise ConfigError(f"the page pool has {budget_bytes} bytes and one page takes {page_bytes}: give it more.")
        pool = cls(budget_bytes // page_bytes, page_bytes, device=device)
        for spec in specs:
            pool.register(spec)
        return pool

    # Tenants

    def register(self, spec: KVSpec) -> PagePlan:
        """Register the tenant of ``spec``; repeating the same spec changes nothing.

        Raises ValueError when a layer does not fit a page, or when the name is taken by another spec.
        """
        owner = self._tenants.get(spec.tenant)
        if owner is None:
            plan = PagePlan(spec, self.page_bytes)
            owner = self._tenants[spec.tenant] = Tenant(plan, self.arena.views(plan))
        elif owner.plan.spec != spec:
            raise ValueError(f"tenant {spec.tenant!r} is registered with another spec: retire it first.")
        return owner.plan

    def retire(self, tenant: str) -> None:
        """Forget ``tenant`` and its pages. Raises PageTableError while it has open tables."""
        still_open = sum(table.tenant == tenant for table in self._tables)
        if still_open:
            raise PageTableError(f"tenant {tenant!r} has {still_open} open tables: close them before it is retired.")
        self.forget(tenant)
        del self._tenants[tenant]

    def forget(self, tenant: str) -> int:
        """Remove all cached pages of ``tenant`` from the index, after a change of weights or adapters.

        Open tables are not affected; pages that they commit later are not found either.

        Returns:
            The number of freed pages.
        """
        self._tenant(tenant).epoch += 1
        return self._ledger.forget(tenant)

    def plan(self, tenant: str) -> PagePlan:
        """Return how the tenant's logical pages map to pages."""
        return self._tenant(tenant).plan

    # Admission

    @property
    def num_available(self) -> int:
        """Return the number of pages that are free or can be evicted."""
        return self._ledger.num_available

    def num_pages_for(self, tenant: str, num_tokens: int) -> int:
        """Return the pages of a sequence of ``num_tokens`` tokens without sharing."""
        return self._tenant(tenant).plan.num_pages(num_tokens)

    def can_hold(self, num_pages: int) -> bool:
        """Return whether ``num_pages`` are available; raise PoolTooSmall if they never can be."""
        self._ledger.require_ever(num_pages)
        return num_pages <= self.num_available

    # Sequences

    def num_cached(
        self, tenant: str, token_ids: Sequence[int], salt: bytes = b"", *, most_cached: int | None = None
    ) -> int:
        """Return the leading tokens that ``open`` would find, without locking or counting."""
        return self._match(self._tenant(tenant), token_ids, salt, most_cached).num_tokens

    def open(
        self,
        tenant: str,
        token_ids: Sequence[int] = (),
        salt: bytes = b"",
        *,
        reserve: int = 0,
        most_cached: int | None = None,
    ) -> tuple[PageTable, int]:
        """Create a table for a new sequence that starts with ``token_ids``, with its cached pages.

        The cached logical pages are locked in the table, and the caller computes the tokens after them. Only full
        logical pages are used, and never the last token (it must be computed to continue). If the tenant indexes
        ``whole_sequences``, all of ``token_ids`` may be cached, and there is nothing to compute.

        Args:
            tenant: Name of the tenant.
            token_ids: Known tokens of the sequence.
            salt: Only sequences opened with an equal salt are used (``salt_of(api_key_secret, adapter_digest, ...)``);
                the empty salt is shared by all.
            reserve: Number of tokens to reserve as well, as by ``reserve(table, reserve)``; all or nothing.
            most_cached: Largest number of cached tokens to use (for an encoder that must compute all that another
                tenant lacks).

        Returns:
            The table, and the number of cached tokens, which equals ``table.num_tokens`` before reserving.

        Raises:
            PoolBusy, PoolTooSmall: ``reserve`` tokens cannot be held; then nothing has changed.
        """
        owner = self._tenant(tenant)
        match = self._match(owner, token_ids, salt, most_cached)
        if reserve > match.num_tokens:
            self._require(owner.plan, match, reserve)
        table = self._hold(PageTable(owner.plan, owner.root(salt)), match)
        owner.opened += 1
        owner.asked_tokens += len(token_ids)
        owner.found_tokens += match.num_tokens
        self.reserve(table, reserve)
        return table, match.num_tokens

    def reserve(self, table: PageTable, num_tokens: int, *, start: int | None = None) -> None:
        """Make room for ``num_tokens`` tokens in all, and let positions ``start .. num_tokens - 1`` be written.

        start: the first position to be written, by default the first new one. Logical pages from there on that others
        hold too are copied first (copy on write); filed ones held by this table alone are taken out of the index. When
        ``start`` is not below ``num_tokens`` nothing happens. All or nothing; idle pages are evicted as needed.

        Raises PoolBusy (wait, or close something), PoolTooSmall (never), PageTableError (``start`` leaves a gap).
        """
        self._check_open(table)
        first = table.num_tokens if start is None else start
        if not 0 <= first <= table.num_tokens:
            raise PageTableError(f"writing would start at token {first} and {table} ends before it: leave no gap.")
        if first >= num_tokens:
            return
        self._ledger.require_ever(table.plan.num_pages(num_tokens))
        num_new = num_logical_wanted(table.plan, table.logical_pages, first, num_tokens, joining=False)
        fresh = self._ledger.allocate(table.tenant, num_new, table.plan.num_groups)
        make_writable(self._ledger, self.arena, table, first, num_tokens, fresh)
        table.num_tokens = max(table.num_tokens, num_tokens)

    def commit(self, table: PageTable, token_ids: Sequence[int]) -> None:
        """Record that keys and values of ``token_ids`` are written, so that other sequences can reuse them.

        ``token_ids`` are those of the sequence from its first token. Newly full logical pages are indexed, and with
        ``whole_sequences`` the last partial one too if ``token_ids`` reach the end of the table. If an equal logical
        page was indexed meanwhile, it replaces the table's page, which is freed; its contents may differ by the
        rounding of another batch. Cheap when no page is newly full. The numbers are not checked: after non-finite
        results close the table without committing.

        Raises PageTableError for more tokens than the table holds, or a shared logical page indexed with other tokens.
        """
        self._check_open(table)
        if len(token_ids) > table.num_tokens:
            raise PageTableError(f"{len(token_ids)} tokens are committed, {table} has fewer: reserve and write first.")
        self._tenant(table.tenant).merged_pages += file_tokens(self._ledger, table, token_ids)

    def truncate(self, table: PageTable, num_tokens: int) -> None:
        """Drop the tokens from position ``num_tokens`` on, and the logical pages that only they use.

        Raises PageTableError if the table has fewer tokens.
        """
        self._check_open(table)
        if not 0 <= num_tokens <= table.num_tokens:
            raise PageTableError(f"{table} cannot be cut to {num_tokens} tokens.")
        num_logical_pages = table.plan.spec.num_logical_pages(num_tokens)
        self._unlock(table.logical_pages[num_logical_pages:])
        if num_logical_pages < len(table.logical_pages):
            del table.logical_pages[num_logical_pages:]
            table.version += 1
        del table.keys[num_tokens // table.plan.spec.page_tokens :]
        table.num_tokens = num_tokens

    def fork(self, table: PageTable, num_tokens: int | None = None) -> PageTable:
        """Create a second table over the same logical pages, for the first ``num_tokens`` tokens (default all).

        This takes no page. The two may continue differently: the first to write to the shared last logical page copies
        it, in ``reserve``.
        """
        self._check_open(table)
        length = table.num_tokens if num_tokens is None else num_tokens
        if not 0 <= length <= table.num_tokens:
            raise PageTableError(f"{table} has no {length} tokens to fork.")
        spec = table.plan.spec
        prefix = Match(
            table.logical_pages[: spec.num_logical_pages(length)], table.keys[: length // spec.page_tokens], length
        )
        return self._hold(PageTable(table.plan, table.root), prefix)

    def close(self, table: PageTable) -> None:
        """Release all pages of ``table`` for good; indexed logical pages without other holders stay idle."""
        self._check_open(table)
        self._tables.remove(table)
        self._unlock(table.logical_pages)
        table.logical_pages, table.keys, table.num_tokens = [], [], 0
        table.is_open = False

    # Keys and values

    def batch(
        self,
        tables: Sequence[PageTable],
        starts: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> PagedBatch:
        """Sequences of one tenant side by side, to write and gather layer by layer; make one for each forward.

        starts: first new token of each row; by default nothing is new, and the batch is only read.
        lengths: tokens of each row, new ones included; by default all that the table has room for.

        Raises PageTableError for no tables, tables of two tenants, positions that are not reserved, or new tokens on
        pages that others see (``reserve`` makes them writable).
        """
        if not tables:
            raise PageTableError("a batch of no tables: leave it out of the forward.")
        ends = [table.num_tokens for table in tables] if lengths is None else list(lengths)
        begins = ends if starts is None else list(starts)
        for table, begin, end in zip(tables, begins, ends, strict=True):
            self._check_open(table)
            if table.tenant != tables[0].tenant:
                raise PageTableError(f"{table} and {tables[0]} in one batch: their layers differ, make two.")
            check_row(table, begin, end)
        return PagedBatch(self._tenant(tables[0].tenant).views, tables, begins, ends)

    def keys_values(self, tenant: str, layer: int) -> LayerView:
        """Return views of one layer over all pages, for paged attention kernels."""
        return self._tenant(tenant).views[layer]

    # Care

    def stats(self) -> PoolStats:
        """Return page and hit counts, total and by tenant."""
        ledger = self._ledger
        return PoolStats(
            num_pages=self.num_pages,
            page_bytes=self.page_bytes,
            free_pages=len(ledger.free),
            held_pages=ledger.held.total(),
            idle_pages=ledger.idle.total(),
            num_tables=len(self._tables),
            tenants={name: tenant.stats(ledger) for name, tenant in self._tenants.items()},
        )

    def check_integrity(self) -> None:
        """Recount every page, holder and key. For idle moments and tests.

        Raises PoolIntegrityError with all findings.
        """
        check_integrity(self._ledger, self._tables)

    def draw(self) -> str:
        """One sign a page: ``.`` free, ``o`` idle, else the number of tables that hold it (``+`` for ten or more)."""
        return draw(self._ledger, self._tables)

    def _match(self, owner: Tenant, token_ids: Sequence[int], salt: bytes, most_cached: int | None) -> Match:
        return find_prefix(self._ledger.index, owner.plan.spec, owner.root(salt), token_ids, most_cached)

    def _require(self, plan: PagePlan, match: Match, num_tokens: int) -> None:
        self._ledger.require_ever(plan.num_pages(num_tokens))
        num_new = num_logical_wanted(plan, match.logical_pages, match.num_tokens, num_tokens, joining=True)
        num_reactivated = sum(len(logical.pages) for logical in match.logical_pages if not logical.num_holders)
        self._ledger.require(num_new * plan.num_groups, num_reserved=num_reactivated)

    def _hold(self, table: PageTable, match: Match) -> PageTable:
        table.logical_pages, table.keys, table.num_tokens = match
        for logical in table.logical_pages:
            self._ledger.lock(logical)
        self._tables.add(table)
        return table

    def _unlock(self, logical_pages: Sequence[LogicalPage]) -> None:
        for logical in reversed(logical_pages):  # evict the last page first, so that a prefix stays
            self._ledger.unlock(logical)

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            raise PageTableError(f"no tenant {name!r} in the pool, it has {sorted(self._tenants)}: register its spec.")
        return self._tenants[name]

    def _check_open(self, table: PageTable) -> None:
        if table not in self._tables:
            raise PageTableError(f"{table} is not open in this pool.")

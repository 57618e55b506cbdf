"""Statistics of the pool's tenants for the metrics: numbers only, never tokens."""

from __future__ import annotations

from dataclasses import dataclass

from diffserve.runtime.kv.layout import LayerView, PagePlan
from diffserve.runtime.kv.ledger import PageLedger, root_key


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

"""What the pool tells the metrics: numbers only, never tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TenantStats:
    """One tenant. Pages are as of now, the rest counts since birth."""

    held_pages: int
    """In the tables that are open; a shared page counts once."""
    idle_pages: int
    """Kept for whoever says the same again, evicted when wanted."""
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
        """Share of asked tokens that were found, 0 when none were asked."""
        return self.found_tokens / self.asked_tokens if self.asked_tokens else 0.0


@dataclass(frozen=True)
class PoolStats:
    """The whole pool: ``free + held + idle == num_pages``."""

    num_pages: int
    page_bytes: int
    free_pages: int
    held_pages: int
    idle_pages: int
    num_tables: int
    """Tables open now."""
    tenants: dict[str, TenantStats]

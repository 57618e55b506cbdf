"""What the pool keeps for each tenant."""

from __future__ import annotations

from dataclasses import dataclass, field

from diffserve.runtime.kv.arena import LayerView
from diffserve.runtime.kv.ledger import PageLedger
from diffserve.runtime.kv.prefix_index import root_key
from diffserve.runtime.kv.spec import PagePlan
from diffserve.runtime.kv.stats import TenantStats


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
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.digest = self.plan.spec.digest

    def root(self, salt: bytes) -> bytes:
        """Where the key chain of sequences with ``salt`` begins."""
        return root_key(self.digest, self.epoch, salt)

    def count(self, asked_tokens: int, found_tokens: int) -> None:
        """One more sequence was opened."""
        self.opened += 1
        self.asked_tokens += asked_tokens
        self.found_tokens += found_tokens

    def stats(self, ledger: PageLedger) -> TenantStats:
        """Its counters together with its pages in ``ledger``."""
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

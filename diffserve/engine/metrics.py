"""From the books of the page pool to what the metrics show. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffserve.engine_stats import PageStats, TenantPages

if TYPE_CHECKING:
    from diffserve.runtime.kv import PoolStats


def page_stats(stats: PoolStats) -> PageStats:
    """``stats`` as it travels; the weights' digest behind a tenant's name is nobody's business there."""
    return PageStats(
        num_pages=stats.num_pages,
        page_bytes=stats.page_bytes,
        free_pages=stats.free_pages,
        tenants=tuple(
            TenantPages(
                tenant=name.partition(":")[0],
                held_pages=tenant.held_pages,
                idle_pages=tenant.idle_pages,
                evicted_pages=tenant.evicted_pages,
                asked_tokens=tenant.asked_tokens,
                found_tokens=tenant.found_tokens,
            )
            for name, tenant in sorted(stats.tenants.items())
        ),
    )

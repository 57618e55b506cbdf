"""Errors of the page pool."""

from __future__ import annotations

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull


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

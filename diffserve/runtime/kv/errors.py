"""What can go wrong with the page pool."""

from __future__ import annotations

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull


class PoolBusy(QueueFull):
    """Not enough pages can be had now. Nothing was changed: close or truncate a table, or wait, and ask again."""

    default_code = "pool_busy"


class PoolTooSmall(InvalidRequest):
    """More pages are asked for than the pool has, so waiting would never end."""

    default_code = "pool_too_small"


class PageTableError(DiffserveError, ValueError):
    """A closed or stale table, a shared page about to be written, a tensor of the wrong shape or dtype."""

    default_code = "page_table_error"


class PoolIntegrityError(DiffserveError):
    """``check_integrity`` found pages that are lost, held twice or wrongly counted, all listed: a bug of ours."""

    default_code = "pool_corrupt"

"""What can go wrong with the page pool::

QueueFull
  PoolBusy            the pages are not there now: wait for somebody to close a table, then ask again
InvalidRequest
  PoolTooSmall        the pages will never be there: the pool itself is smaller
DiffserveError
  PageTableError      a table, a layer or a tensor is used against the rules (a ValueError too)
  PoolIntegrityError  the books do not balance: a bug, never the caller's fault
"""

from __future__ import annotations

from diffserve.errors import DiffserveError, InvalidRequest, QueueFull


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
    """``check_integrity`` found pages that are lost, held twice or wrongly counted; the message lists all findings."""

    default_code = "pool_corrupt"

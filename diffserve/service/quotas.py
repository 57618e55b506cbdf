"""Daily quotas of API keys and of users: images and device time per UTC day.

What a key used today is read from the database before each of its requests, so servers that share the database share
its quotas, and a restart changes nothing. Images of requests that run on this server count as used. Device time counts
once an image or text is finished: a key can exceed it by what runs when it is used up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from diffserve.api.errors import QuotaExceeded
from diffserve.store.errors import StoreError
from diffserve.store.keys import Key
from diffserve.store.usage import UsageCounts, renewal_s

log = logging.getLogger("diffserve.http")


class UsageToday(Protocol):
    """Source of the usage of a key; see ``diffserve.service.stored.usage.UsageBook``."""

    async def today(self, owner: str) -> UsageCounts:
        """Return what ``owner`` used on the current UTC day. Raises StoreError."""


class Quotas:
    """Checks requests against the quotas of their keys.

    Args:
        usage: Says what a key used today.
        key_of: Returns the key with an ID, or None.
        clock: Returns seconds since 1970.
    """

    def __init__(
        self, usage: UsageToday, key_of: Callable[[str], Key | None], clock: Callable[[], float] = time.time
    ) -> None:
        self._usage = usage
        self._key_of = key_of
        self._clock = clock

    async def check(self, owner: str, num_images: int, num_running: Callable[[], int] = lambda: 0) -> None:
        """Refuse a request that exceeds a quota; without a database, requests are accepted.

        Nothing else runs between the check and the return, so that a caller can reserve the images at once.

        Args:
            owner: The ID of the key, "" if there is none.
            num_images: Images that the request makes.
            num_running: Returns how many images of ``owner`` are accepted and not finished.

        Raises:
            QuotaExceeded: The key has used what it may use today.
        """
        key = self._key_of(owner) if owner else None
        if key is None or not (key.images_per_day or key.device_seconds_per_day):
            return
        try:
            used = await self._usage.today(owner)
        except StoreError as error:
            log.error("a quota could not be checked", extra={"reason": error.name})
            return
        if key.images_per_day and num_images and used.pictures + num_running() + num_images > key.images_per_day:
            running = f", {num_running()} are being made" if num_running() else ""
            raise self._error(
                f"the quota is {key.images_per_day} images per day; {used.pictures} are used{running}, and this "
                f"request needs {num_images}"
            )
        if key.device_seconds_per_day and used.device_s >= key.device_seconds_per_day:
            limit_s = key.device_seconds_per_day
            raise self._error(f"the quota is {limit_s:g} seconds of device time per day; {used.device_s:.1f} are used")

    async def state(self, owner: str) -> dict[str, Any]:
        """Return the quotas of a key and what is left of them, None where it has none. Raises StoreError."""
        key = self._key_of(owner) if owner else None
        images, device_s = (None, None) if key is None else (key.images_per_day, key.device_seconds_per_day)
        used = await self._usage.today(owner)
        return {
            "images_per_day": images or None,
            "images_left": max(0, images - used.pictures) if images else None,
            "device_seconds_per_day": device_s or None,
            "device_seconds_left": max(0.0, device_s - used.device_s) if device_s else None,
            "renews_at": int(renewal_s(self._clock())),
        }

    def _error(self, message: str) -> QuotaExceeded:
        now_s = self._clock()
        renewal = datetime.fromtimestamp(renewal_s(now_s), UTC).strftime("%Y-%m-%d %H:%M UTC")
        return QuotaExceeded(f"{message}. It renews at {renewal}.", retry_after_s=renewal_s(now_s) - now_s)

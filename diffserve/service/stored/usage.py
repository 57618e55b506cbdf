"""``/v1/usage``: usage of a key by day; ``/v1/usage/keys``: usage of all keys."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.service.http.errors import HttpError
from diffserve.service.quotas import Quotas
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import LISTINGS
from diffserve.store.errors import StoreError
from diffserve.store.usage import MAX_DAYS, Usage, UsageCounts, day_of

WRITE_DELAY_S: Final = 0.05
RETRY_DELAY_S: Final = 5.0
DEFAULT_DAYS: Final = 30
Days = Annotated[int, Query(ge=1, le=MAX_DAYS, description="Number of days, including today.")]

log = logging.getLogger("diffserve.http")


class UsageBook:
    """Collects usage and writes it together, at most ``WRITE_DELAY_S`` later, also when cancelled.

    What cannot be written, because the disk is full for example, is kept and written later.
    """

    def __init__(self, usage: Usage, clock: Callable[[], float] = time.time) -> None:
        self._usage = usage
        self._clock = clock
        self._unsaved: dict[tuple[str, str], UsageCounts] = {}
        self._writing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    def count(self, owner: str, used: UsageCounts) -> None:
        """Add usage of the key ``owner``."""
        key = owner, day_of(self._clock())
        self._unsaved[key] = self._unsaved.get(key, UsageCounts()).plus(used)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        try:
            delay_s = WRITE_DELAY_S
            while self._unsaved:
                await asyncio.sleep(delay_s)
                delay_s = WRITE_DELAY_S if await self.settle() else RETRY_DELAY_S
        finally:
            if self._unsaved:
                self._add(self._take())

    async def settle(self) -> bool:
        """Write all collected usage and return whether that succeeded."""
        async with self._lock:
            return await self._settle()

    async def today(self, owner: str) -> UsageCounts:
        """Return what ``owner`` used on the current UTC day, by all servers that share the database.

        Raises:
            StoreError: It cannot be read.
        """
        async with self._lock:  # writes wait, so that usage is either read here or in _unsaved
            day = day_of(self._clock())
            await self._settle()
            stored = await LISTINGS.run(self._usage.days, day, owner)
        used = self._unsaved.get((owner, day), UsageCounts())
        for _, stored_day, amounts in stored:
            if stored_day == day:
                used = used.plus(amounts)
        return used

    async def _settle(self) -> bool:
        if not self._unsaved:
            return True
        used = self._take()
        if await LISTINGS.run(self._add, used):
            return True
        for key, amounts in used.items():
            self._unsaved[key] = self._unsaved.get(key, UsageCounts()).plus(amounts)
        return False

    def _take(self) -> dict[tuple[str, str], UsageCounts]:
        left, self._unsaved = self._unsaved, {}
        return left

    def _add(self, used: dict[tuple[str, str], UsageCounts]) -> bool:
        try:
            self._usage.add(used)
        except StoreError as error:
            log.error("usage could not be stored", extra={"reason": error.name})
            return False
        return True


class UsageRoutes:
    """The routes of ``usage``."""

    def __init__(self, app: FastAPI, usage: Usage, book: UsageBook, owners: Owners, quotas: Quotas | None) -> None:
        self._quotas = quotas
        self._usage = usage
        self._book = book
        self._owners = owners
        app.get("/v1/usage", summary="Usage of the key by day")(self.usage_of_key)
        app.get("/v1/usage/keys", summary="Usage of all keys by day")(self.usage_of_all)

    async def usage_of_key(self, request: Request, days: Days = DEFAULT_DAYS) -> Response:
        """Return the usage of the request's key by day, and what is left of its quotas today."""
        owner = self._owners.of(request)
        return await self._usage_by_day(days, owner, {} if self._quotas is None else await self._quotas.state(owner))

    async def usage_of_all(self, request: Request, days: Days = DEFAULT_DAYS) -> Response:
        """Return the usage of all keys by day; ``key_id`` is empty for requests without a key."""
        if not self._owners.is_admin(request):
            raise HttpError(403, "this needs a key with the scope admin.", code="insufficient_permissions")
        return await self._usage_by_day(days, None, None)

    async def _usage_by_day(self, num_days: int, owner: str | None, quota: dict[str, Any] | None) -> Response:
        await self._book.settle()
        rows = await LISTINGS.run(self._usage.days, day_of(time.time(), num_days - 1), owner)
        total = UsageCounts()
        for _, _, used in rows:
            total = total.plus(used)
        data = [{"object": "usage.day", "key_id": key, "day": day, **used._asdict()} for key, day, used in rows]
        answer = {"object": "list", "data": data, "total": total._asdict()}
        return JSONResponse(answer | ({"quota": quota} if quota else {}))

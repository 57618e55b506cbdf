"""Whose picture is encoded next: small ones do not wait for a crowd of large ones, and large ones not for ever."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

AHEAD_S_PER_MPX: Final = 5.0
"""So much earlier than a picture without pixels one of a million has to come to go before it: some thirty times what
encoding takes."""


class EncodingTurns:
    """Lets in ``num_places`` at a time; of who waits, who came first, large pictures as if later."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def taken(self, num_pixels: int) -> AsyncIterator[None]:
        """A place, for a picture of ``num_pixels``."""
        await self._enter(num_pixels)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, num_pixels: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + AHEAD_S_PER_MPX * num_pixels / 1e6, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was let in just then
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

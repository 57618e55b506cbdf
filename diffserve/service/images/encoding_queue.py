"""Order in which images are encoded: small images first, large ones not too late."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

AHEAD_S_PER_MPX: Final = 5.0
"""Seconds that an image of one million pixels is placed further back in the queue, about 30 times its encoding time."""


class EncodingQueue:
    """Queue with ``num_slots`` slots; waiting images are ordered by arrival time plus a penalty for their size."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def slot(self, num_pixels: int) -> AsyncIterator[None]:
        """Hold a slot for an image of ``num_pixels``."""
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
            if not turn.cancelled():  # the slot was granted at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

"""Concurrency limit for long work: a total number of slots, and one slot per client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ClientSlots:
    """A semaphore of ``num_slots`` slots, at most one per client; waiting clients are served in order of arrival."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._active: set[str] = set()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Hold a slot for ``client`` while the block runs."""
        await self._acquire(client)
        try:
            yield
        finally:
            self._active.discard(client)
            self._grant_slots()

    async def _acquire(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((client, turn))
        self._grant_slots()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot was granted in the same iteration of the event loop
                self._active.discard(client)
            else:
                self._waiting.remove((client, turn))
            self._grant_slots()
            raise

    def _grant_slots(self) -> None:
        """Give free slots to the clients that have waited longest and hold none."""
        for entry in list(self._waiting):
            client, turn = entry
            if len(self._active) >= self._num_slots:
                return
            if client not in self._active and not turn.done():
                self._active.add(client)
                self._waiting.remove(entry)
                turn.set_result(None)

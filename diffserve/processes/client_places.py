"""Places for work that takes long: a bounded number at a time, and one for each client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ClientPlaces:
    """Lets in at most ``num_places`` at a time, never two of one client; clients that wait go in order of arrival."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._inside: set[str] = set()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Hold a place of ``client`` for the length of the block."""
        await self._enter(client)
        try:
            yield
        finally:
            self._inside.discard(client)
            self._let_in()

    async def _enter(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((client, turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was given in the same turn of the loop
                self._inside.discard(client)
            else:
                self._waiting.remove((client, turn))
            self._let_in()
            raise

    def _let_in(self) -> None:
        """Give free places to the clients that wait for longest and hold none."""
        for entry in list(self._waiting):
            client, turn = entry
            if len(self._inside) >= self._num_places:
                return
            if client not in self._inside and not turn.done():
                self._inside.add(client)
                self._waiting.remove(entry)
                turn.set_result(None)

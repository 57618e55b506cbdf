"""Who is inside, and whether anybody else may come in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from diffserve.errors import EngineUnavailable


class Gate:
    """Counts the requests that are being worked on; once closed, it lets nobody in and says when the last is out."""

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_closed(self) -> bool:
        """Whether the server is draining."""
        return self._is_closed

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be counted for the length of the block. EngineUnavailable once the gate is closed."""
        if self._is_closed:
            raise EngineUnavailable("the server is shutting down; please try again in a moment.")
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._empty.set()

    def close(self) -> None:
        """Let nobody else in."""
        self._is_closed = True

    async def wait_until_empty(self) -> None:
        """Return when nobody is inside."""
        await self._empty.wait()

"""The events of a response that is made in the background, told to whoever follows it, now or later."""

from __future__ import annotations

import asyncio

from diffserve.service.http.streams import Events

END = b"\n\n"


class EventLog:
    """Events in turn, each in the place of its ``sequence_number``, and those who wait for more.

    has_failed  whether it ended otherwise than it was meant to
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.num_bytes = 0
        self.has_failed = False
        self._over = asyncio.Event()
        self._news = asyncio.Event()

    def add(self, chunk: bytes) -> None:
        """Note whole events, one or several."""
        self.events += [part + END for part in chunk.split(END) if part]
        self.num_bytes += len(chunk)
        self._tell()

    def close(self) -> None:
        """There will be no more."""
        self._over.set()
        self._tell()

    async def follow(self, place: int) -> Events:
        """The events from ``place`` on, until there are no more to come."""
        while True:
            for event in self.events[place:]:
                place += 1
                yield event
            if place >= len(self.events):
                if self._over.is_set():
                    return
                await self._news.wait()

    async def whole(self) -> bytes | None:
        """All events, once there are no more to come; ``None`` where it failed."""
        await self._over.wait()
        return None if self.has_failed else b"".join(self.events)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


async def retold(events: tuple[bytes, ...]) -> Events:
    """Those of a response that is over."""
    for event in events:
        yield event

"""Event log of a background response, which clients can follow while it grows and later."""

from __future__ import annotations

import asyncio

from diffserve.service.http.streams import Events

END = b"\n\n"


class EventLog:
    """Encoded events by their ``sequence_number``, and waiting readers.

    Attributes:
        events: The events so far.
        num_bytes: Their size.
        has_failed: Whether the response failed.
    """

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.num_bytes = 0
        self.has_failed = False
        self._complete = asyncio.Event()
        self._changed = asyncio.Event()

    def add(self, chunk: bytes) -> None:
        """Add one or several complete events."""
        self.events += [part + END for part in chunk.split(END) if part]
        self.num_bytes += len(chunk)
        self._wake_readers()

    def close(self) -> None:
        """Mark the log as complete."""
        self._complete.set()
        self._wake_readers()

    async def follow(self, place: int) -> Events:
        """Yield the events from index ``place`` on until the log is complete."""
        while True:
            for event in self.events[place:]:
                place += 1
                yield event
            if place >= len(self.events):
                if self._complete.is_set():
                    return
                await self._changed.wait()

    async def joined(self) -> bytes | None:
        """Wait until the log is complete and return all events; None if the response failed."""
        await self._complete.wait()
        return None if self.has_failed else b"".join(self.events)

    def _wake_readers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def replay(events: tuple[bytes, ...]) -> Events:
    """Yield stored events."""
    for event in events:
        yield event

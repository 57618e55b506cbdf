"""Store of responses in memory, for retrieval and for follow-up requests, and event logs of background responses.

It holds the newest ``MAX_RESPONSES`` within ``MAX_BYTES``; only the key that created a response can see it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError
from diffserve.service.http.streams import Events
from diffserve.service.responses.turns import Turn

MAX_RESPONSES: Final = 1000
MAX_BYTES: Final = 32 << 20


class StoredResponse(NamedTuple):
    """A stored response.

    Attributes:
        owner: Id of the key of its client; "" without keys.
        body: The response object as JSON.
        turns: The whole conversation, with the output of the response.
        input_span: The turns of the input.
        work: Id of the request that still runs in the background; "" when it has ended.
        events: Encoded events of a finished background stream.
    """

    owner: str
    body: bytes
    turns: tuple[Turn, ...]
    input_span: slice = slice(0)
    work: str = ""
    events: tuple[bytes, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Approximate size; turns that are shared with earlier responses count each time."""
        return len(self.body) + sum(map(len, self.events)) + sum(turn.num_bytes for turn in self.turns)


class ResponseStore:
    """Responses by id, within limits on their number and size.

    Beyond a limit, the oldest finished response of the owner with the largest share is removed.
    """

    def __init__(
        self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES, called: str = "response"
    ) -> None:
        self._called = called
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response_id: str, response: StoredResponse) -> bool:
        """Store or replace a response; return False if there is no room for it."""
        if response.num_bytes > self._max_bytes:
            return False
        before = self._kept.pop(response_id, None)
        self._num_bytes -= 0 if before is None else before.num_bytes
        self._kept[response_id] = response
        self._num_bytes += response.num_bytes
        while self._num_bytes > self._max_bytes:
            self._drop(lambda stored: stored.num_bytes)
        while len(self._kept) > self._max_responses:
            self._drop(lambda stored: 1)
        return response_id in self._kept

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response of ``owner``. Raises HttpError 404."""
        stored = self._kept.get(response_id)
        if stored is None or stored.owner != owner:
            raise HttpError(404, unknown(response_id, self._called), code=f"{self._called}_not_found")
        return stored

    def has(self, response_id: str, owner: str) -> bool:
        """Return whether a response of ``owner`` is stored."""
        stored = self._kept.get(response_id)
        return stored is not None and stored.owner == owner

    def previous(self, response_id: str, owner: str) -> tuple[Turn, ...]:
        """Return the conversation up to a response of ``owner``. Raises InvalidRequest."""
        stored = self._kept.get(response_id)
        if stored is None or stored.owner != owner:
            raise InvalidRequest(unknown(response_id), param="previous_response_id", code="previous_response_not_found")
        message = f"the response {show(response_id)} is not finished; continue from it when it is."
        check(not stored.work, message, "previous_response_id")
        return stored.turns

    def holds_work(self, response_id: str) -> bool:
        """Return whether a stored response is still running."""
        stored = self._kept.get(response_id)
        return stored is not None and bool(stored.work)

    def note_events(self, response_id: str, events: tuple[bytes, ...]) -> None:
        """Store the events of a response, if it is stored and there is room."""
        if response_id in self._kept:
            self.put(response_id, self._kept[response_id]._replace(events=events))

    def remove(self, response_id: str, owner: str) -> None:
        """Delete a response of ``owner``. Raises HttpError 404."""
        stored = self.get(response_id, owner)
        del self._kept[response_id]
        self._num_bytes -= stored.num_bytes

    def _drop(self, weigh: Callable[[StoredResponse], int]) -> None:
        """Delete the oldest response of the owner with the largest weight, finished ones first."""
        owned = Counter[str]()
        for response in self._kept.values():
            owned[response.owner] += weigh(response)
        [(owner, _)] = owned.most_common(1)
        candidates = (name for name, response in self._kept.items() if response.owner == owner)
        oldest = min(candidates, key=lambda name: bool(self._kept[name].work))
        self._num_bytes -= self._kept.pop(oldest).num_bytes

    def finder(self, owner: str) -> Callable[[str], Turn | None]:
        """Return a function that finds a turn of ``owner`` by its item id; its index is built at the first call."""

        @cache
        def turns_by_id() -> dict[str, Turn]:
            responses = (response for response in self._kept.values() if response.owner == owner)
            return {turn.id: turn for response in responses for turn in response.turns if turn.id}

        return lambda item_id: turns_by_id().get(item_id)


def unknown(name: str, called: str = "response") -> str:
    """Return the message about an id that is not stored."""
    unless = ", unless store was false," if called == "response" else ""
    return f"there is no {called} {show(name)}; the newest ones are stored in memory{unless} until the server restarts."


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

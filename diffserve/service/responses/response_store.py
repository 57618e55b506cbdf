"""Store of responses in memory, for retrieval and for follow-up requests.

It holds the newest ``MAX_RESPONSES`` within ``MAX_BYTES``; only the key that created a response can see it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError
from diffserve.service.responses.turns import Turn

MAX_RESPONSES: Final = 1000
MAX_BYTES: Final = 32 << 20


class StoredResponse(NamedTuple):
    """A response.

    owner  the id of the key that it was made with, "" where there are none
    body   its object as JSON
    turns  the whole conversation, its own output included
    input_span  which of them its input was
    work   the request that still makes it in the background, "" once it is over
    events those that it was told with, where it was made and told in the background, and is over
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
            self._drop(lambda one: one.num_bytes)
        while len(self._kept) > self._max_responses:
            self._drop(lambda one: 1)
        return response_id in self._kept

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response of ``owner``. Raises HttpError 404."""
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise HttpError(404, unknown(response_id, self._called), code=f"{self._called}_not_found")
        return found

    def has(self, response_id: str, owner: str) -> bool:
        """Return whether a response of ``owner`` is stored."""
        found = self._kept.get(response_id)
        return found is not None and found.owner == owner

    def previous(self, response_id: str, owner: str) -> tuple[Turn, ...]:
        """Return the conversation up to a response of ``owner``. Raises InvalidRequest."""
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise InvalidRequest(unknown(response_id), param="previous_response_id", code="previous_response_not_found")
        if found.work:
            said = f"the response {show(response_id)} is still being made; go on from it once it is."
            raise InvalidRequest(said, param="previous_response_id")
        return found.turns

    def holds_work(self, response_id: str) -> bool:
        """Return whether a stored response is still running."""
        found = self._kept.get(response_id)
        return found is not None and bool(found.work)

    def note_events(self, response_id: str, events: tuple[bytes, ...]) -> None:
        """Store the events of a response, if it is stored and there is room."""
        if response_id in self._kept:
            self.put(response_id, self._kept[response_id]._replace(events=events))

    def remove(self, response_id: str, owner: str) -> None:
        """Delete a response of ``owner``. Raises HttpError 404."""
        found = self.get(response_id, owner)
        del self._kept[response_id]
        self._num_bytes -= found.num_bytes

    def _drop(self, weigh: Callable[[StoredResponse], int]) -> None:
        """Delete the oldest response of the owner with the largest weight, finished ones first."""
        owned = Counter[str]()
        for one in self._kept.values():
            owned[one.owner] += weigh(one)
        [(owner, _)] = owned.most_common(1)
        ours = (name for name, one in self._kept.items() if one.owner == owner)
        oldest = min(ours, key=lambda name: bool(self._kept[name].work))
        self._num_bytes -= self._kept.pop(oldest).num_bytes

    def finder(self, owner: str) -> Callable[[str], Turn | None]:
        """Return a function that finds a turn of ``owner`` by its item id; its index is built at the first call."""

        @cache
        def known() -> dict[str, Turn]:
            ours = (response for response in self._kept.values() if response.owner == owner)
            return {turn.id: turn for response in ours for turn in response.turns if turn.id}

        return lambda item_id: known().get(item_id)


def unknown(name: str, called: str = "response") -> str:
    """Return the message about an id that is not stored."""
    unless = ", unless store was false," if called == "response" else ""
    return f"there is no {called} {show(name)}; the newest are kept in memory{unless} and a restart forgets them."

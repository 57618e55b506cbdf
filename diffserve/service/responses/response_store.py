"""Responses that were made, kept for a while: to be asked for again, and for conversations that go on.

In memory, the newest ``MAX_RESPONSES`` within ``MAX_BYTES``; a restart forgets them. Whoever made one is told of it,
and nobody else: to others it was never there.
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
        """About what it takes; what it shares with earlier ones counts for each."""
        return len(self.body) + sum(map(len, self.events)) + sum(turn.num_bytes for turn in self.turns)


class ResponseStore:
    """By id. Where there are too many, or too many bytes, the oldest of whoever has most of them goes first: nobody
    drives out what others keep, and one that is still being made goes last. One that is larger than ``max_bytes`` is
    not kept at all.
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
        """Keep it, in place of what it was; False where there is no room."""
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
        """Raises HttpError 404 where it is not there for ``owner``."""
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise HttpError(404, unknown(response_id, self._called), code=f"{self._called}_not_found")
        return found

    def has(self, response_id: str, owner: str) -> bool:
        """Whether it is there for ``owner``."""
        found = self._kept.get(response_id)
        return found is not None and found.owner == owner

    def previous(self, response_id: str, owner: str) -> tuple[Turn, ...]:
        """The conversation up to a response. InvalidRequest where it is not there for ``owner``."""
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise InvalidRequest(unknown(response_id), param="previous_response_id", code="previous_response_not_found")
        if found.work:
            said = f"the response {show(response_id)} is still being made; go on from it once it is."
            raise InvalidRequest(said, param="previous_response_id")
        return found.turns

    def holds_work(self, response_id: str) -> bool:
        """Whether it is there as one that is still being made."""
        found = self._kept.get(response_id)
        return found is not None and bool(found.work)

    def note_events(self, response_id: str, events: tuple[bytes, ...]) -> None:
        """Keep what a response was told with, if it is there and there is room."""
        if response_id in self._kept:
            self.put(response_id, self._kept[response_id]._replace(events=events))

    def remove(self, response_id: str, owner: str) -> None:
        """Forget it. Raises HttpError 404 as ``get`` does."""
        found = self.get(response_id, owner)
        del self._kept[response_id]
        self._num_bytes -= found.num_bytes

    def _drop(self, weigh: Callable[[StoredResponse], int]) -> None:
        """Forget the oldest of the owner whose responses weigh most, and of these first one that is over."""
        owned = Counter[str]()
        for one in self._kept.values():
            owned[one.owner] += weigh(one)
        [(owner, _)] = owned.most_common(1)
        ours = (name for name, one in self._kept.items() if one.owner == owner)
        oldest = min(ours, key=lambda name: bool(self._kept[name].work))
        self._num_bytes -= self._kept.pop(oldest).num_bytes

    def finder(self, owner: str) -> Callable[[str], Turn | None]:
        """What finds the turn of an item in the responses of ``owner``. They are gone through once, if ever."""

        @cache
        def known() -> dict[str, Turn]:
            ours = (response for response in self._kept.values() if response.owner == owner)
            return {turn.id: turn for response in ours for turn in response.turns if turn.id}

        return lambda item_id: known().get(item_id)


def unknown(name: str, called: str = "response") -> str:
    """What is said of an id that leads nowhere."""
    unless = ", unless store was false," if called == "response" else ""
    return f"there is no {called} {show(name)}; the newest are kept in memory{unless} and a restart forgets them."

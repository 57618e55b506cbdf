"""Server-sent events, read from bytes as they arrive, and turned into typed ones.

Lines end at a newline and nowhere else: what Unicode also calls a line break may stand inside of JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from diffserve.client.answers import (
    ChatDelta,
    CompletedImage,
    ImageEvent,
    LostImage,
    PartialImage,
    Progress,
    RewriteDelta,
    RewriteEvent,
    Rewrites,
)
from diffserve.client.errors import ErrorObject, error_of

DONE: Final = b"[DONE]"
EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)


class EventParser:
    """Cuts a stream of bytes into the data of events; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of every event that is whole with ``chunk``."""
        if b"\n" not in chunk:  # a picture is one long line: it is put together once
            self._rest.append(chunk)
            return
        *lines, rest = b"".join([*self._rest, chunk]).split(b"\n")
        self._rest = [rest]
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


class Reader(Protocol[EventT_co]):
    """Knows the events of one endpoint, and when they are all there."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing if the stream ends here."""

    def read(self, data: bytes) -> Iterator[EventT_co]:
        """The typed event in ``data``, none for what means nothing here. Raises what the server says went wrong."""


class _Head(msgspec.Struct, frozen=True):
    type: str = ""
    error: ErrorObject | None = None


class TypedReader(Generic[EventT]):
    """Events that say their ``type``; it is complete after ``num_last`` events of the types ``last``."""

    def __init__(self, types: dict[str, type[EventT]], last: frozenset[str], num_last: int) -> None:
        self._types = types
        self._last = last
        self._num_missing = num_last

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing if the stream ends here."""
        return self._num_missing <= 0

    def read(self, data: bytes) -> Iterator[EventT]:
        """The event in ``data``; those of a newer server that are unknown here are passed over."""
        if data == DONE:
            return
        head = msgspec.json.decode(data, type=_Head)
        if head.error is not None:
            raise error_of(head.error)
        self._num_missing -= head.type in self._last
        if head.type in self._types:
            yield msgspec.json.decode(data, type=self._types[head.type])


def image_reader(num_images: int, events: str = "image_generation") -> TypedReader[ImageEvent]:
    """Of a request for ``num_images`` pictures; ``events``: what its events are called by."""
    completed, failed = f"{events}.completed", f"{events}.image_failed"
    types: dict[str, type[ImageEvent]] = {
        f"{events}.progress": Progress,
        f"{events}.partial_image": PartialImage,
        completed: CompletedImage,
        failed: LostImage,
    }
    return TypedReader(types, frozenset({completed, failed}), num_images)


def rewrite_reader() -> TypedReader[RewriteEvent]:
    """Of a request to rewrite a wish."""
    completed = "prompt_rewrite.completed"
    types: dict[str, type[RewriteEvent]] = {"prompt_rewrite.delta": RewriteDelta, completed: Rewrites}
    return TypedReader(types, frozenset({completed}), 1)


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    error: ErrorObject | None = None


class ChatReader:
    """Chunks of a conversation's answer, which end with a mark of their own."""

    def __init__(self) -> None:
        self.is_complete = False

    def read(self, data: bytes) -> Iterator[ChatDelta]:
        """What is new, for each answer that the chunk tells of."""
        if data == DONE:
            self.is_complete = True
            return
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            raise error_of(chunk.error)
        for choice in chunk.choices:
            text = choice.delta.content or ""
            if text or choice.finish_reason:
                yield ChatDelta(index=choice.index, text=text, finish_reason=choice.finish_reason)

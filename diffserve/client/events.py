"""Parser of server-sent events, and readers that decode them into typed events.

Only a newline ends a line: other Unicode line separators may occur inside JSON strings.
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
    """Incremental parser of server-sent events; it ignores comments and fields other than ``data``."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of every event that ``chunk`` completes."""
        if b"\n" not in chunk:  # an image is one long line: join its pieces only once
            self._pending.append(chunk)
            return
        *lines, incomplete_line = b"".join([*self._pending, chunk]).split(b"\n")
        self._pending = [incomplete_line]
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


class Reader(Protocol[EventT_co]):
    """Decoder of the events of one endpoint, which knows when the stream is complete."""

    @property
    def is_complete(self) -> bool:
        """Whether the stream may end here without missing events."""

    def read(self, data: bytes) -> Iterator[EventT_co]:
        """Yield the typed events in ``data``; unknown events are ignored.

        Raises:
            DiffserveError: The event reports an error.
        """


class _Head(msgspec.Struct, frozen=True):
    type: str = ""
    error: ErrorObject | None = None


class TypedReader(Generic[EventT]):
    """Decoder for events with a ``type`` field.

    Args:
        types: The class of each event type.
        last: Event types that end one part of the answer.
        num_last: How many events of those types complete the stream.
    """

    def __init__(self, types: dict[str, type[EventT]], last: frozenset[str], num_last: int) -> None:
        self._types = types
        self._last = last
        self._num_missing = num_last

    @property
    def is_complete(self) -> bool:
        """Whether the stream may end here without missing events."""
        return self._num_missing <= 0

    def read(self, data: bytes) -> Iterator[EventT]:
        """Yield the event in ``data``; events with an unknown type are ignored.

        Raises:
            DiffserveError: The event reports an error.
        """
        if data == DONE:
            return
        head = msgspec.json.decode(data, type=_Head)
        if head.error is not None:
            raise error_of(head.error)
        self._num_missing -= head.type in self._last
        if head.type in self._types:
            yield msgspec.json.decode(data, type=self._types[head.type])


def image_reader(num_images: int, events: str = "image_generation") -> TypedReader[ImageEvent]:
    """Return the reader for a request for ``num_images`` images.

    Args:
        num_images: How many images must be completed or lost before the stream is complete.
        events: The prefix of the event types.
    """
    completed, failed = f"{events}.completed", f"{events}.image_failed"
    types: dict[str, type[ImageEvent]] = {
        f"{events}.progress": Progress,
        f"{events}.partial_image": PartialImage,
        completed: CompletedImage,
        failed: LostImage,
    }
    return TypedReader(types, frozenset({completed, failed}), num_images)


def rewrite_reader() -> TypedReader[RewriteEvent]:
    """Return the reader for a prompt rewrite."""
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
    """Decoder of chat completion chunks; ``[DONE]`` completes the stream."""

    def __init__(self) -> None:
        self.is_complete = False

    def read(self, data: bytes) -> Iterator[ChatDelta]:
        """Yield the new text of each choice in the chunk ``data``.

        Raises:
            DiffserveError: The chunk reports an error.
        """
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

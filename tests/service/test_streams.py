"""Server-sent events without a socket: timing of messages, cancellation and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.service.http.streams import DONE, KEEP_ALIVE, EventStreamResponse, event
from diffserve.service.lifecycle import InFlight, Interruption, cancelled, hung_up

Source = Callable[["Stage"], AsyncGenerator[bytes, None]]


class Stage:
    """The recorded messages of one answer, and whether its work and resources are released."""

    def __init__(self) -> None:
        self.interrupted: Interruption = asyncio.get_running_loop().create_future()
        self.messages: list[dict[str, Any]] = []
        self.is_released = False
        self.is_work_over = False
        self.blocked = asyncio.Event()
        self.blocked.set()

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        await self.blocked.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def play(
    source: Source, script: Callable[[Stage, Awaitable[None]], Awaitable[None]] | None = None, **settings: Any
) -> Stage:
    """Answer with the events of ``source``; ``script`` may interfere while the answer is sent."""

    async def watched(stage: Stage) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in source(stage):
                yield chunk
        finally:
            stage.is_work_over = True

    async def run() -> Stage:
        stage, stack = Stage(), ExitStack()
        stack.callback(setattr, stage, "is_released", True)
        response = EventStreamResponse(watched(stage), stage.interrupted, stack, **{"limit_s": 30.0, **settings})
        try:
            sending = asyncio.ensure_future((await response.opened())({"type": "http"}, _nothing, stage.send))
            await (sending if script is None else script(stage, sending))
        finally:
            assert stage.is_released
            assert stage.is_work_over
        return stage

    return asyncio.run(run())


async def _nothing() -> Any:
    raise AssertionError("a stream does not read")


async def two_events(stage: Stage) -> AsyncGenerator[bytes, None]:
    yield event({"a": 1})
    yield event({"b": "ä\n"}, "named")


async def one_event_and_silence(stage: Stage) -> AsyncGenerator[bytes, None]:
    yield event({"a": 1})
    await asyncio.sleep(60.0)


def test_events_are_sent_immediately_and_the_ending_last() -> None:
    stage = play(two_events, ending=DONE, headers={"x-a": "b"})
    start, *chunks = stage.messages
    assert start["status"] == 200
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert (headers[b"x-a"], headers[b"cache-control"]) == (b"b", b"no-store")
    assert b"content-length" not in headers
    assert [chunk["body"] for chunk in chunks] == [
        b'data: {"a":1}\n\n',
        'event: named\ndata: {"b":"ä\\n"}\n\n'.encode(),
        DONE,
    ]
    assert [chunk["more_body"] for chunk in chunks] == [True, True, False]


def test_a_failure_before_the_first_event_is_a_plain_error() -> None:
    async def fails(stage: Stage) -> AsyncGenerator[bytes, None]:
        if not stage.messages:
            raise InvalidRequest("no such thing", param="n")
        yield b""

    with pytest.raises(InvalidRequest, match="no such thing"):
        play(fails)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (QueueFull("too many"), "queue_full", "too many"),
        (RuntimeError("/secret"), "internal_error", "internal server error"),
    ],
)
def test_a_later_failure_is_an_event_with_openais_error_object(error: Exception, code: str, words: str) -> None:
    async def fails(stage: Stage) -> AsyncGenerator[bytes, None]:
        yield event({"a": 1})
        await asyncio.sleep(0)
        raise error

    first, message, done, _ = play(fails, ending=DONE).body.split(b"\n\n")
    assert (first, done + b"\n\n") == (b'data: {"a":1}', DONE)
    error_body = json.loads(message.removeprefix(b"data: "))["error"]
    assert set(error_body) == {"message", "type", "param", "code"}
    assert error_body["code"] == code
    assert words in error_body["message"]


def test_comments_keep_a_silent_stream_alive() -> None:
    async def slow(stage: Stage) -> AsyncGenerator[bytes, None]:
        yield event(1)
        while stage.body.count(KEEP_ALIVE) < 2:
            await asyncio.sleep(0.005)
        yield event(2)

    body = play(slow, keep_alive_s=0.01).body
    assert body.startswith(b"data: 1\n\n" + KEEP_ALIVE * 2)
    assert body.endswith(b"data: 2\n\n")


def test_nothing_is_sent_after_a_disconnect() -> None:
    async def leave(stage: Stage, sending: Awaitable[None]) -> None:
        while len(stage.messages) < 2:
            await asyncio.sleep(0)
        stage.interrupted.set_result(hung_up())
        await sending

    assert play(one_event_and_silence, leave, ending=DONE).body == b'data: {"a":1}\n\n'


def test_a_cancelled_stream_ends_with_an_error_event() -> None:
    async def cancel(stage: Stage, sending: Awaitable[None]) -> None:
        while len(stage.messages) < 2:
            await asyncio.sleep(0)
        stage.interrupted.set_result(cancelled())
        await sending

    stage = play(one_event_and_silence, cancel)
    assert b'"code":"cancelled"' in stage.body
    assert stage.messages[-1]["more_body"] is False


def test_cancelling_a_client_that_reads_nothing_closes_its_connection() -> None:
    async def jam(stage: Stage, sending: Awaitable[None]) -> None:
        stage.blocked.clear()
        while not stage.messages:
            await asyncio.sleep(0)
        stage.interrupted.set_result(cancelled())
        while not stage.is_work_over:
            await asyncio.sleep(0)
        stage.blocked.set()
        await sending

    assert b"cancelled" in play(one_event_and_silence, jam).body


def test_an_endless_stream_is_ended() -> None:
    body = play(one_event_and_silence, limit_s=0.05).body
    assert b'"code":"deadline_exceeded"' in body


def test_an_interruption_before_the_first_event_is_a_plain_error() -> None:
    async def waits(stage: Stage) -> AsyncGenerator[bytes, None]:
        stage.interrupted.set_result(cancelled())
        await asyncio.sleep(60.0)
        yield b""

    with pytest.raises(DiffserveError, match="cancelled"):
        play(waits)


def test_a_quiet_stream_still_sends_its_head() -> None:
    async def late(stage: Stage) -> AsyncGenerator[bytes, None]:
        while not stage.messages:
            await asyncio.sleep(0.005)
        yield event(1)

    assert play(late).body == b"data: 1\n\n"


def test_only_a_known_id_cancels_and_only_its_own_request() -> None:
    async def story() -> None:
        flight, loop = InFlight(), asyncio.get_running_loop()
        first: Interruption = loop.create_future()
        second: Interruption = loop.create_future()
        with flight.listed("img-1", first):
            with flight.listed("img-2", second):
                cancelling = asyncio.create_task(flight.cancel("img-2"))
                await second
                assert not cancelling.done()  # the work has not ended yet
            assert await cancelling
            assert not first.done()
            assert not await flight.cancel("img-2")
            assert not await flight.cancel("img-3")

    asyncio.run(story())

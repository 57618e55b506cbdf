"""Tests of event parsing and of the errors for unreachable, foreign and lost servers, without a diffserve server."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from diffserve.api.errors import (
    ConfigError,
    DeadlineExceeded,
    DiffserveError,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    ModerationBlocked,
    NumericalError,
    QueueFull,
)
from diffserve.client import AsyncClient, ChatDelta, Client, RequestCancelled, ServerLost, ServerUnreachable
from diffserve.client.errors import ErrorObject, error_of
from diffserve.client.images import image_reader
from diffserve.client.stored import batch_lines
from diffserve.client.texts import ChatReader
from diffserve.client.transport import EventParser

EVENTS = 'event: a\ndata: {"x":1}\n\n: keep-alive\n\ndata: {"y":"\u2028\x85ä"}\r\n\r\ndata: one\ndata: two\nid: 7\n\n'
DATA = [b'{"x":1}', '{"y":"\u2028\x85ä"}'.encode(), b"one\ntwo"]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PROGRESS = b'data: {"type":"image_generation.progress","id":"img-1","step":1,"steps":2,"new":true}\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_chunk_sizes(size: int) -> None:
    stream = EVENTS.encode()
    parser = EventParser()
    events = [data for at in range(0, len(stream), size) for data in parser.feed(stream[at : at + size])]
    assert events == DATA


def test_an_incomplete_event_is_not_returned() -> None:
    assert list(EventParser().feed(b"data: 1\n")) == []


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        (ErrorObject("x", "invalid_request_error", "n", "invalid_value"), InvalidRequest),
        (ErrorObject("x", "invalid_request_error", "model", "model_not_found"), ModelNotFound),
        (ErrorObject("x", "rate_limit_error", None, "queue_full"), QueueFull),
        (ErrorObject("x", "server_error", None, "engine_unavailable"), EngineUnavailable),
        (ErrorObject("x", "server_error", None, "deadline_exceeded"), DeadlineExceeded),
        (ErrorObject("x", "invalid_request_error", None, "cancelled"), RequestCancelled),
        (ErrorObject("x", "server_error", None, "numerical_error"), NumericalError),
        (ErrorObject("x", "image_generation_user_error", None, "moderation_blocked"), ModerationBlocked),
        (ErrorObject("x"), DiffserveError),
    ],
)
def test_an_error_keeps_the_servers_message(reported: ErrorObject, kind: type[DiffserveError]) -> None:
    error = error_of(reported, {"retry-after-ms": "2500"})
    assert type(error) is kind
    assert (error.message, error.param) == ("x", reported.param if kind is not QueueFull else None)
    assert error.code == (reported.code or "internal_error")
    if isinstance(error, QueueFull):
        assert error.retry_after_s == 2.5


def test_unknown_events_are_ignored() -> None:
    reader = image_reader(1)
    assert list(reader.read(b'{"type":"image_generation.hologram"}')) == []
    assert list(reader.read(b"[DONE]")) == []
    assert not reader.is_complete


def test_a_chat_stream_is_complete_only_after_done() -> None:
    reader = ChatReader()
    chunk = {"choices": [{"index": 1, "delta": {"content": "a"}}, {"index": 0, "delta": {}, "finish_reason": "stop"}]}
    assert list(reader.read(msgspec.json.encode(chunk))) == [
        ChatDelta(index=1, text="a"),
        ChatDelta(index=0, text="", finish_reason="stop"),
    ]
    assert list(reader.read(b'{"choices":[],"usage":{}}')) == []
    assert not reader.is_complete
    assert list(reader.read(b"[DONE]")) == []
    assert reader.is_complete


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:99999", "http://[::1", "a b"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"such as http://127\.0\.0\.1:8000"):
        Client(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/"])
def test_a_url_may_end_in_v1(url: str) -> None:
    with Client(url) as client:
        assert client.url == "http://127.0.0.1:8000"


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


CALLS: list[Callable[[Client], Any]] = [
    lambda client: client.generate("a fox"),
    lambda client: list(client.generate_stream("a fox")),
    lambda client: client.chat("hello"),
    lambda client: client.is_ready(),
]


@pytest.mark.parametrize("call", CALLS)
def test_an_unreachable_server_is_reported(call: Callable[[Client], Any]) -> None:
    url = unused_url()
    with Client(url) as client, pytest.raises(ServerUnreachable) as caught:
        call(client)
    assert str(caught.value) == f"no server answers at {url}; start one with: diffserve serve"


def test_the_async_client_reports_an_unreachable_server() -> None:
    async def use() -> None:
        async with AsyncClient(unused_url()) as client:
            with pytest.raises(ServerUnreachable):
                await client.models()
            with pytest.raises(ServerUnreachable):
                async with client.generate_stream("a fox"):
                    pass

    asyncio.run(use())


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Yield the URL of a server that sends ``answer`` to every connection and closes it."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\n<a/>",
        b"HTTP/1.1 599 Odd\r\nContent-Length: 2\r\n\r\n{}",
        b'HTTP/1.1 502 Bad Gateway\r\nContent-Length: 15\r\n\r\n{"error":"oops"}',
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<a/>",
        HEAD + b"Content-Length: 12\r\n\r\ndata: <a/>\n\n",
    ],
)
@pytest.mark.parametrize("call", CALLS[:2])
def test_the_answer_of_another_server_is_an_error(answer: bytes, call: Callable[[Client], Any]) -> None:
    with answering(answer) as url, Client(url) as client, pytest.raises((DiffserveError, ServerLost)) as caught:
        call(client)
    assert caught.value.code in ("unexpected_answer", "server_lost")
    assert url in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(PROGRESS) + PROGRESS + b"\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(PROGRESS) + PROGRESS + b"\r\n0\r\n\r\n",
        HEAD + b"Connection: close\r\n\r\n" + PROGRESS + PROGRESS[:20],
    ],
    ids=["torn", "ended-early", "half-an-event"],
)
def test_a_lost_stream_is_reported(answer: bytes) -> None:
    events: list[Any] = []
    with answering(answer) as url, Client(url) as client, pytest.raises(ServerLost, match="still running"):
        events.extend(iter(client.generate_stream("a fox")))

    async def read() -> None:
        async with AsyncClient(url) as client, client.generate_stream("a fox") as stream:
            async for event in stream:
                events.append(event)

    with answering(answer) as url, pytest.raises(ServerLost, match="still running"):
        asyncio.run(read())
    assert [event.step for event in events] == [1, 1]


def test_a_truncated_answer_is_a_lost_server() -> None:
    with (
        answering(b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"id"') as url,
        Client(url) as client,
        pytest.raises(ServerLost, match="ended before the answer did"),
    ):
        client.generate("a fox")


def test_an_error_in_a_stream_is_raised_with_the_servers_message() -> None:
    event = b'data: {"error":{"message":"the engine stopped","type":"server_error","code":"engine_unavailable"}}\n\n'
    with (
        answering(HEAD + b"Connection: close\r\n\r\n" + PROGRESS + event) as url,
        Client(url) as client,
        pytest.raises(EngineUnavailable, match="the engine stopped"),
    ):
        list(client.generate_stream("a fox"))


def test_a_long_event_in_small_chunks_is_parsed_in_linear_time() -> None:
    data = b"x" * 8_000_000
    stream = b"data: " + data + b"\n\n"
    parser = EventParser()
    events: list[bytes] = []
    started_s = time.thread_time()
    for at in range(0, len(stream), 1000):
        events += parser.feed(stream[at : at + 1000])
    assert events == [data]
    assert time.thread_time() - started_s < 1.0  # quadratic parsing takes more than four seconds


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_refused_before_the_request(value: float) -> None:
    with Client("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidRequest, match="guidance_scale must be a finite number") as caught:
            client.generate("a fox", guidance_scale=value)
        assert caught.value.param == "guidance_scale"
        with pytest.raises(InvalidRequest, match=r"guidance_interval\[1\] must be a finite number"):
            client.generate_stream("a fox", guidance_interval=(0.0, value))
        with pytest.raises(InvalidRequest, match=r"loras\[0\]\.scale must be a finite number"):
            client.edit("a fox", b"", loras=[{"name": "ink", "scale": value}])
        with pytest.raises(InvalidRequest, match="strength must be a finite number"):
            client.edit_stream("a fox", b"", strength=value)
        with pytest.raises(InvalidRequest, match="temperature must be a finite number"):
            client.chat("hello", temperature=value)
    with pytest.raises(InvalidRequest, match=r"body\.eta must be a finite number"):
        batch_lines([{"prompt": "a fox", "eta": value}])

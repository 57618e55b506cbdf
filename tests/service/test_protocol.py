"""Raw connections: invalid HTTP/1.1, slow requests and too many connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import h11
import pytest
from h11._receivebuffer import ReceiveBuffer
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.http import middleware, protocol
from diffserve.service.lifecycle import Gate, read_json
from diffserve.service.run import HttpServer, uvicorn_config
from diffserve.settings.layers import load_settings

ALIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /read HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PATIENCE_S = 30.0
Story = Callable[[int], Awaitable[None]]


def tell(story: Story, *, max_connections: int = 64) -> None:
    """Run ``story(port)`` with a server without an engine."""

    async def run() -> None:
        async with served(max_connections) as port, asyncio.timeout(PATIENCE_S):
            await story(port)

    asyncio.run(run())


@asynccontextmanager
async def served(max_connections: int) -> AsyncIterator[int]:
    config = load_settings(env={})
    app = create_app(EngineClient(config), config.serve, Gate())

    @app.get("/slow")
    async def slow() -> None:
        await asyncio.sleep(PATIENCE_S)

    @app.get("/lines")
    async def lines() -> Response:
        async def for_ever() -> AsyncIterator[bytes]:
            while True:
                yield b"line\n"
                await asyncio.sleep(0.01)

        return StreamingResponse(for_ever())

    @app.post("/read")
    async def read(request: Request) -> Response:
        return Response(await read_json(request))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(uvicorn_config(app, max_connections))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            for caller in Caller.callers:
                caller.writer.close()
            Caller.callers.clear()
            server.should_exit = server.force_exit = True
            await serving


class Caller:
    """A client that sends arbitrary bytes."""

    callers: ClassVar[list[Caller]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def at(cls, port: int) -> Caller:
        caller = cls(*await asyncio.open_connection("127.0.0.1", port))
        cls.callers.append(caller)
        return caller

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        """Return the head of the next answer, and read its body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await self.reader.readexactly(int(length.partition(b":")[2]))
        return head

    async def read_all(self) -> bytes:
        """Return everything until the server closes the connection."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    async def drip(self, byte: bytes) -> None:
        """Send a byte at a time until the server closes the connection."""
        while not self.reader.at_eof():
            try:
                await self.say(byte)
            except (ConnectionResetError, BrokenPipeError):
                return
            await asyncio.sleep(0.05)

    async def is_closed(self) -> bool:
        return await self.read_all() == b""


@pytest.mark.parametrize(
    "data",
    [
        b"GET /livez HTTP/1.1\nHost: localhost\n\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: a\r\n\tb\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: a\rb\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX : a\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"Host: localhost\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: y\n\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /livez HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /livez HTTP/2.0\r\nHost: localhost\r\n\r\n",
    ],
    ids=[
        *("bare-lf", "one-bare-lf", "bare-lf-at-the-end", "folded", "folded-by-tab", "bare-cr", "space-before-colon"),
        *("many-headers", "bare-lf-in-trailer", "bare-lf-for-trailer", "chunk", "coded-twice", "two-lengths"),
        *("length-and-chunked", "chunked-in-1.0", "http-2"),
    ],
)
def test_ambiguous_http_is_refused(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def story(port: int) -> None:
        caller = await Caller.at(port)
        await caller.say(data + ALIVE)
        answer = await caller.read_all()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b'"error":{"message"' in answer

    tell(story)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_valid_requests_are_read_in_any_pieces() -> None:
    async def story(port: int) -> None:
        caller = await Caller.at(port)
        for byte in ALIVE:
            await caller.say(bytes([byte]))
            await asyncio.sleep(0)
        assert (await caller.head()).startswith(b"HTTP/1.1 200 ")
        await caller.say(ALIVE * 50)
        for _ in range(50):
            assert (await caller.head()).startswith(b"HTTP/1.1 200 ")
        await caller.say(POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: y\r\n\r\n" + ALIVE)
        assert not (await caller.head()).startswith(b"HTTP/1.1 5")
        assert (await caller.head()).startswith(b"HTTP/1.1 200 ")

    tell(story)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/livez", "localhost", 200),
        ("HTTP://127.0.0.1:8000/livez?x=1", "127.0.0.1:8000", 200),
        ("http://[::1]:8000/livez", "[::1]:8000", 200),
        ("http://localhost/v1/models/a%2Fb", "localhost", 503),
        ("http://localhost/v1%2Fmodels", "localhost", 400),
        ("http://localhost/nowhere", "localhost", 404),
        ("http://localhost", "localhost", 404),
        ("http://localhost?x=1", "localhost", 404),
        ("http://localhost/livez", "evil.test", 200),
        ("http://evil.test/livez", "localhost", 403),
        ("http://localhost:99999/livez", "localhost", 403),
        ("http://me@localhost/livez", "localhost", 404),
        ("http:///livez", "localhost", 404),
        ("http://[::1]/livez", "localhost", 200),
        ("http://[::1].evil.test/livez", "localhost", 404),
        ("http://[::1]evil/livez", "localhost", 404),
        ("/livez", "[::1].evil.test", 403),
        ("/livez", "evil.test@127.0.0.1", 403),
        ("/livez", "127.0.0.1/evil.test", 403),
        ("ftp://localhost/livez", "localhost", 404),
    ],
)
def test_an_absolute_target_is_accepted_for_allowed_hosts(target: str, host: str, status: int) -> None:
    async def story(port: int) -> None:
        caller = await Caller.at(port)
        for _ in range(2):
            await caller.say(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert (await caller.head()).startswith(b"HTTP/1.1 %d " % status)

    tell(story)


def test_a_head_answer_has_no_body_and_the_connection_stays_open() -> None:
    async def story(port: int) -> None:
        caller = await Caller.at(port)
        await caller.say(ALIVE.replace(b"GET", b"HEAD") + b"HEAD /lines HTTP/1.1\r\nHost: localhost\r\n\r\n")
        plain = await caller.reader.readuntil(b"\r\n\r\n")
        assert plain.startswith(b"HTTP/1.1 200 ")
        assert b"content-length: 15\r\n" in plain.lower()
        lines = await caller.reader.readuntil(b"\r\n\r\n")
        assert lines.startswith(b"HTTP/1.1 200 ")
        await caller.say(ALIVE)
        assert (await caller.head()).startswith(b"HTTP/1.1 200 ")

    tell(story)


def test_request_headers_have_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 0.3)

    async def story(port: int) -> None:
        first, second = await Caller.at(port), await Caller.at(port)
        await second.say(ALIVE)
        assert (await second.head()).startswith(b"HTTP/1.1 200 ")
        await asyncio.gather(first.drip(b"G"), second.drip(b"G"))
        assert await second.is_closed()

    tell(story)


def test_an_unread_body_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 0.3)

    async def story(port: int) -> None:
        caller = await Caller.at(port)
        await caller.say(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert (await caller.head()).startswith(b"HTTP/1.1 200 ")
        await caller.drip(b"x")

    tell(story)


def test_a_missing_body_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.3)

    async def story(port: int) -> None:
        caller = await Caller.at(port)
        await caller.say(POST + b"Content-Length: 100\r\n\r\n{")
        head = await caller.head()
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head.lower()
        assert await caller.is_closed()

    tell(story)


@pytest.mark.parametrize(
    ("start", "end"),
    [(b"", ALIVE), (ALIVE[:9], ALIVE[9:]), (POST + b"Content-Length: 2\r\n\r\n{", b"}")],
    ids=["idle", "head", "body"],
)
def test_beyond_the_limit_the_longest_idle_connection_is_closed(start: bytes, end: bytes) -> None:
    async def story(port: int) -> None:
        silent = []
        for _ in range(20):
            silent.append(await Caller.at(port))
            await silent[-1].say(start)
            await asyncio.sleep(0.01)
        assert all([await caller.is_closed() for caller in silent[:4]])
        await silent[5].say(end)
        assert (await silent[5].head()).startswith(b"HTTP/1.1 200 ")
        newcomer = await Caller.at(port)
        await newcomer.say(ALIVE)
        assert (await newcomer.head()).startswith(b"HTTP/1.1 200 ")

    tell(story, max_connections=16)


def test_a_new_connection_gets_503_if_all_others_are_busy() -> None:
    async def story(port: int) -> None:
        for _ in range(16):
            caller = await Caller.at(port)
            await caller.say(ALIVE.replace(b"livez", b"slow"))
        await asyncio.sleep(0.2)
        answer = await (await Caller.at(port)).read_all()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"server_full"' in answer
        caller.writer.close()
        await caller.writer.wait_closed()
        newcomer = await Caller.at(port)
        await newcomer.say(ALIVE)
        assert (await newcomer.head()).startswith(b"HTTP/1.1 200 ")

    tell(story, max_connections=16)


def test_a_broken_chunk_during_an_answer_is_not_a_server_error(caplog: pytest.LogCaptureFixture) -> None:
    async def story(port: int) -> None:
        caller = await Caller.at(port)
        wrong_type = POST.replace(b"application/json", b"text/plain")
        await caller.say(wrong_type + b"Transfer-Encoding: chunked\r\n\r\n")
        assert (await caller.head()).startswith(b"HTTP/1.1 415 ")
        await caller.say(b"nonsense\r\n")
        assert await caller.is_closed()

    tell(story)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL") or record.exc_info]


def test_each_read_of_a_connection_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    plain = protocol.Http1.data_received

    def counting(self: protocol.Http1, data: bytes) -> None:
        lengths.append(len(data))
        plain(self, data)

    monkeypatch.setattr(protocol.Http1, "data_received", counting)

    async def story(port: int) -> None:
        caller = await Caller.at(port)
        await caller.say(POST + b"Content-Length: 1000000\r\n\r\n" + b" " * 1_000_000)
        assert (await caller.head()).startswith(b"HTTP/1.1 200 ")

    tell(story)
    assert max(lengths) <= protocol.MAX_READ_BYTES


@pytest.mark.parametrize(
    ("chunk", "num_chunks", "status"),
    [(b"1\r\n \r\n", 900, 200), (b"1\r\n \r\n", 5000, 400), (b"50\r\n" + b" " * 80 + b"\r\n", 5000, 200)],
    ids=["a-few-crumbs", "crumbs", "small-chunks"],
)
def test_a_body_in_tiny_chunks_is_refused(chunk: bytes, num_chunks: int, status: int) -> None:
    async def story(port: int) -> None:
        caller = await Caller.at(port)
        await caller.say(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * num_chunks + b"0\r\n\r\n" + ALIVE)
        assert (await caller.head()).startswith(b"HTTP/1.1 %d " % status)

    tell(story)


class Written:
    """A transport that records what is written to it, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True


def test_writes_of_one_loop_iteration_are_sent_together() -> None:
    async def story() -> None:
        written: Any = Written()
        gathering = protocol.Gathering(written, asyncio.get_running_loop())
        gathering.write(b"head ")
        gathering.write(b"body")
        assert not written.pieces
        await asyncio.sleep(0)
        gathering.write(b"more")
        gathering.write(long := bytes(protocol.MAX_GATHERED_BYTES))
        gathering.write(b"last")
        gathering.close()
        assert written.pieces == [b"head body", b"more", long, b"last"]
        assert written.is_closed

    asyncio.run(story())


def test_the_private_attributes_of_h11_that_the_protocol_uses_exist() -> None:
    connection = h11.Connection(h11.SERVER)
    assert type(connection._receive_buffer) is ReceiveBuffer
    buffer = ReceiveBuffer()
    buffer += b"GET / HTTP/1.1\r\n"
    assert buffer._data == b"GET / HTTP/1.1\r\n"
    assert buffer._multiple_lines_search == 0
    assert buffer._extract(3) == b"GET"
    overridden = {name for name in vars(protocol.StrictLines) if name.startswith("maybe_")}
    assert overridden <= vars(ReceiveBuffer).keys()

"""Streaming responses: server-sent events and files.

The status line waits for the first event, so that early errors have their own status; later errors are events, which
OpenAI's clients raise. Comments keep proxies from closing idle streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from diffserve.api.errors import DeadlineExceeded, DiffserveError
from diffserve.service.http.errors import expected_error, log_failure, reply_to
from diffserve.service.lifecycle import Interruption, first_of, hung_up
from diffserve.service.threads import FILES

KEEP_ALIVE_S = 15.0
HEAD_PATIENCE_S = 1.0  # longest wait of the status line for the first event
GOODBYE_S = 5.0  # limit on sending the last event
DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
CHUNK_BYTES: Final = 256 * 1024
FILE_HEADERS: Final = {"Content-Security-Policy": "default-src 'none'; sandbox"}
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Events = AsyncGenerator[bytes, None]

log = logging.getLogger("diffserve.http")


def event(data: Any, name: str | None = None) -> bytes:
    """Encode one event with ``data`` as JSON and an optional event name."""
    head = b"" if name is None else f"event: {name}\n".encode("ascii")
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class Lasting(NamedTuple):
    """Work that continues without its stream: how to follow it again, and its whole output (None: not stored)."""

    again: Callable[[Request], Awaitable[Response]]
    body: Callable[[], Awaitable[bytes | None]]


class EventStreamResponse(Response):
    """Response that sends ``events``; it owns the generator and the contexts in ``until``.

    Args:
        events: Encoded events.
        interrupted: Resolves to the reason for an early end.
        until: Contexts that are left when the response is over.
        limit_s: Seconds after which the response ends with an error.
        ending: Bytes after the last event, also after an error.
        headers: Further headers.
        keep_alive_s: Longest silence without a comment.
    """

    def __init__(
        self,
        events: Events,
        interrupted: Interruption,
        until: ExitStack,
        *,
        limit_s: float,
        ending: bytes = b"",
        headers: dict[str, str] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.lasting: Lasting | None = None
        self.init_headers(HEADERS | (headers or {}))
        self._events = events
        self._interrupted = interrupted
        self._until = until
        self._limit_s = limit_s
        self._ending = ending
        self._keep_alive_s = keep_alive_s
        self._error_code = ""
        self._sent_s = 0.0
        self._first = asyncio.create_task(self._pull())

    async def opened(self) -> EventStreamResponse:
        """Return this response when it has an event or after ``HEAD_PATIENCE_S``; raises early errors."""
        try:
            await first_of(self._first, self._interrupted, timeout_s=HEAD_PATIENCE_S)
            if self._interrupted.done():
                raise self._interrupted.result()
            if self._first.done():
                self._first.result()
            return self
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; its work has ended when this returns."""
        writing = asyncio.create_task(self._write(send))
        try:
            await first_of(writing, self._interrupted, timeout_s=self._limit_s)
            if writing.done():
                writing.result()
            else:
                await _cancel(writing)
                await self._close()
                await self._send_error(send)
        finally:
            await _cancel(writing)
            await self._close()
            if self._error_code:
                scope.setdefault("state", {})["error_code"] = self._error_code  # the status line, 200, is already sent

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_s = time.monotonic()
        filling = asyncio.create_task(self._keep_alive(send))
        try:
            chunk = await self._first
            while chunk is not None:
                self._sent_s = time.monotonic()
                await _send(send, chunk)
                chunk = await self._pull()
        except Exception as error:
            if not isinstance(error, DiffserveError):
                log_failure(log, "stream failed", error)
            await _send(send, self._error_event(error))
        finally:
            filling.cancel()
        await _send(send, self._ending, is_last=True)

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for a while."""
        while True:
            due_s = self._sent_s + self._keep_alive_s - time.monotonic()
            if due_s <= 0.0:
                self._sent_s = time.monotonic()
                await _send(send, KEEP_ALIVE)
            await asyncio.sleep(max(due_s, 0.0))

    async def _pull(self) -> bytes | None:
        return await anext(self._events, None)

    async def _send_error(self, send: Send) -> None:
        """Send the reason of an interruption if the client still reads."""
        error: DiffserveError = DeadlineExceeded("the engine does not answer; please try again later.")
        if self._interrupted.done():
            error = self._interrupted.result()
        if error.code == hung_up().code:
            self._error_code = error.code
            return
        try:
            async with asyncio.timeout(GOODBYE_S):
                await _send(send, self._error_event(error) + self._ending, is_last=True)
        except (TimeoutError, RuntimeError):  # the client reads nothing, or the status line was not sent
            log.warning("the client did not read the end of a stream")

    def _error_event(self, error: Exception) -> bytes:
        """Encode ``error`` as an event with the error object."""
        self._error_code = getattr(expected_error(error), "code", DiffserveError.default_code)
        return b"data: " + reply_to(error).body + b"\n\n"

    async def _close(self) -> None:
        await _cancel(self._first)
        await self._events.aclose()
        self._until.close()


async def _send(send: Send, chunk: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def send_file(file: BinaryIO, num_bytes: int, media_type: str, headers: dict[str, str]) -> Response:
    """Return a response that sends the open ``file`` and closes it."""
    headers = {"Content-Length": str(num_bytes), **FILE_HEADERS, **headers}
    return StreamingResponse(_chunks(file), headers=headers, media_type=media_type)


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while chunk := await FILES.run(file.read, CHUNK_BYTES):
            yield chunk

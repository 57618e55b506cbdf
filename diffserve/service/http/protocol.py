"""HTTP/1.1 protocol on top of uvicorn's, with strict lines, timeouts and a limit on connections.

Malformed requests are answered with an error object. Lines must end in CRLF and headers must not continue on the next
line, because programs that disagree about this enable request smuggling. A client that owes bytes has
``HEADER_TIMEOUT_S`` to send them. h11's receive buffer is private, so h11 is pinned.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, ClassVar, Final

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from diffserve.service.http.errors import HttpError, reply_to

HEADER_TIMEOUT_S = 15.0
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 200
MAX_READ_BYTES = 16 * 1024  # per connection and turn of the loop: a body of one-byte chunks costs 2 us a byte
FREE_CHUNKS = 1000  # chunks of any size per body; with more, the mean size must be MIN_CHUNK_BYTES
MIN_CHUNK_BYTES = 64
MAX_GATHERED_BYTES = 64 * 1024

_LOOSE_LINE: Final = re.compile(rb"(?<!\r)\n|\r[^\n]|\n[ \t]")
_BAD_HTTP: Final = HttpError(400, "the request is not valid HTTP, or its headers are too long.", code="bad_http")
_FULL: Final = HttpError(503, "the server has too many connections; please try again in a moment.", code="server_full")


class StrictLines(ReceiveBuffer):
    """Receive buffer that accepts only lines that end in CRLF, and refuses bodies of many tiny chunks."""

    _num_chunks = 0
    _num_body_bytes = 0

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the header of a chunk. Raises h11.LocalProtocolError for too many small chunks."""
        line = super().maybe_extract_next_line()
        if line is not None:
            self._num_chunks += 1
            if self._num_chunks > max(FREE_CHUNKS, self._num_body_bytes // MIN_CHUNK_BYTES):
                raise h11.LocalProtocolError("too many small chunks")
        return line

    def maybe_extract_at_most(self, count: int) -> bytearray | None:
        """Return up to ``count`` bytes of a body."""
        data = super().maybe_extract_at_most(count)
        self._num_body_bytes += len(data or b"")
        return data

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines before the first empty one, or None. Raises h11.LocalProtocolError."""
        self._num_chunks = self._num_body_bytes = 0
        if self._data.startswith(b"\r\n"):
            self._extract(2)
            return []
        search_start = max(0, self._multiple_lines_search - 3)
        end = self._data.find(b"\r\n\r\n", search_start)
        if _LOOSE_LINE.search(self._data, search_start, len(self._data) if end < 0 else end):
            raise h11.LocalProtocolError("a line does not end in CRLF, or continues on the next line")
        if end < 0:
            self._multiple_lines_search = len(self._data)
            return None
        lines = self._extract(end + 4)[:-4].split(b"\r\n")
        if end > MAX_HEADER_BYTES or len(lines) > MAX_HEADERS:
            raise h11.LocalProtocolError("too many headers")
        return lines


class Gathering:
    """Transport that combines the writes of one turn of the event loop, such as headers and body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._gathered = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send ``data`` at the end of this turn, or at once if it is long."""
        if len(self._gathered) + len(data) > MAX_GATHERED_BYTES:
            self.flush()
            self._transport.write(data)
            return
        if not self._gathered and data:
            self._loop.call_soon(self.flush)
        self._gathered += data

    def flush(self) -> None:
        """Send the gathered data."""
        gathered, self._gathered = self._gathered, bytearray()
        if gathered:
            self._transport.write(gathered)

    def close(self) -> None:
        """Close the transport after the gathered data is sent."""
        self.flush()
        self._transport.close()


class Http1(H11Protocol):
    """One connection; ``limited`` sets the maximum number."""

    max_connections: ClassVar[int | None] = None
    owing: ClassVar[dict[Http1, None]] = {}
    """Connections with an incomplete request, the oldest first."""
    _deadline: asyncio.TimerHandle | None = None

    @classmethod
    def limited(cls, max_connections: int) -> type[Http1]:
        """Return the protocol of a server with at most ``max_connections`` at a time."""
        return type("LimitedHttp1", (cls,), {"max_connections": max_connections, "owing": {}})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Accept the connection, or refuse it if there are too many; start the timeout of the first headers."""
        super().connection_made(transport)
        self.transport = Gathering(transport, self.loop)  # type: ignore[assignment]  # has the methods that are used
        self.conn._receive_buffer = StrictLines()
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]  # of every transport that reads a socket
        if not self._has_room():
            self.connections.discard(self)
            self._refuse(_FULL, b"Service Unavailable")
        self._keep_time()

    def data_received(self, data: bytes) -> None:
        """Process received data; the timeout ends when the request is complete."""
        super().data_received(data)
        self._keep_time()

    def on_response_complete(self) -> None:
        """Flush the answer and start the timeout of the next request's headers."""
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        self._keep_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._stop_clock()
        self.owing.pop(self, None)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP or headers that are too long with an error, and close."""
        self._refuse(_BAD_HTTP, b"Bad Request")

    def _refuse(self, error: HttpError, reason: bytes) -> None:
        """Answer with ``error`` if a response may still begin, close, and signal a disconnect to the application."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = reply_to(error)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(reply.body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=reply.status, headers=headers, reason=reason),
                h11.Data(data=reply.body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _has_room(self) -> bool:
        """Return whether this connection may stay; at the limit, the one that owed bytes longest is closed."""
        if self.max_connections is None or len(self.connections) <= self.max_connections:
            return True
        oldest = next(iter(self.owing), None)
        if oldest is None:
            return False
        del self.owing[oldest]
        self.connections.discard(oldest)
        oldest.transport.close()
        return True

    def _keep_time(self) -> None:
        """Start the timeout while headers or an unread body are due; stop it otherwise."""
        state, is_closing = self.conn.their_state, self.transport.is_closing()
        is_answered = self.cycle is None or self.cycle.response_complete
        is_due = state is h11.IDLE or (state is h11.SEND_BODY and is_answered)
        if not is_due or is_closing:
            self._stop_clock()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)
        if state in (h11.IDLE, h11.SEND_BODY) and not is_closing:
            self.owing.setdefault(self)
        else:
            self.owing.pop(self, None)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore upgrade requests without a log line."""

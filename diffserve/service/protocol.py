"""HTTP/1.1 as uvicorn speaks it, but malformed requests get our error object and silence is not waited on."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from diffserve.service.errors import HttpError, reply_to

HEADER_TIMEOUT_S = 15.0
MAX_HEADER_BYTES = 32 * 1024


class Http1(H11Protocol):
    """One connection. It is closed when its first request's headers take longer than ``HEADER_TIMEOUT_S``."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the clock for the first request's headers."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or whose headers are too long, and close."""
        reply = reply_to(HttpError(400, "the request is not valid HTTP, or its headers are too long.", code="bad_http"))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(reply.body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=reply.status, headers=headers, reason=b"Bad Request"),
            h11.Data(data=reply.body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _close_if_silent(self) -> None:
        if getattr(self, "cycle", None) is None and not self.transport.is_closing():
            self.transport.close()

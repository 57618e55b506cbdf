"""End requests whose API key or session is revoked while they are answered.

The application sees a revoked request as a disconnect of its client, so that its work is cancelled in the usual way;
``end_reason`` in the request's state has the reason, which the answer reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from diffserve.service.http.errors import HttpError

LOOK_EVERY_S: Final = 1.0
REVOKED: Final = HttpError(401, "the key or session of this request was revoked.", code="invalid_api_key")


class WatchedRequest:
    """The ASGI channels of one request, which end when ``end`` is called.

    Args:
        credential: The key's id and the session, empty where the key itself was sent.
    """

    def __init__(self, credential: tuple[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        self.credential = credential
        self._scope = scope
        self._receive = receive
        self._send = send
        self._ended = asyncio.Event()
        self._is_body_read = False
        self._is_unfinished = False

    def end(self) -> None:
        """Cancel the work of this request."""
        self._scope["state"]["end_reason"] = REVOKED
        self._ended.set()

    async def receive(self) -> Message:
        """Return the next message of the client, or a disconnect once the request is ended."""
        if not self._is_body_read:
            message = await self._receive()
            self._is_body_read = not message.get("more_body", False)
            return message
        receiving, ending = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else {"type": "http.disconnect"}
        finally:
            receiving.cancel()
            ending.cancel()

    async def send(self, message: Message) -> None:
        """Send ``message``, and note whether the response is complete."""
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            self._is_unfinished = not has_length
        elif not message.get("more_body", False):
            self._is_unfinished = False
        await self._send(message)

    async def finish(self) -> None:
        """Complete the response of an application that took the end for a disconnect."""
        if self._is_unfinished and self._ended.is_set():
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class ActiveRequests:
    """Requests that are answered now, each of which ends within ``LOOK_EVERY_S`` of its credential.

    Args:
        refresh: Reloads the keys.
        is_good: Whether a credential is good.
    """

    def __init__(self, refresh: Callable[[], Awaitable[None]], is_good: Callable[[str, str], bool]) -> None:
        self._refresh = refresh
        self._is_good = is_good
        self._requests: dict[WatchedRequest, None] = {}
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def watched(self, request: WatchedRequest) -> Iterator[WatchedRequest]:
        """Watch ``request`` for the length of the block."""
        self._requests[request] = None
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="revocation")
        try:
            yield request
        finally:
            del self._requests[request]

    async def _watch(self) -> None:
        while self._requests:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._refresh()
            good = {credential: self._is_good(*credential) for credential in {r.credential for r in self._requests}}
            for request in self._requests:
                if not good[request.credential]:
                    request.end()

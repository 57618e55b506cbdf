"""Requests that are being worked on, by id: whoever knows an id can end that request, and nobody can list them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from diffserve.service.errors import HttpError
from diffserve.service.exchange import CLIENT_CLOSED_REQUEST, Interruption


class InFlight:
    """Interruptions by request id, each for as long as its request is worked on."""

    def __init__(self) -> None:
        self._interruptions: dict[str, Interruption] = {}
        self._over: dict[str, asyncio.Event] = {}

    @contextmanager
    def listed(self, request_id: str, interrupted: Interruption) -> Iterator[None]:
        """For the length of the block ``request_id`` can be cancelled."""
        over = self._over[request_id] = asyncio.Event()
        self._interruptions[request_id] = interrupted
        try:
            yield
        finally:
            del self._interruptions[request_id], self._over[request_id]
            over.set()

    async def cancel(self, request_id: str) -> bool:
        """End a request, and return when it holds nothing any more. False where it is unknown, or over."""
        interrupted = self._interruptions.get(request_id)
        if interrupted is None:
            return False
        over = self._over[request_id]
        if not interrupted.done():
            interrupted.set_result(cancelled())
        await over.wait()
        return True


def cancelled() -> HttpError:
    """What the one who waited for the request is told."""
    return HttpError(CLIENT_CLOSED_REQUEST, "the request was cancelled by its id.", code="cancelled")

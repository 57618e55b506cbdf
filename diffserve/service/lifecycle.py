"""Life of a request: reading its body, working until the client disconnects, cancellation, graceful shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from diffserve.api.errors import DeadlineExceeded, EngineUnavailable
from diffserve.service.http.bodies import BodyT, parse
from diffserve.service.http.errors import HttpError
from diffserve.service.threads import ANSWERS

PARSE_IN_THREAD_BYTES = 64 * 1024
EXTRA_TIMEOUT_S = 30.0  # after the engine's own deadline: for encoding, and for an engine that hangs
CLIENT_CLOSED_REQUEST = 499
CANCELLED = "cancelled"
WARNINGS = "x-diffserve-warnings"

Interruption = asyncio.Future[HttpError]
"""A future that resolves to the reason if a request must end early."""

P = ParamSpec("P")
T = TypeVar("T")


async def read_body(request: Request, kind: type[BodyT]) -> BodyT:
    """Read a JSON body and validate it as ``kind``."""
    data = await read_json(request)
    return await in_thread_if_long(data, parse, kind, data)


async def read_json(request: Request) -> bytes:
    """Read a JSON body.

    The content type is required: pages of other origins cannot send it without a CORS preflight.

    Raises:
        HttpError: The content type is not JSON, or the client closed the connection.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(
            415, "the body must be JSON, with the header Content-Type: application/json.", code="unsupported_media_type"
        )
    try:
        return await request.body()
    except ClientDisconnect:
        raise hung_up() from None


async def in_thread_if_long(data: bytes, check: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Return ``check(*arguments, **named)``, called in a thread if ``data`` is long enough to delay other requests."""
    if len(data) > PARSE_IN_THREAD_BYTES:
        return await ANSWERS.run(check, *arguments, **keywords)
    return check(*arguments, **keywords)


@contextmanager
def interruption(request: Request) -> Iterator[Interruption]:
    """Yield a future that resolves when the client of ``request`` disconnects.

    The body must have been read before, because the disconnect message follows it.
    """
    interrupted: Interruption = asyncio.get_running_loop().create_future()
    watching = asyncio.create_task(_watch(request, interrupted))
    try:
        yield interrupted
    finally:
        watching.cancel()
        interrupted.cancel()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, which is cancelled when the client of ``request``, whose body is read, hangs up.

    Raises:
        HttpError: The client hung up.
    """
    with interruption(request) as interrupted:
        return await work_until(interrupted, work, limit_s=None)


async def work_until(interrupted: Interruption, work: Coroutine[Any, Any, T], *, limit_s: float | None) -> T:
    """Return the result of ``work``; it is cancelled, and has ended, when this raises.

    Raises:
        HttpError: The reason for the interruption.
        DeadlineExceeded: ``work`` took longer than ``limit_s``.
    """
    working = asyncio.create_task(work)
    try:
        await first_of(working, interrupted, timeout_s=limit_s)
        if working.done():
            return working.result()
        if interrupted.done():
            raise interrupted.result()
        raise DeadlineExceeded("the engine does not answer; please try again later.")
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def first_of(*futures: asyncio.Future[Any], timeout_s: float | None) -> None:
    """Return when one of ``futures`` is done, or after ``timeout_s``."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _watch(request: Request, interrupted: Interruption) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    if not interrupted.done():
        interrupted.set_result(request.scope.get("state", {}).get("end_reason") or hung_up())


def hung_up() -> HttpError:
    """Return the error of a client that disconnected; only logs and metrics show it."""
    return HttpError(CLIENT_CLOSED_REQUEST, "the client closed the connection.", code="client_closed_request")


def header_text(warnings: Sequence[str]) -> str:
    """Join ``warnings`` to one header value: printable ASCII, at most 1000 characters."""
    text = " | ".join(warnings).encode("ascii", "backslashreplace").decode("ascii")
    return "".join(c if c.isprintable() else " " for c in text)[:1000]


def json_response(data: bytes, warnings: Sequence[str]) -> Response:
    """Return a JSON response with the headers of its warnings."""
    return Response(data, headers=warning_headers(warnings), media_type="application/json")


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """Return the header that carries ``warnings``; no header without warnings."""
    return {WARNINGS: header_text(warnings)} if warnings else {}


class Draining(EngineUnavailable):
    """The server is shutting down. ``counted_as`` is its code in logs and metrics."""

    counted_as = "draining"


class Gate:
    """Counts active requests; once closed, it refuses new ones and can be awaited until the last has ended."""

    def __init__(self) -> None:
        self._num_active = 0
        self.is_closed = False
        self.empty = asyncio.Event()
        self.empty.set()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a request for the length of the block.

        Raises:
            Draining: The gate is closed.
        """
        if self.is_closed:
            raise Draining("the server is shutting down; please try again in a moment.")
        self._num_active += 1
        self.empty.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self.empty.set()

    def close(self) -> None:
        """Refuse new requests."""
        self.is_closed = True

    async def wait(self, limit_s: float) -> None:
        """Wait until no request is active, at most ``limit_s`` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.empty.wait(), limit_s)


def owner_of(request: Request) -> str:
    """Return the id of the key of ``request``, "" if the server has no keys."""
    return str(request.scope.get("state", {}).get("key_id", ""))


class InFlight:
    """Requests that can be cancelled by their ids, each with the id of its API key."""

    def __init__(self) -> None:
        self._active: dict[str, tuple[Interruption, asyncio.Event, str]] = {}

    @contextmanager
    def listed(self, request_id: str, interrupted: Interruption, owner: str = "") -> Iterator[None]:
        """Make ``request_id`` cancellable by ``owner``, the id of its key, for the length of the block."""
        ended = asyncio.Event()
        self._active[request_id] = interrupted, ended, owner
        try:
            yield
        finally:
            del self._active[request_id]
            ended.set()

    def has(self, request_id: str, owner: str = "") -> bool:
        """Return whether ``request_id`` is active and belongs to ``owner``."""
        return request_id in self._active and self._active[request_id][2] == owner

    async def cancel(self, request_id: str, owner: str = "") -> bool:
        """Cancel a request of ``owner`` and wait until it has released its resources.

        Returns:
            False if there is no such request.
        """
        if not self.has(request_id, owner):
            return False
        interrupted, ended, _ = self._active[request_id]
        if not interrupted.done():
            interrupted.set_result(cancelled())
        await ended.wait()
        return True


def cancelled() -> HttpError:
    """Return the error that a cancelled request ends with."""
    return HttpError(CLIENT_CLOSED_REQUEST, "the request was cancelled by its id.", code=CANCELLED)

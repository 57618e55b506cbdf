"""One request and its answer: read the body, work while anybody waits for it, stop when nobody does."""

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
PATIENCE_S = 30.0  # beyond the engine's own deadline: for encoding, and for an engine that hangs
CLIENT_CLOSED_REQUEST = 499
CANCELLED = "cancelled"
WARNINGS = "x-diffserve-warnings"

Interruption = asyncio.Future[HttpError]
"""Resolves, if it ever does, to the reason for which a request is to end at once."""

P = ParamSpec("P")
T = TypeVar("T")


async def read_body(request: Request, kind: type[BodyT]) -> BodyT:
    """The checked body."""
    data = await read_json(request)
    return await in_thread_if_long(data, parse, kind, data)


async def read_json(request: Request) -> bytes:
    """The body. Only JSON that says so: a foreign page cannot send that type unless the browser asks first."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(
            415, "the body must be JSON, with the header Content-Type: application/json.", code="unsupported_media_type"
        )
    try:
        return await request.body()
    except ClientDisconnect:
        raise hung_up() from None


async def in_thread_if_long(data: bytes, check: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """``check(*arguments)``, in a thread where ``data`` is so long that others would wait for it."""
    if len(data) > PARSE_IN_THREAD_BYTES:
        return await ANSWERS.run(check, *arguments, **named)
    return check(*arguments, **named)


@contextmanager
def interruption(request: Request) -> Iterator[Interruption]:
    """For the length of the block: resolved as soon as the client of ``request``, whose body is read, hangs up."""
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
    """What is said to nobody, for the log's sake."""
    return HttpError(CLIENT_CLOSED_REQUEST, "the client hung up.", code="client_closed_request")


def header_text(warnings: Sequence[str]) -> str:
    """``warnings`` as one header value: printable ASCII, within 1000 characters."""
    text = " | ".join(warnings).encode("ascii", "backslashreplace").decode("ascii")
    return "".join(c if c.isprintable() else " " for c in text)[:1000]


def json_response(data: bytes, warnings: Sequence[str]) -> Response:
    """A whole answer."""
    return Response(data, headers=warning_headers(warnings), media_type="application/json")


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """The headers of an answer that comes with ``warnings``; none without."""
    return {WARNINGS: header_text(warnings)} if warnings else {}


class Draining(EngineUnavailable):
    """Told to whoever comes while the server leaves; ``counted_as`` is how logs and metrics call it."""

    counted_as = "draining"


class Gate:
    """Counts the requests that are being worked on; once closed, it lets nobody in and says when the last is out."""

    def __init__(self) -> None:
        self._num_inside = 0
        self.is_closed = False
        self.empty = asyncio.Event()
        self.empty.set()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be counted for the length of the block. EngineUnavailable once the gate is closed."""
        if self.is_closed:
            raise Draining("the server is shutting down; please try again in a moment.")
        self._num_inside += 1
        self.empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self.empty.set()

    def close(self) -> None:
        """Let nobody else in."""
        self.is_closed = True

    async def wait(self, limit_s: float) -> None:
        """Until the last is out, or for ``limit_s``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.empty.wait(), limit_s)


def owner_of(request: Request) -> str:
    """Return the id of the key that ``request`` came with, "" where there are none."""
    return str(request.scope.get("state", {}).get("key_id", ""))


class InFlight:
    """Interruptions by request id, each for as long as its request is worked on, and the key it came with."""

    def __init__(self) -> None:
        self._inside: dict[str, tuple[Interruption, asyncio.Event, str]] = {}

    @contextmanager
    def listed(self, request_id: str, interrupted: Interruption, owner: str = "") -> Iterator[None]:
        """For the length of the block ``request_id`` can be cancelled by ``owner``, the id of its key."""
        over = asyncio.Event()
        self._inside[request_id] = interrupted, over, owner
        try:
            yield
        finally:
            del self._inside[request_id]
            over.set()

    def has(self, request_id: str, owner: str = "") -> bool:
        """Return whether a request of ``owner`` is being worked on."""
        return request_id in self._inside and self._inside[request_id][2] == owner

    async def cancel(self, request_id: str, owner: str = "") -> bool:
        """End a request of ``owner``, and return when it holds nothing any more. False where there is none."""
        if not self.has(request_id, owner):
            return False
        interrupted, over, _ = self._inside[request_id]
        if not interrupted.done():
            interrupted.set_result(cancelled())
        await over.wait()
        return True


def cancelled() -> HttpError:
    """What the one who waited for the request is told."""
    return HttpError(CLIENT_CLOSED_REQUEST, "the request was cancelled by its id.", code=CANCELLED)

"""What batches and experiments share: the lock of the data folder, yielding to interactive requests, and retries."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import Message

from diffserve.api.errors import EngineUnavailable, InvalidRequest, QueueFull
from diffserve.api.types import new_request_id
from diffserve.service.admission import BATCH, Admission
from diffserve.service.engine.engines import Engines
from diffserve.service.http.addresses import STATE, PublicAddress
from diffserve.service.http.errors import reply_to
from diffserve.service.threads import BATCHES

LOOK_EVERY_S: Final = 2.0
MAX_YIELD_S: Final = 10.0
"""Longest time for which background work waits for interactive requests to begin."""

POLL_S: Final = 0.05
MAX_RETRY_S: Final = 5.0
MAX_LOSSES: Final = 3
"""Number of lost engines after which a request fails."""

T = TypeVar("T")


@asynccontextmanager
async def folder_lock(path: Path, what: str, log: logging.Logger) -> AsyncIterator[None]:
    """Hold the lock file at ``path`` for the block; only one process per data folder runs ``what``."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_logged = False
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_logged:
                    log.warning(
                        f"another server uses this data folder; {what} wait until it exits",
                        extra={"folder": str(path.parent)},
                    )
                    is_logged = True
                await asyncio.sleep(LOOK_EVERY_S)
        yield
    finally:
        os.close(lock)


async def yield_to_interactive(admission: Admission) -> None:
    """Wait at most ``MAX_YIELD_S`` for waiting interactive requests to begin."""
    until_s = time.monotonic() + MAX_YIELD_S
    while admission.has_waiting and time.monotonic() < until_s:
        await asyncio.sleep(POLL_S)


async def until_served(engine: Engines, work: Callable[[], Awaitable[T]], max_losses: int = MAX_LOSSES) -> T:
    """Return the result of ``work``, which is repeated while queues are full and engines are missing.

    Raises:
        EngineUnavailable: ``max_losses`` engines were lost during the work.
    """
    num_losses = 0
    while True:
        was_ready = engine.is_ready
        try:
            return await work()
        except QueueFull as full:
            await asyncio.sleep(min(max(full.retry_after_s, POLL_S), MAX_RETRY_S))
        except EngineUnavailable:
            num_losses += was_ready
            if num_losses >= max_losses:
                raise
            await asyncio.sleep(LOOK_EVERY_S)


async def run_to_end(work: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Call ``work`` in a thread and wait until it has ended, even when cancelled."""
    task = asyncio.create_task(BATCHES.run(work, *arguments, **keywords))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if task.done() and not task.cancelled():
            task.exception()  # marks the error as retrieved; the caller is cancelled
        raise


class Answered(NamedTuple):
    """Response of an endpoint to a request of background work."""

    status: int
    request_id: str
    body: bytes


def error_answer(error: Exception, request_id: str) -> Answered:
    """Return the response that an endpoint would give for ``error``."""
    reply = reply_to(error)
    return Answered(reply.status, request_id, reply.body)


class EarlyAnswer(msgspec.Struct):
    """Fields of a body that request an answer before the work is done.

    Attributes:
        stream: Whether the answer is a stream.
        background: True for a background response; in image requests it is a word, such as "transparent".
    """

    stream: bool | None = None
    background: Any = None

    @property
    def is_requested(self) -> bool:
        """Whether one of the fields is true."""
        return self.stream is True or self.background is True


def early_answer_of(body: bytes | msgspec.Raw) -> EarlyAnswer:
    """Return the fields of a JSON body that request an early answer; none if the body is invalid."""
    try:
        return msgspec.json.decode(body, type=EarlyAnswer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return EarlyAnswer()  # the endpoint reports the error


def refuse_early_answers(body: bytes | msgspec.Raw, not_streamed: str, runs_in_background: str) -> None:
    """Refuse a body of background work that requests an early answer.

    Args:
        body: JSON.
        not_streamed: Reason why it cannot stream.
        runs_in_background: Reason why ``background`` is not needed.

    Raises:
        InvalidRequest: It requests one.
    """
    fields = early_answer_of(body)
    for name, reason in (("stream", not_streamed), ("background", runs_in_background)):
        if getattr(fields, name) is True:
            message = f"{name} is true; {reason}, leave it out."
            raise InvalidRequest(message, param=name, code="unsupported_value")


def request_of(app: FastAPI, endpoint: str, body: bytes, owner: str, base_url: str = "") -> Request:
    """Build a request with ``body`` for ``endpoint`` on behalf of the key ``owner``, with the priority batch.

    Args:
        app: The application.
        endpoint: The path.
        body: JSON.
        owner: The ID of the API key.
        base_url: Beginning of the image URLs in the answer; "" if it is not known.
    """
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in messages:
            return message
        await asyncio.Event().wait()  # the client of background work never disconnects
        raise AssertionError

    state: dict[str, Any] = {
        "request_id": new_request_id(),
        "key_id": owner,
        "client": f"{BATCH}{owner}",
        "priority": "batch",
    }
    if base_url:
        state[STATE] = PublicAddress(base_url, "", is_stated=True)
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
        "app": app,
        "path_params": {},
        "state": state,
    }
    return Request(scope, receive)

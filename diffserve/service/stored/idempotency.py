"""``Idempotency-Key``: a repeated request gets the response of the first one.

A request with a key runs to its end even if the client disconnects; repetitions wait for it, and for a day after get
the stored response with ``Idempotent-Replayed: true``. Another request with the same key is refused (422). Errors and
responses above 32 MiB are not stored. A stream ends with its client unless its work continues in the background.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.errors import HttpError, log_failure
from diffserve.service.http.openapi import IDEMPOTENCY_KEY
from diffserve.service.http.streams import EventStreamResponse, Lasting
from diffserve.service.lifecycle import WARNINGS, hung_up, in_thread_if_long, warning_headers
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import ANSWERS, LISTINGS
from diffserve.store.errors import StoreError
from diffserve.store.replies import MAX_REPLY_BYTES, Replies, Reply, name_of

REPLAYED: Final = "Idempotent-Replayed"
KEY_REUSED: Final = "idempotency_key_reused"
MAX_KEY_CHARS: Final = 255
UNKEPT: Final = "this response could not be stored; a retry with the same Idempotency-Key runs the request again."
NOT_KEPT: Final = frozenset({"content-length", "x-request-id", "openai-processing-ms"})
PARAMETER: Final = {
    "name": IDEMPOTENCY_KEY,
    "in": "header",
    "description": "A retry with the same key within a day returns the stored response.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]([ -~]*[!-~])?$"},
}

Answer = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("diffserve.http")


class Idempotency:
    """Runs each key's request once; ``replies`` stores the responses of ``owners``."""

    def __init__(self, replies: Replies, owners: Owners) -> None:
        self._replies = replies
        self._owners = owners
        self._running: dict[bytes, tuple[bytes, asyncio.Future[Reply | None]]] = {}
        self._lasting: dict[bytes, Lasting] = {}
        self._tasks: set[asyncio.Task[Response]] = set()

    async def answer(self, request: Request, endpoint: Answer) -> Response:
        """Return the response of ``endpoint``, or the stored one of an equal earlier request."""
        keys = request.headers.getlist(IDEMPOTENCY_KEY)
        owner = self._owners.owner(request) if keys else None
        if owner is None:
            return await endpoint(request)
        name = _name_of(owner, request, keys)
        digest = await _digest(request)
        while (running := self._running.get(name)) is not None:
            _require_same(running[0], digest)
            if name in self._lasting:
                return _mark_replayed(await self._lasting[name].again(request))
            reply = await asyncio.shield(running[1])
            if reply is not None:
                return _replay_response(reply)
        over = asyncio.get_running_loop().create_future()
        self._running[name] = digest, over
        try:
            stored = await LISTINGS.run(self._replies.get, name)
            if stored is not None:
                _require_same(stored.request, digest)
                self._end(name, stored)
                return _replay_response(stored)
            channel = _DelayedDisconnect(request)
            response = await endpoint(Request(request.scope, channel.receive))
            if isinstance(response, EventStreamResponse):
                channel.may_hang_up.set()
                if response.lasting is not None:
                    self._store_when_done(name, digest, response, response.lasting)
                    return response
                return _Recorded(response, partial(self._keep, name, digest, response))
            return await self._keep(name, digest, response, bytes(response.body))
        except BaseException:
            self._end(name, None)
            raise

    async def refuse_answered(self, request: Request) -> None:
        """Refuse the key of a request that becomes a job if it was used for one that is answered directly.

        Raises:
            HttpError: It was, or is at the moment.
        """
        keys = request.headers.getlist(IDEMPOTENCY_KEY)
        owner = self._owners.owner(request) if keys else None
        if owner is not None:
            name = _name_of(owner, request, keys)
            if name in self._running or await LISTINGS.run(self._replies.get, name) is not None:
                raise key_reused()

    def _store_when_done(self, name: bytes, digest: bytes, response: Response, lasting: Lasting) -> None:
        """Make ``response`` available to repetitions while its work continues, and store it at the end."""

        async def keep() -> Response:
            return await self._keep(name, digest, response, await lasting.body())

        self._lasting[name] = lasting
        task = asyncio.create_task(keep(), name="answer of lasting work")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, name: bytes, digest: bytes, response: Response, body: bytes | None) -> Response:
        """Store the complete ``body`` of a response and wake the waiting repetitions.

        None is not worth storing. If storing fails, the response carries a warning.
        """
        reply = None
        try:
            if body is not None and response.status_code == 200:
                headers = {name: value for name, value in response.headers.items() if name not in NOT_KEPT}
                reply = Reply(digest, response.status_code, headers, body)
                if not await LISTINGS.run(self._is_kept, name, reply):
                    reply = await ANSWERS.run(_add_warning, reply)
                    response = Response(reply.body, reply.status, reply.headers)
        finally:
            self._end(name, reply)
        return response

    def _is_kept(self, name: bytes, reply: Reply) -> bool:
        """Store ``reply`` and return whether that succeeded."""
        try:
            return self._replies.add(name, reply)
        except StoreError as error:
            log_failure(log, "a response could not be stored for its Idempotency-Key", error)
            return False

    def _end(self, name: bytes, reply: Reply | None) -> None:
        self._lasting.pop(name, None)
        _, over = self._running.pop(name, (b"", None))
        if over is not None and not over.done():
            over.set_result(reply)


class _DelayedDisconnect:
    """Channel of ``request`` that hides a disconnect until ``may_hang_up`` is set."""

    def __init__(self, request: Request) -> None:
        self.may_hang_up = asyncio.Event()
        self._request = request
        self._is_read = False

    async def receive(self) -> Message:
        """Return the body, which is already read, and then at most a disconnect."""
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": await self._request.body(), "more_body": False}
        while (message := await self._request.receive())["type"] != "http.disconnect":
            pass
        await self.may_hang_up.wait()
        return message


class _Recorded(Response):
    """Stream that is recorded and stored when it is complete."""

    def __init__(self, response: EventStreamResponse, keep: Callable[[bytes | None], Awaitable[object]]) -> None:
        self._response = response
        self._keep = keep
        self.status_code = response.status_code
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and store it if it is complete and has no error."""
        chunks: list[bytes] = []
        num_bytes, is_whole = 0, False

        async def send_recorded(message: Message) -> None:
            nonlocal num_bytes, is_whole
            if message["type"] == "http.response.body":
                num_bytes += len(message["body"])
                if num_bytes <= MAX_REPLY_BYTES:
                    chunks.append(message["body"])
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._response(scope, receive, send_recorded)
        finally:
            is_good = is_whole and num_bytes <= MAX_REPLY_BYTES and "error_code" not in scope.get("state", {})
            await self._keep(b"".join(chunks) if is_good else None)


def _name_of(owner: str, request: Request, keys: list[str]) -> bytes:
    return name_of(owner, request.url.path.rstrip("/").removeprefix("/v1"), check_key(keys))


async def _digest(request: Request) -> bytes:
    """Return a digest of the request, independent of a form's boundary and of JSON's key order and spaces."""
    try:
        body = await request.body()
    except ClientDisconnect:
        raise hung_up() from None
    return await in_thread_if_long(body, _digest_of, request.headers.get("content-type", ""), body)


def _digest_of(media_type: str, body: bytes) -> bytes:
    kind, _, parameters = media_type.partition(";")
    boundary = parameters.partition("boundary=")[2].partition(";")[0].strip().strip('"').encode("latin-1")
    if boundary:
        body = body.replace(boundary, b"")
    else:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
    return hashlib.sha256(kind.strip().lower().encode("latin-1") + b"\0" + body).digest()


def check_key(keys: list[str]) -> str:
    """Return the only key. Raises InvalidRequest if there are several, or if it is malformed."""
    if len(keys) > 1:
        raise InvalidRequest(f"{IDEMPOTENCY_KEY} is given {len(keys)} times; give it once.", param=IDEMPOTENCY_KEY)
    [key] = keys
    if not 0 < len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        message = f"{IDEMPOTENCY_KEY} has {len(key)} characters"
        if 0 < len(key) <= MAX_KEY_CHARS:
            message = f"{IDEMPOTENCY_KEY} has characters that are not printable ASCII"
        raise InvalidRequest(f"{message}; use 1 to {MAX_KEY_CHARS} printable ASCII characters.", param=IDEMPOTENCY_KEY)
    return key


def _require_same(digest: bytes, other: bytes) -> None:
    if digest != other:
        raise key_reused()


def key_reused() -> HttpError:
    """Return the error of another request with the same key."""
    message = f"this {IDEMPOTENCY_KEY} was used for another request; use a new one."
    return HttpError(422, message, code=KEY_REUSED)


def _add_warning(reply: Reply) -> Reply:
    """Add the warning that the response is not stored to the headers and warnings of ``reply``."""
    body, warnings_header = reply.body, reply.headers.get(WARNINGS)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        message = msgspec.json.decode(fields["warnings"], type=list[str]) if "warnings" in fields else None
        if message is not None:
            body = msgspec.json.encode(fields | {"warnings": [*message, UNKEPT]})
    headers = reply.headers | warning_headers([UNKEPT, *([] if warnings_header is None else [warnings_header])])
    return reply._replace(headers=headers, body=body)


def _replay_response(reply: Reply) -> Response:
    return _mark_replayed(Response(reply.body, reply.status, reply.headers))


def _mark_replayed(response: Response) -> Response:
    response.headers[REPLAYED] = "true"
    return response

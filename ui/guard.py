"""Request checks in front of gradio, which also bind sessions and files of the page to the API key that made them.

Gradio answers invalid requests with status 500 and a traceback; here they become ``InvalidRequest`` (400). Gradio
identifies a session by a value that the browser chooses and a file by its path. Both appear in URLs and logs, so where
the server asks for keys, each key has a namespace of sessions, and a file is only served to keys that may see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode

from diffserve.api.errors import DiffserveError, InvalidRequest
from ui.files import PageFiles

if TYPE_CHECKING:
    import gradio as gr

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_EVENT_BYTES: Final = 1_048_576
FILE: Final = "/file="

_SESSION: Final = re.compile(r"[\w\-]{1,64}", re.ASCII)
_RANGE: Final = re.compile(rb"bytes=(\d{1,18}-\d{0,18}|-\d{1,18})")
_BOUNDARY: Final = re.compile(rb"boundary=\"?[0-9A-Za-z'()+_,\-./:=? ]{1,70}\"?(?:;|$)", re.IGNORECASE)
_AUTHORITY: Final = re.compile(rb"[A-Za-z0-9.\-_]+(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?")
_SCHEME: Final = re.compile(rb"https?")
_FORWARDED: Final = {b"x-forwarded-host": _AUTHORITY, b"x-forwarded-proto": _SCHEME}

BOUND_QUERIES: Final = frozenset({"session_hash", "upload_id"})
"""Query parameters whose values the browser chooses and that identify something of a visitor."""

event_errors: ContextVar[list[DiffserveError] | None] = ContextVar("event_errors", default=None)
"""Errors of the event that the request of this context waits for; gradio would answer them with 500."""


def bound(name: str, key_id: str) -> str:
    """Return the name that gradio gets instead of ``name``: it differs for each key; without a key it is ``name``."""
    return hashlib.sha256(f"{key_id}/{name}".encode()).hexdigest() if key_id else name


def bound_query(query: bytes, key_id: str) -> bytes:
    """Return ``query`` with every identifier of a visitor bound to ``key_id``."""
    if not key_id or not any(name.encode() in query for name in BOUND_QUERIES):
        return query
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    bound_pairs = [(name, bound(value, key_id) if name in BOUND_QUERIES else value) for name, value in pairs]
    return urlencode(bound_pairs).encode()


def key_of(request: gr.Request | None) -> str:
    """Return the id of the key that ``request`` was admitted with; empty where the server asks for none."""
    key_id: str = getattr(getattr(request, "request", None), "scope", {}).get("state", {}).get("key_id", "")
    return key_id


class Guard:
    """ASGI middleware in front of gradio's application."""

    def __init__(self, app: App, blocks: gr.Blocks, api: str, files: PageFiles) -> None:
        self._app = app
        self._blocks = blocks
        self._api = api
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to gradio after checking it.

        Raises:
            InvalidRequest: Gradio would answer the request with status 500.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key_id: str = scope.get("state", {}).get("key_id", "")
        query = bound_query(scope["query_string"], key_id)
        scope = {**scope, "headers": self._headers(scope), "query_string": query}
        if (address := scope.get("state", {}).get("public_address")) is not None:
            _set_address(scope, address.root, address.prefix)
        path = scope["path"].removeprefix(self._api).rstrip("/")
        if scope["method"] == "POST" and path.startswith(("/run/", "/queue/join", "/cancel", "/reset")):
            data, receive = await _replayed(receive)
            body = _event_in(data)
            if path.startswith(("/run/", "/queue/join")):
                self._check_event(path, body)
            if key_id:
                self._bind_event(body, key_id)
                receive = _replay([{"type": "http.request", "body": json.dumps(body).encode()}], receive)
                scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        elif path.startswith("/heartbeat/"):
            session = path.removeprefix("/heartbeat/")
            _check_session(session)
            place = f"{self._api}/heartbeat/{bound(session, key_id)}"
            scope |= {"path": place, "raw_path": place.encode()}
        elif key_id and path.startswith(FILE) and not self._files.is_granted(Path(path.removeprefix(FILE)), key_id):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"this key has no such file."})
            return
        elif key_id and path == "/upload":
            send = self._granting(send, key_id)
        failed: list[DiffserveError] = []
        token = event_errors.set(failed)
        try:
            await self._app(scope, receive, send)
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            if path != "/upload":
                raise
            raise InvalidRequest("the upload is not a form with files.", param="files") from error
        except RuntimeError as error:  # of a session that is not there, which it has told the page already
            if path != "/queue/data" or getattr(error.__cause__, "status_code", 0) != 404:
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            event_errors.reset(token)
        if failed:
            raise failed[0]

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers that gradio may see.

        A range with an end is left out: gradio's answer to it repeats the request's headers, and the complete file is a
        valid answer, too.

        Raises:
            InvalidRequest: A range or a form boundary is invalid.
        """
        remaining_headers = []
        for name, value in scope["headers"]:
            if name == b"range" and not _RANGE.fullmatch(value):
                raise InvalidRequest("only a single byte range is supported.", param="Range", code="invalid_range")
            if name == b"content-type" and value.lower().startswith(b"multipart/") and not _BOUNDARY.search(value):
                raise InvalidRequest("the form boundary must have 1 to 70 characters.", param="Content-Type")
            pattern = _FORWARDED.get(name)
            is_odd = pattern is not None and not pattern.fullmatch(value.partition(b",")[0].strip())
            if not is_odd and not (name == b"range" and value[-1:].isdigit() and b"=-" not in value):
                remaining_headers.append((name, value))
        return remaining_headers

    def _bind_event(self, body: dict[str, Any], key_id: str) -> None:
        """Replace the session in ``body`` by the one of this name that belongs to the key.

        Raises:
            InvalidRequest: The event belongs to another session.
        """
        if isinstance(session := body.get("session_hash"), str):
            body["session_hash"] = bound(session, key_id)
        event = self._blocks._queue.event_ids_to_events.get(str(body.get("event_id")))
        if event is not None and event.session_hash != body.get("session_hash"):
            raise InvalidRequest("this session has no such event.", param="event_id", code="unknown_event")

    def _granting(self, send: Send, key_id: str) -> Send:
        """Return a ``send`` that grants the key the files that an upload is answered with."""
        data = b""

        async def send_granting(message: Message) -> None:
            nonlocal data
            if message["type"] == "http.response.body":
                data += message.get("body", b"")
                if not message.get("more_body"):
                    with contextlib.suppress(ValueError):  # the text of an error
                        for file in json.loads(data):
                            self._files.grant(Path(file), key_id)
            await send(message)

        return send_granting

    def _check_event(self, path: str, body: dict[str, Any]) -> None:
        """Refuse an event that the page does not have."""
        if body.get("batched"):
            raise InvalidRequest("events of the page do not support batches.", param="batched")
        if body.get("session_hash") is not None:
            _check_session(body["session_hash"])
        index = body.get("fn_index")
        if index is None:
            name = path.removeprefix("/run/")
            index = next((number for number, fn in self._blocks.fns.items() if fn.api_name == name), None)
        fn = None if not isinstance(index, int) or isinstance(index, bool) else self._blocks.fns.get(index)
        if fn is None or fn.fn is None:
            raise InvalidRequest("the page has no such event.", param="fn_index", code="unknown_event")


def _set_address(scope: Scope, root: str, prefix: str) -> None:
    """Replace the address in the request, from which gradio builds all others, by ``root`` with the path ``prefix``."""
    headers = [(name, value) for name, value in scope["headers"] if name not in (*_FORWARDED, b"x-gradio-server")]
    scope["headers"] = [*headers, (b"x-gradio-server", root.encode())]
    scope["root_path"] = prefix


def _check_session(session: object) -> None:
    if not isinstance(session, str) or not _SESSION.fullmatch(session):
        raise InvalidRequest("session_hash must be 1 to 64 letters and digits.", param="session_hash")


def _event_in(data: bytes) -> dict[str, Any]:
    """Parse ``data`` as a JSON object.

    Raises:
        InvalidRequest: It is none.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not valid JSON.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object.", code="invalid_json")
    return body


async def _replayed(receive: Receive) -> tuple[bytes, Receive]:
    """Read the complete body.

    Returns:
        The body, and a ``receive`` that returns it again.

    Raises:
        InvalidRequest: It is too long.
    """
    messages: list[Message] = []
    num_bytes = 0
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
        num_bytes += len(messages[-1].get("body", b""))
        if num_bytes > MAX_EVENT_BYTES:
            raise InvalidRequest(
                f"an event of the page must have at most {MAX_EVENT_BYTES} bytes.", code="body_too_large"
            )
    return b"".join(message.get("body", b"") for message in messages), _replay(messages, receive)


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Return a ``receive`` that returns ``messages`` first."""
    remaining = iter(messages)

    async def again() -> Message:
        for message in remaining:
            return message
        return await receive()

    return again

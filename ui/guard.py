"""Request checks in front of gradio, and one-sentence messages for failed events.

Gradio answers invalid requests with status 500 and a traceback. Here they become ``InvalidRequest``, which the server
answers with 400. Programming errors stay 500 and are logged once.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from diffserve.api.errors import DiffserveError, InvalidRequest
from ui.files import PageFiles
from ui.ownership import bound, bound_query
from ui.server import sentence

if TYPE_CHECKING:
    import gradio as gr

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_EVENT_BYTES: Final = 1_048_576
FILE: Final = "/file="
UNREADABLE: Final = "That cannot be read; reload the page and try again."
OUR_MISTAKE: Final = "The server made a mistake; its log says more."

_SESSION: Final = re.compile(r"[\w\-]{1,64}", re.ASCII)
_RANGE: Final = re.compile(rb"bytes=(\d{1,18}-\d{0,18}|-\d{1,18})")
_BOUNDARY: Final = re.compile(rb"boundary=\"?[0-9A-Za-z'()+_,\-./:=? ]{1,70}\"?(?:;|$)", re.IGNORECASE)
_AUTHORITY: Final = re.compile(rb"[A-Za-z0-9.\-_]+(?::\d{1,5})?|\[[0-9A-Fa-f:.]+\](?::\d{1,5})?")
_SCHEME: Final = re.compile(rb"https?")
_FORWARDED: Final = {b"x-forwarded-host": _AUTHORITY, b"x-forwarded-proto": _SCHEME}

_failed: ContextVar[list[DiffserveError] | None] = ContextVar("failed", default=None)
"""Errors of the event that the request of this context waits for; gradio would answer them with 500."""

log = logging.getLogger("diffserve.page")


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
        token = _failed.set(failed)
        try:
            await self._app(scope, receive, send)
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            if path != "/upload":
                raise
            raise InvalidRequest("the upload cannot be read as a form with files.", param="files") from error
        except RuntimeError as error:  # of a session that is not there, which it has told the page already
            if path != "/queue/data" or getattr(error.__cause__, "status_code", 0) != 404:
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            _failed.reset(token)
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
                raise InvalidRequest("only one range of bytes is taken.", param="Range", code="invalid_range")
            if name == b"content-type" and value.lower().startswith(b"multipart/") and not _BOUNDARY.search(value):
                raise InvalidRequest("the form has no boundary of 1 to 70 characters.", param="Content-Type")
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
        """Refuse an event that the page does not have, or that lacks what its function is given."""
        if body.get("batched"):
            raise InvalidRequest("no event of the page takes batches.", param="batched")
        if body.get("session_hash") is not None:
            _check_session(body["session_hash"])
        index = body.get("fn_index")
        if index is None:
            name = path.removeprefix("/run/")
            index = next((number for number, fn in self._blocks.fns.items() if fn.api_name == name), None)
        fn = None if not isinstance(index, int) or isinstance(index, bool) else self._blocks.fns.get(index)
        if fn is None or fn.fn is None:
            raise InvalidRequest("the page has no such event.", param="fn_index", code="unknown_event")
        try:
            for kind in _event_data_of(fn.fn):
                kind(None, body.get("event_data"))
        except (TypeError, LookupError, ValueError):
            raise InvalidRequest("event_data lacks what the event is about.", param="event_data") from None


def tell(blocks: gr.Blocks) -> None:
    """Convert exceptions of the events of ``blocks`` to one-sentence errors.

    Invalid values are reported as user errors; unexpected exceptions are logged and reported as internal errors.
    """
    import gradio as gr

    preprocess, call = blocks.preprocess_data, blocks.call_function

    async def preprocess_data(*arguments: Any, **keywords: Any) -> Any:
        try:
            values = await preprocess(*arguments, **keywords)
            event = arguments[0] if arguments else keywords["block_fn"]
            for field, value in zip(event.inputs, values, strict=True):
                if getattr(field, "multiselect", False) and not isinstance(value, list | None):
                    raise TypeError("a multiple choice requires a list")
            return _filled(event.fn, values)
        except Exception as error:
            text = error.message if isinstance(error, gr.Error) else UNREADABLE
            raise _report(gr.Error(text, print_exception=False), InvalidRequest(text, param="data")) from None

    async def call_function(*arguments: Any, **keywords: Any) -> Any:
        try:
            return await call(*arguments, **keywords)
        except gr.Error as error:
            error.print_exception = False
            raise _report(error, InvalidRequest(str(error.message))) from None
        except InvalidRequest as error:
            raise _report(gr.Error(sentence(error), print_exception=False), error) from None
        except Exception:
            log.exception("an event of the page failed")
            raise _report(gr.Error(OUR_MISTAKE, print_exception=False), DiffserveError(OUR_MISTAKE)) from None

    blocks.preprocess_data, blocks.call_function = preprocess_data, call_function  # type: ignore[method-assign]


def _report(error: gr.Error, answer: DiffserveError) -> gr.Error:
    """Pass ``answer`` to the request that waits for the event, if there is one, and return ``error``."""
    failed = _failed.get()
    if failed is not None:
        failed.append(answer)
    return error


def _event_data_of(function: Callable[..., Any]) -> list[type[gr.EventData]]:
    """Return the kinds of event data that ``function`` takes in addition to its values."""
    import gradio as gr

    kinds = get_type_hints(function).values() if inspect.isroutine(function) else ()
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, gr.EventData)]


def _filled(function: Callable[..., Any], values: list[Any]) -> list[Any]:
    """Replace None by an empty string where ``function`` takes text, because clients may send empty fields so."""
    special = _event_data_of(function)
    hints = get_type_hints(function) if inspect.isroutine(function) else {}
    names = [name for name in inspect.signature(function).parameters if hints.get(name) not in special]
    kinds = [hints.get(name) for name in names]
    return [
        "" if value is None and index < len(kinds) and kinds[index] is str else value
        for index, value in enumerate(values)
    ]


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
            raise InvalidRequest(f"an event of the page has at most {MAX_EVENT_BYTES} bytes.", code="body_too_large")
    return b"".join(message.get("body", b"") for message in messages), _replay(messages, receive)


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Return a ``receive`` that returns ``messages`` first."""
    remaining = iter(messages)

    async def again() -> Message:
        for message in remaining:
            return message
        return await receive()

    return again

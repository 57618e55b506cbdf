"""Page at ``/``, mounted while the engine loads; it receives valid JSON only, and its errors become error objects."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders, URLPath
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Match, NoMatchFound
from starlette.types import Message, Receive, Scope, Send

from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.service.http.bodies import check_strict
from diffserve.service.http.errors import (
    OUR_MISTAKE,
    HttpError,
    expected_error,
    log_failure,
    reply_to,
    routing_error,
)
from diffserve.service.lifecycle import hung_up, in_thread_if_long, read_json
from diffserve.service.threads import ANSWERS

MountPage = Callable[[FastAPI, str], tuple[str, ...]]
"""Mounts the page of the server with this address at ``/`` of an empty application, and returns the paths it needs.

A path that ends in "/" or "=" includes all paths below it. May take seconds; runs in a thread.
"""

POLICY: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; frame-ancestors 'self'"
)
"""Content security policy of the page: nothing is loaded from other hosts."""

UPLOAD: Final = "/upload"
"""End of the path of file uploads; the bodies of all other paths are JSON."""

COMING: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="1">
<meta name="viewport" content="width=device-width"><title>diffserve</title></head>
<body style="font-family: system-ui, sans-serif; margin: 3rem">
<p>diffserve is starting; this page reloads automatically.</p></body></html>"""

CODES: Final = {403: "file_not_allowed", 413: "body_too_large", 416: "invalid_range", 422: "invalid_value"}
"""Codes of the page's error answers, by status."""

MAX_REASON_BYTES: Final = 16 * 1024
MAX_REASON_CHARS: Final = 300

log = logging.getLogger("diffserve.page")


class Page:
    """Lifecycle of the page: ``route`` exists at once, ``open`` builds the page, ``close`` ends it."""

    def __init__(self, mount: MountPage) -> None:
        self._mount = mount
        self._shell = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        self._stack = AsyncExitStack()
        self.route = PageRoute(self._shell)

    async def open(self, url: str) -> None:
        """Build the page of the server at ``url``. Never raises; without the page the API still works."""
        try:
            paths = await ANSWERS.run(self._mount, self._shell, url)
            await self._stack.enter_async_context(self._shell.router.lifespan_context(self._shell))
        except Exception:
            log.exception("the page could not be built")
            self.route.give_up()
            return
        self.route.open_for(paths)

    async def close(self) -> None:
        """Disconnect the visitors."""
        self.route.close()
        await self._stack.aclose()


class PageRoute(BaseRoute):
    """Route that sends the page's paths to ``app``; other errors remain the API's."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.path = "page"
        self._exact = frozenset({"/"})
        self._below: tuple[str, ...] = ()
        self._is_open = False

    def open_for(self, paths: tuple[str, ...]) -> None:
        """Route ``paths`` to the page from now on."""
        self._below = tuple(path for path in paths if len(path) > 1 and path.endswith(("/", "=")))
        self._exact = frozenset({"/", *paths} - set(self._below))
        self._is_open = True

    def give_up(self) -> None:
        """Route nothing, because there will be no page."""
        self._exact = frozenset()

    def close(self) -> None:
        """Answer visitors with 503 from now on."""
        self._is_open = False

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the path belongs to the page."""
        path = scope.get("path", "")
        is_ours = scope["type"] == "http" and (path in self._exact or path.startswith(self._below))
        return (Match.FULL, {"endpoint": self.app, "route": self}) if is_ours else (Match.NONE, {})

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        """Raise NoMatchFound; the page has no named routes."""
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the page, or with a notice that it is starting."""
        scope.setdefault("state", {})["is_page"] = True
        if self._is_open:
            await self._answer(scope, receive, _with_page_headers(send))
        elif scope["path"] == "/" and scope["method"] == "GET":
            coming: Response = HTMLResponse(COMING, status_code=503, headers={"Retry-After": "1"})
            await coming(scope, receive, send)
        else:
            await reply_to(EngineUnavailable("the web page is not available; please try again in a moment.")).response(
                scope, receive, send
            )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the page; every error is answered with the error object of this server."""
        answer = _ErrorFilter(scope, send)
        error: Exception | None
        try:
            checked = await _check_body(scope, receive)
            await self.app(scope, checked, answer)
            error = answer.error
        except ClientDisconnect:
            error = hung_up()
        except Exception as raised:
            error = raised
        if error is None:
            return
        expected = expected_error(error)
        if expected is None or expected.status >= 500:
            log_failure(log, "the page failed", error, request_id=scope["state"].get("request_id", ""))
        if not answer.is_started:
            scope["state"]["error_code"] = DiffserveError.default_code if expected is None else expected.code
            response = reply_to(error).response
            if answer.validation:  # gradio's script shows it at the fields
                content = msgspec.json.decode(bytes(response.body)) | {"detail": answer.validation}
                response = JSONResponse(content, response.status_code)
            response.headers.update(answer.kept_headers)
            await response(scope, receive, send)


class _ErrorFilter:
    """Passes answers of the page on, except errors, which the caller answers with ``error``.

    Attributes:
        kept_headers: Headers of the page's error answer that the error object is sent with.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._status = 0
        self._body = b""
        self.is_started = False
        self.kept_headers: dict[str, str] = {}

    @property
    def error(self) -> DiffserveError | None:
        """The page's error answer as an error of this server; None if there is none."""
        if self._status < 400:
            return None
        if self._status == 503:
            return EngineUnavailable("the server is shutting down.")
        if self._status >= 500:
            return DiffserveError(OUR_MISTAKE)
        if self._status in (404, 405):
            return routing_error(self._status, self._scope["method"], self._scope["path"])
        return HttpError(self._status, _reason_in(self._body), code=CODES.get(self._status, "bad_request"))

    @property
    def validation(self) -> list[dict[str, Any]]:
        """Gradio's validation of the fields of a refused event; empty for other answers."""
        return _validation_in(self._body) if self._status == 422 else []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = Headers(raw=message["headers"])
            self.kept_headers = {name: headers[name] for name in ("allow", "content-range") if name in headers}
        if self._status < 400:
            self.is_started = True
            await self._send(message)
        elif message["type"] == "http.response.body" and len(self._body) < MAX_REASON_BYTES:
            self._body += message.get("body", b"")


def _reason_in(body: bytes) -> str:
    """Return the message of an error answer of the page in one line: FastAPI's ``detail``, or plain text."""
    text: object = body[:MAX_REASON_BYTES].decode("utf-8", "replace")
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        text = msgspec.json.decode(body, type=_Detail).detail
    if validation := _validation_in(body):
        text = " ".join(str(field.get("message", "")) for field in validation if not field.get("is_valid"))
    elif isinstance(text, list):  # FastAPI's list of missing or wrong fields
        fields = [field for field in text if isinstance(field, dict)]
        text = "; ".join(f"{'.'.join(map(str, field.get('loc', ())))}: {field.get('msg', '')}" for field in fields)
    return " ".join(str(text).split())[:MAX_REASON_CHARS] or "the request could not be read."


def _validation_in(body: bytes) -> list[dict[str, Any]]:
    """Return the results of a gradio validator in ``body``; empty if there are none."""
    with suppress(msgspec.MsgspecError):
        detail = msgspec.json.decode(body, type=_Detail).detail
        if isinstance(detail, list) and all(isinstance(field, dict) and "is_valid" in field for field in detail):
            return detail
    return []


class _Detail(msgspec.Struct):
    detail: Any


async def _check_body(scope: Scope, receive: Receive) -> Receive:
    """Return a ``receive`` with the body, which is checked to be JSON except for uploads. Raises HttpError."""
    request = Request(scope, receive)
    is_upload = scope["path"].endswith(UPLOAD)
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    if scope["method"] != "POST" or is_upload or not has_body:
        return receive
    data = await read_json(request)
    await in_thread_if_long(data, check_strict, data)
    messages = iter([{"type": "http.request", "body": data, "more_body": False}])

    async def again() -> Message:
        for message in messages:
            return message
        return await receive()

    return again


def _with_page_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if headers.get("content-type", "").startswith("text/html"):
                headers["Content-Security-Policy"] = POLICY
                headers["Referrer-Policy"] = "same-origin"
        await send(message)

    return send_with_headers

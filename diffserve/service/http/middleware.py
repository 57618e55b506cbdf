"""Middleware in front of all routes: request IDs, checks of host and origin, framing, and limits on bodies.

Plain ASGI, outermost first::

    Outermost     assigns the request ID, adds common headers, logs one line, answers unexpected errors with 500
    PublicPath    removes the path prefix of a proxy (``addresses.py``)
    ProxiedUsers  stores the user that a trusted proxy names (``proxied_users.py``), if configured
    HeadAsGet     answers HEAD as GET without the body
    OriginGuard   refuses foreign hosts and origins
    FramingGuard  refuses requests that a proxy could read differently
    BodyLimit     limits the length and the duration of bodies
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffserve.api.errors import DiffserveError
from diffserve.api.types import new_request_id
from diffserve.service.http.addresses import (
    AUTHORITY,
    HOST_NOT_ALLOWED,
    HostNames,
    hostname,
    is_loopback,
    origin_of,
    public_address,
)
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError, expected_error, log_failure, reply_for
from diffserve.service.http.keys import LOGIN, key_in, session_in
from diffserve.service.http.proxied_users import proxied_user
from diffserve.service.lifecycle import hung_up
from diffserve.service.metrics import Metrics

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ALLOWED_METHODS = "GET, HEAD, POST, PUT, DELETE, OPTIONS"
PREFLIGHT_MAX_AGE_S = 600
PROBES = frozenset({"/livez", "/readyz", "/health", "/ping"})  # sent about every second, so not logged
UNTRACED = PROBES | {"/metrics"}
BODY_TIMEOUT_S = 60.0
SLOWEST_BYTES_PER_S = 16 * 1024  # lowest mean rate of a body that takes longer than BODY_TIMEOUT_S
TEXT_BODY_BYTES: Final = 1 << 20
"""Limit on bodies without images, except uploads (multipart/form-data)."""
PICTURE_BODY_BYTES: Final = 6 << 20
"""Limit on JSON bodies that may have images; without the images the limit is ``TEXT_BODY_BYTES``."""
WITH_PICTURES: Final = "/images/generations"
OF_PICTURES: Final = (
    *("/images/edits", "/images/variations", "/images/upscale", "/provenance/verify", "/responses", "/jobs"),
    *("/chat/completions", "/sdapi/v1/", "/controlnet/detect"),
)
"""Paths whose JSON bodies have the same limit as uploads."""
FILES: Final = "/files"
FILE_BYTES: Final = 200_000_000
"""Limit on a file that is uploaded to ``/files``."""

_ABSOLUTE: Final = re.compile(rf"https?://({AUTHORITY.pattern})(/.*)?".encode(), re.IGNORECASE | re.DOTALL)
_HIDDEN = re.compile(rb"%(?:2f|5c|00)", re.IGNORECASE)
_NAMES_BELOW = (
    b"/v1/models/",
    b"/gradio_api/file=",
)  # the path after these prefixes is one name, which may have encoded slashes

log = logging.getLogger("diffserve.http")


class Outermost:
    """Assigns the request ID, answers unexpected errors, and writes one log line without any content."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics | None = None) -> None:
        self.app = app
        self.metrics = metrics or Metrics()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with an ID; answer unexpected errors, and log and count the answer."""
        if scope["type"] == "websocket":  # websockets are not supported, and the middleware below ignores them
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        take_origin_form(scope)
        request_id, started_s = new_request_id(), time.perf_counter()
        scope.setdefault("state", {})["request_id"] = request_id
        traces = None if scope["path"] in UNTRACED else self.metrics.traces
        trace_id = "" if traces is None else traces.begin(request_id, scope)
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
                headers["openai-processing-ms"] = str(int((time.perf_counter() - started_s) * 1000))
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        except Exception as raised:
            error = hung_up() if isinstance(raised, ClientDisconnect) else raised
            expected = expected_error(error)
            if expected is None or expected.status >= 500:
                log_failure(log, "request failed", error, request_id=request_id)
            if status == 0:
                scope["state"]["error_code"] = DiffserveError.default_code if expected is None else expected.code
                await reply_for(scope["path"], error).response(scope, receive, send_marked)
        finally:
            seconds, code = time.perf_counter() - started_s, scope["state"].get("error_code", "")
            self.metrics.answered(endpoint_of(scope), status, code, seconds)
            if traces is not None:
                traces.end(request_id, endpoint_of(scope), status, code)
            fields = {
                "request_id": request_id,
                "method": scope["method"][:16],
                "endpoint": getattr(scope.get("route"), "path", ""),
                "status": status,
                "duration_ms": round(seconds * 1000),
            }
            if key_id := scope["state"].get("key_id"):
                fields["key_id"] = key_id
            if code:
                fields["error"] = code
            if trace_id:
                fields["trace_id"] = trace_id
            is_quiet = fields["endpoint"] in PROBES or (scope["state"].get("is_page", False) and status < 400)
            log.log(logging.DEBUG if is_quiet else logging.INFO, "request", extra=fields)


def endpoint_of(scope: Scope) -> str:
    """Return the template of the matched route; "page" for the page, "none" without a route."""
    if scope["state"].get("is_page", False):
        return "page"
    path: str | None = getattr(scope.get("route"), "path", None)
    return "none" if path is None else path.rstrip("/") or "/"


def take_origin_form(scope: Scope) -> None:
    """Convert a target in absolute form to origin form (RFC 9112 3.2.2); its authority replaces the Host header."""
    match = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"") if scope["type"] == "http" else None
    if match is None:
        return
    authority, path = match.groups()
    scope["raw_path"] = path or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    scope["headers"] = [(b"host", authority), *(header for header in scope["headers"] if header[0].lower() != b"host")]


class HeadAsGet:
    """Answers HEAD as GET without the body, and adds HEAD to ``Allow`` wherever GET is.

    The response is complete with its headers; nothing more of a file or a stream is read.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass HEAD on as GET and drop the body of the answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_allowing(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 405:
                headers = MutableHeaders(scope=message)
                allowed = {method.strip() for method in headers.get("allow", "").split(",")}
                if "GET" in allowed:
                    headers["allow"] = ", ".join(sorted(allowed | {"HEAD"}))
            await send(message)

        if scope["method"] != "HEAD":
            await self.app(scope, receive, send_allowing)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        scope["method"] = "GET"  # in place, because the outer middleware reads the matched route from this scope
        try:
            await self.app(scope, receive, send_head)
        finally:
            scope["method"] = "HEAD"


class OriginGuard:
    """Refuses a foreign Host (DNS rebinding), and a foreign Origin unless the method is safe.

    A missing Origin is accepted: programs send none, and browsers send one whenever it matters. An Origin is accepted
    if it is a loopback address, the server's own (the host that the request names, or ``public_url``), or one of
    ``cors_origins``; accepted origins get CORS headers. The login form and requests that a browser authenticates by
    itself, by the session cookie or the cookie of a proxy that names the user, are accepted from the server's own
    origin only: cookies do not distinguish ports.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: HostNames, public_url: str = "", cors_origins: Sequence[str] = ()
    ) -> None:
        self.app = app
        self.hosts = hosts
        self.own = origin_of(public_url)
        self.cors_origins = frozenset(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on unless its host or origin is refused; add CORS headers for accepted origins."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        refusal = self._refusal(scope, headers, origin)
        if refusal is not None:
            await reply_for(scope["path"], refusal).response(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_preflight(headers, origin))(scope, receive, send)
        elif origin is None or not self._is_accepted(origin, scope):
            await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, _adding_cors(send, origin))

    def _refusal(self, scope: Scope, headers: Headers, origin: str | None) -> HttpError | None:
        host = headers.get("host", "")
        if host and hostname(host) not in self.hosts:
            return HttpError(403, HOST_NOT_ALLOWED.format(host=show(host)), code="host_not_allowed")
        method = scope["method"]
        if method in SAFE_METHODS - {"OPTIONS"}:
            return None
        if origin is None:
            is_foreign = headers.get("sec-fetch-site") == "cross-site"
        elif method != "OPTIONS" and (scope["path"] == LOGIN or _is_authenticated_by_browser(scope, headers)):
            is_foreign = not self._is_own(origin, scope)
        else:
            is_foreign = not self._is_accepted(origin, scope)
        if is_foreign:
            return HttpError(
                403,
                "requests from pages of other sites are not allowed; add the site to [serve] cors_origins.",
                code="origin_not_allowed",
            )
        return None

    def _is_accepted(self, origin: str, scope: Scope) -> bool:
        scheme, separator, authority = origin.partition("://")
        host = hostname(authority)
        if scheme not in ("http", "https") or not separator or host is None:
            return False
        return is_loopback(host) or self._is_own(origin, scope) or origin.lower() in self.cors_origins

    def _is_own(self, origin: str, scope: Scope) -> bool:
        address = public_address(scope)
        origins = {self.own, address.origin} if address is not None and address.is_stated else {self.own}
        authority = origin.partition("://")[2].lower()
        return origin.lower() in origins or authority == Headers(scope=scope).get("host", "").lower()


def _is_authenticated_by_browser(scope: Scope, headers: Headers) -> bool:
    return bool(proxied_user(scope)) or (bool(session_in(headers)) and not key_in(headers))


class FramingGuard:
    """Refuses a request whose end or address a proxy in front of this server could read differently."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on unless its framing or path is ambiguous."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await reply_for(scope["path"], refusal).response(scope, receive, send)

    @staticmethod
    def _refusal(scope: Scope) -> HttpError | None:
        names = [name for name, _ in scope["headers"]]
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            return HttpError(
                400, "send Content-Length or Transfer-Encoding, not both.", code="ambiguous_length", is_last=True
            )
        if scope["http_version"] not in ("1.0", "1.1"):
            return HttpError(
                400, "this server only supports HTTP/1.0 and HTTP/1.1.", code="unsupported_http_version", is_last=True
            )
        path: bytes = scope.get("raw_path") or b""
        hidden = _HIDDEN.search(path)
        if hidden is not None and not (path.startswith(_NAMES_BELOW) and hidden[0] != b"%00"):
            code = "null_character" if hidden[0] == b"%00" else "encoded_slash"
            return HttpError(400, f"{hidden[0].decode()} is not allowed in a URL path.", code=code)
        return None


class BodyLimit:
    """Refuses bodies that are too long or arrive too slowly.

    Uploads and JSON to ``OF_PICTURES`` may have ``max_bytes``, other bodies ``TEXT_BODY_BYTES`` or
    ``PICTURE_BODY_BYTES``. A body may take ``BODY_TIMEOUT_S``, and longer only at a mean rate of at least
    ``SLOWEST_BYTES_PER_S``. FastAPI has no limit on the rate, so this stays middleware.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with limits on the length and the rate of its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_upload = headers.get("content-type", "").lower().startswith("multipart/form-data")
        path = scope["path"]
        max_bytes = self.max_bytes if is_upload else json_limit(path, self.max_bytes)
        if is_upload and path.removeprefix("/v1").rstrip("/") == FILES:
            max_bytes = FILE_BYTES + TEXT_BODY_BYTES  # the form's fields and boundaries around the file
        refusal = self._refusal(headers, max_bytes)
        if refusal is not None:
            await reply_for(scope["path"], refusal).response(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        started_s, received, is_read = loop.time(), 0, False

        async def counted() -> Message:
            nonlocal received, is_read
            if is_read:
                return await receive()  # waits for the disconnect, without a limit
            limit_s = max(BODY_TIMEOUT_S, received / SLOWEST_BYTES_PER_S)
            try:
                async with asyncio.timeout_at(started_s + limit_s):
                    message = await receive()
            except TimeoutError:
                raise HttpError(
                    408, f"the body did not arrive within {limit_s:g} s.", code="body_timeout", is_last=True
                ) from None
            received += len(message.get("body", b""))
            is_read = not message.get("more_body", False)
            if received > max_bytes:
                raise too_long(max_bytes)
            return message

        await self.app(scope, counted, send)

    @staticmethod
    def _refusal(headers: Headers, max_bytes: int) -> HttpError | None:
        announced = headers.get("content-length", "0")
        if not announced.isascii() or not announced.isdigit():
            return HttpError(400, "Content-Length must be a whole number.", code="invalid_content_length")
        if int(announced[:20]) > max_bytes:
            return too_long(max_bytes)
        if headers.get("content-encoding", "identity").lower() != "identity":
            return HttpError(
                415,
                "compressed request bodies are not supported; send the body uncompressed.",
                code="unsupported_content_encoding",
            )
        return None


def json_limit(path: str, max_bytes: int) -> int:
    """Return the limit in bytes of a JSON body for ``path``; ``max_bytes`` for paths of images."""
    name = path.removeprefix("/v1")
    if name.startswith(OF_PICTURES):
        return max_bytes
    return min(max_bytes, PICTURE_BODY_BYTES if name.startswith(WITH_PICTURES) else TEXT_BODY_BYTES)


def too_long(max_bytes: int) -> HttpError:
    """Return the error for a body of more than ``max_bytes``."""
    return HttpError(413, f"the body is longer than {max_bytes} bytes.", code="body_too_large")


def _preflight(headers: Headers, origin: str | None) -> dict[str, str]:
    allow = {"Allow": ALLOWED_METHODS}
    if origin is None:
        return allow
    return allow | {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": ALLOWED_METHODS,
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "authorization, content-type"),
        "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
        "Vary": "Origin",
    }


def _adding_cors(send: Send, origin: str) -> Send:
    async def send_allowing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            exposed = (
                "x-request-id, x-diffserve-warnings, x-content-provenance, retry-after, location, preference-applied"
            )
            headers["Access-Control-Expose-Headers"] = exposed
            headers.add_vary_header("Origin")
        await send(message)

    return send_allowing

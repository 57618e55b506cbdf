"""What every request passes before it reaches a route: its id, its host and origin, its length.

Plain ASGI, outermost first::

    Outermost     request id, the answer's common headers, one log line, and a 500 for whatever slips through
    OriginGuard   a page from elsewhere must not make the visitor's browser post to this server
    BodyLimit     the body is counted while it is read, and refused beyond the limit
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffserve.service.errors import HttpError, reply_to
from diffserve.types import new_request_id

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ALLOWED_METHODS = "GET, POST, OPTIONS"
PREFLIGHT_MAX_AGE_S = 600
PROBES = frozenset({"/livez", "/readyz", "/health", "/ping"})  # asked every second or so; not worth a line each
_AUTHORITY = re.compile(r"[A-Za-z0-9.\-_\[\]:]+")

log = logging.getLogger("diffserve.http")


class Outermost:
    """Gives the request an id, answers for every unexpected error, and writes one log line without any content."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, started_s = new_request_id(), time.perf_counter()
        scope.setdefault("state", {})["request_id"] = request_id
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
        except Exception as error:
            log.exception("request failed", extra={"request_id": request_id})
            if status == 0:
                await reply_to(error).response(scope, receive, send_marked)
        finally:
            facts = {
                "request_id": request_id,
                "method": scope["method"][:16],
                "endpoint": getattr(scope.get("route"), "path", ""),
                "status": status,
                "duration_ms": round((time.perf_counter() - started_s) * 1000),
            }
            is_quiet = facts["endpoint"] in PROBES or scope["state"].get("is_page", False)
            log.log(logging.DEBUG if is_quiet else logging.INFO, "request", extra=facts)


class OriginGuard:
    """Refuses a foreign Host on a loopback server (DNS rebinding) and a foreign Origin on anything but a safe method.

    No Origin at all is fine: programs send none, browsers always send one where it matters. An Origin is ours when it
    is a loopback address or names the very host that the request names; those also get CORS headers.
    """

    def __init__(self, app: ASGIApp, *, bound_host: str) -> None:
        self.app = app
        self.is_loopback = is_loopback(bound_host)
        self.bound_host = bound_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        refusal = self._refusal(scope["method"], headers, origin)
        if refusal is not None:
            await reply_to(refusal).response(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_preflight(headers, origin))(scope, receive, send)
        elif origin is None or not self._is_ours(origin, headers):
            await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, _allowing(send, origin))

    def _refusal(self, method: str, headers: Headers, origin: str | None) -> HttpError | None:
        named = headers.get("host", "")
        if self.is_loopback and named and not self._is_local(_hostname(f"//{named}")):
            return HttpError(403, "this server answers only to its local name.", code="host_not_allowed")
        if method in SAFE_METHODS - {"OPTIONS"}:
            return None
        if origin is not None and not self._is_ours(origin, headers):
            return HttpError(403, "requests from other sites' pages are not taken.", code="origin_not_allowed")
        if origin is None and headers.get("sec-fetch-site") == "cross-site":
            return HttpError(403, "requests from other sites' pages are not taken.", code="origin_not_allowed")
        return None

    def _is_local(self, host: str | None) -> bool:
        return host is not None and (is_loopback(host) or host == self.bound_host.lower())

    @staticmethod
    def _is_ours(origin: str, headers: Headers) -> bool:
        scheme, separator, authority = origin.partition("://")
        host = _hostname(f"//{authority}")
        if scheme not in ("http", "https") or not separator or host is None or not _AUTHORITY.fullmatch(authority):
            return False
        return is_loopback(host) or authority.lower() == headers.get("host", "").lower()


class BodyLimit:
    """Refuses a body longer than ``max_bytes``: by its announced length before it is read, else as soon as it is."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "0")
        if not announced.isascii() or not announced.isdigit():
            refusal = HttpError(400, "Content-Length must be a whole number.", code="invalid_content_length")
            await reply_to(refusal).response(scope, receive, send)
            return
        if int(announced[:20]) > self.max_bytes:
            await reply_to(self._too_long()).response(scope, receive, send)
            return
        if headers.get("content-encoding", "identity").lower() != "identity":
            refusal = HttpError(415, "compressed bodies are not taken.", code="unsupported_content_encoding")
            await reply_to(refusal).response(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise self._too_long()
            return message

        await self.app(scope, counted, send)

    def _too_long(self) -> HttpError:
        return HttpError(413, f"the body is longer than {self.max_bytes} bytes.", code="body_too_large")


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name, or an address without brackets) is this machine itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(url: str) -> str | None:
    """The host in ``url`` in lower case; ``None`` where there is none or its port is no port."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        return parts.hostname
    except ValueError:
        return None


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


def _allowing(send: Send, origin: str) -> Send:
    async def send_allowing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = "x-request-id, x-diffserve-warnings, retry-after"
            headers.add_vary_header("Origin")
        await send(message)

    return send_allowing

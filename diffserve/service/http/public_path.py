"""The address at which clients see this server: a proxy in front of it may serve it below a path.

``[serve] public_url`` names that address; a trusted proxy may name it with ``X-Forwarded-Host``, ``-Proto`` and
``-Prefix``. Requests are accepted with and without the path, so it does not matter whether the proxy strips it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from diffserve.service.http.hosts import AUTHORITY, origin_of

STATE: Final = "public_address"
_PREFIX: Final = re.compile(r"(?:/[A-Za-z0-9._~\-]+)*/?")
_SCHEME: Final = re.compile(r"https?")


class PublicAddress(NamedTuple):
    """Address of this server as the client of one request used it.

    Attributes:
        origin: Scheme, host and port.
        prefix: The path, without a slash at its end; empty at the root.
        is_stated: Whether the configuration or a trusted proxy states it, not headers that any client may send.
    """

    origin: str
    prefix: str
    is_stated: bool

    @property
    def root(self) -> str:
        """The address of the page, without a slash at its end."""
        return f"{self.origin}{self.prefix}"


def public_address(scope: Scope) -> PublicAddress | None:
    """Return the address that was found for a request; None if neither the settings nor a trusted proxy name one."""
    address: PublicAddress | None = scope.get("state", {}).get(STATE)
    return address


def prefix_of(scope: Scope) -> str:
    """Return the path below which the client of a request sees this server."""
    address = public_address(scope)
    return "" if address is None else address.prefix


class PublicPath:
    """ASGI middleware that finds the public address of each request and removes its path from the request's."""

    def __init__(self, app: ASGIApp, *, public_url: str = "", trusted_proxies: Sequence[str] = ()) -> None:
        parts = urlsplit(public_url.rstrip("/"))
        self.app = app
        self._origin = origin_of(public_url)
        self._host = parts.netloc.lower()
        self._prefix = parts.path
        self._trusted = frozenset(trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store the public address in the request's state and remove the prefix from its path."""
        address = self._address(scope) if scope["type"] == "http" else None
        if address is not None:
            scope["state"][STATE] = address
            if address.prefix and scope["path"] == address.prefix and scope["method"] in ("GET", "HEAD"):
                await RedirectResponse(f"{address.prefix}/", status_code=308)(scope, receive, send)
                return
            _strip(scope, address.prefix)
        await self.app(scope, receive, send)

    def _address(self, scope: Scope) -> PublicAddress | None:
        headers = Headers(scope=scope)
        peer = scope["client"][0] if scope.get("client") else ""
        is_proxied = peer in self._trusted and any(name.startswith("x-forwarded-") for name in headers)
        if not self._origin and not is_proxied:
            return None
        host = _first(headers, "x-forwarded-host", AUTHORITY) or headers.get("host", "")
        prefix = self._prefix
        if is_proxied and (forwarded := _first(headers, "x-forwarded-prefix", _PREFIX)) is not None:
            prefix = forwarded.rstrip("/")
        if self._origin and (is_proxied or host.lower() == self._host):
            return PublicAddress(self._origin, prefix, is_stated=True)
        scheme = _first(headers, "x-forwarded-proto", _SCHEME) or scope["scheme"]
        return PublicAddress(f"{scheme}://{host}".lower(), prefix, is_stated=is_proxied)


def _first(headers: Headers, name: str, pattern: re.Pattern[str]) -> str | None:
    """Return the first value in a header, None if there is none or it does not match ``pattern``."""
    value = headers.get(name, "").partition(",")[0].strip()
    return value if value and pattern.fullmatch(value) else None


def _strip(scope: Scope, prefix: str) -> None:
    """Remove ``prefix`` from the path of a request, repeatedly: a router would remove a second one after the guards."""
    raw_prefix = prefix.encode()
    while prefix and scope["path"].startswith(f"{prefix}/") and scope["raw_path"].startswith(raw_prefix + b"/"):
        scope["path"] = scope["path"][len(prefix) :]
        scope["raw_path"] = scope["raw_path"][len(raw_prefix) :]

"""Addresses of this server and of its clients: accepted host names, the public address, names of clients.

Host names are checked as protection against DNS rebinding. ``[serve] public_url`` names the public address; a trusted
proxy may name it with ``X-Forwarded-Host``, ``-Proto`` and ``-Prefix``. Requests are accepted with and without the
path, so it does not matter whether the proxy strips it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from diffserve.client.on_behalf import HEADER, Asker, asker_in

ANY: Final = "*"
AUTHORITY: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.\-_]+)(?::[0-9]*)?")
"""A host with an optional port; userinfo (RFC 9112 4.2.4) is refused."""
HOST_NOT_ALLOWED: Final = (
    "host {host} is not allowed; use the server's IP address, or add the host to [serve] allowed_hosts of its "
    "configuration."
)


MAX_KEYS_PER_ADDRESS: Final = 8
IPV6_NETWORK_BITS: Final = 64
"""Length of the IPv6 prefix that counts as one client: a provider assigns a network of this size to a customer."""


class HostNames:
    """Accepted host names.

    Names of the loopback interface, the bound host and the host of ``public_url`` are always accepted; ``allowed``
    adds more ("*" for any). If it is empty and other machines can connect, addresses and the machine's name are
    accepted too.
    """

    def __init__(self, bound_host: str, allowed: Sequence[str] = (), *, public_url: str = "") -> None:
        self._names = {bound_host.lower(), *(name.lower() for name in allowed)}
        if public_host := urlsplit(public_url).hostname:
            self._names.add(public_host)
        self._is_any = ANY in allowed
        self._takes_addresses = not allowed and not is_loopback(bound_host)
        if self._takes_addresses:
            machine_name = socket.gethostname().lower()
            self._names |= {machine_name, f"{machine_name}.local"}

    def __contains__(self, host: str | None) -> bool:
        """Return whether ``host`` (lower case, without brackets and port; None if malformed) is accepted."""
        if host is None:
            return False
        if self._is_any or host in self._names or is_loopback(host):
            return True
        return self._takes_addresses and address_of(host) is not None


def is_loopback(host: str) -> bool:
    """Return whether ``host`` (a name or an address without brackets) is this machine."""
    address = address_of(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def hostname(authority: str) -> str | None:
    """Return the host in ``authority`` in lower case without brackets; None if it is malformed."""
    if not AUTHORITY.fullmatch(authority):
        return None
    try:
        parts = urlsplit(f"//{authority}")
        _ = parts.port
        return parts.hostname
    except ValueError:
        return None


def origin_of(url: str) -> str:
    """Return the origin of ``url`` as browsers write it (``https://paint.example.org``); empty for an empty one."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower() if url else ""


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return ``host`` as an IP address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


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


def share_of(request: Request) -> float:
    """Return the weight of the request's key relative to other keys."""
    share: float = request.scope.get("state", {}).get("key_share", 1.0)
    return share


class Clients:
    """Names of the clients that have requests in progress.

    A client is an API key, else an address and what it sends as a key. Names are digests with a salt of this process.
    At one address at most ``MAX_KEYS_PER_ADDRESS`` keys are distinguished, so invented keys only divide the address's
    share.

    Args:
        trusted_proxies: Addresses whose X-Forwarded-For header is trusted.
    """

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        self._trusted = frozenset(trusted_proxies)
        self._salt = secrets.token_bytes(16)
        self._keys: dict[str, Counter[str]] = {}

    @contextmanager
    def name_of(self, request: Request) -> Iterator[str]:
        """Yield the name of the client of ``request``; it is stable while the client has requests in progress."""
        state = request.scope.get("state", {})
        if name := state.get("client") or (f"key/{state['key_id']}" if state.get("key_id") else ""):
            yield name
            return
        asker = asker_in(request.headers.get(HEADER))
        address = self._digest(_network(self._address(request, asker)))
        key = self._digest(asker.key if asker else request.headers.get("authorization", ""))
        keys = self._keys.setdefault(address, Counter())
        if key not in keys and len(keys) >= MAX_KEYS_PER_ADDRESS:
            key = "others"
        keys[key] += 1
        try:
            yield f"{address}/{key}"
        finally:
            keys[key] -= 1
            if not keys[key]:
                del keys[key]
            if not keys and self._keys.get(address) is keys:
                del self._keys[address]

    def _address(self, request: Request, asker: Asker | None) -> str:
        """Return the nearest address that is not a trusted proxy."""
        address = request.client.host if request.client is not None else ""
        options = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
        if asker is not None:
            *options, address = (item.strip() for item in asker.addresses.split(","))
        while address in self._trusted and options and options[-1].strip():
            address = options.pop().strip()[:64]
        return address

    def _digest(self, text: str) -> str:
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8, key=self._salt).hexdigest()


def _network(address: str) -> str:
    """Return an IPv4 address unchanged and the network of an IPv6 address."""
    parsed = address_of(address)
    if not isinstance(parsed, ipaddress.IPv6Address):
        return str(parsed or address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed.packed, IPV6_NETWORK_BITS), strict=False))

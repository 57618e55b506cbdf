"""HTTPS requests of this server to other machines, only to the hosts of a list and only at public addresses.

A host name is resolved once, all its addresses must be public, and the connection goes to a resolved address. There
are no redirects and no proxies, and the length of the answer is limited.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import h11

from diffserve.service.threads import FILES
from diffserve.version import __version__

AT_ONCE: Final = 32
"""Requests of a client that run at the same time; further ones wait."""

MOST_NAMED: Final = 5
"""Number of allowed hosts that a message names."""

CHUNK_BYTES: Final = 65536
_URL: Final = re.compile(r"https://[A-Za-z0-9.\-\[\]:]{1,260}(?:[/?][!#-;=?-Z\[\]_a-z|~]{0,4000})?", re.ASCII)
_NAT64: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Target(NamedTuple):
    """Checked address: a lower-case host name, a port, and the path with its query."""

    host: str
    port: int
    path: str


class OutgoingResponse(NamedTuple):
    """Answer of another server; the header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class OutgoingError(Exception):
    """Error of a request that got no valid answer; the text continues a sentence about the other server.

    Attributes:
        is_private: Whether the host has an address that is not public, so that no connection was opened.
        is_too_large: Whether the answer is longer than allowed.
    """

    def __init__(self, message: str, *, is_private: bool = False, is_too_large: bool = False) -> None:
        super().__init__(message)
        self.is_private = is_private
        self.is_too_large = is_too_large


class OutgoingClient:
    """Sends requests to ``hosts``, each HOST or HOST:PORT, ``at_once`` of them at the same time.

    Tests replace ``resolve``, ``connect`` and ``context``.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        at_once: int = AT_ONCE,
        resolve: Callable[[str, int], Sequence[str]] | None = None,
        connect: Callable[..., Awaitable[Streams]] = asyncio.open_connection,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(host if ":" in host else f"{host}:443" for host in hosts)
        self._resolve = resolve or _resolve
        self._connect = connect
        self._context = context
        self._at_once = asyncio.Semaphore(at_once)
        self._resolvers = ThreadPoolExecutor(
            2, thread_name_prefix="resolver"
        )  # own threads, because a resolver can hang

    def __bool__(self) -> bool:
        """Return whether there are any allowed hosts."""
        return bool(self._hosts)

    @property
    def host_list(self) -> str:
        """The allowed hosts for a message, at most ``MOST_NAMED`` of them."""
        names = sorted(host.removesuffix(":443") for host in self._hosts)
        num_hidden = len(names) - MOST_NAMED
        return ", ".join(names[:MOST_NAMED]) + (f" and {num_hidden} more" if num_hidden > 0 else "")

    def target(self, url: str) -> Target | None:
        """Return the parts of ``url``; None if it is malformed, not https, or its host is not in the list."""
        try:
            parts = urlsplit(url) if _URL.fullmatch(url) else urlsplit("")
            host, port = (parts.hostname or "").lower(), parts.port or 443
        except ValueError:
            return None
        if f"{host}:{port}" not in self._hosts:
            return None
        path = parts.path or "/"
        return Target(host, port, f"{path}?{parts.query}" if parts.query else path)

    async def request(
        self,
        target: Target,
        method: str,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
        *,
        limit_s: float,
        max_bytes: int,
        on_data: Callable[[int], None] = lambda _: None,
    ) -> OutgoingResponse:
        """Send one request and return the answer.

        Args:
            target: Where to, see ``target``.
            method: GET, POST or PUT.
            headers: Further headers.
            body: The body; its length is sent in Content-Length.
            limit_s: Limit in seconds from resolving the host name to the last byte of the answer.
            max_bytes: Limit on the body of the answer.
            on_data: Called with the number of bytes of each received part of the body; it may raise.

        Raises:
            OutgoingError: There is no valid answer.
        """
        try:
            async with self._at_once, asyncio.timeout(limit_s):
                loop = asyncio.get_running_loop()
                resolved = await loop.run_in_executor(self._resolvers, self._resolve, target.host, target.port)
                address = _public(resolved)
                if self._context is None:
                    self._context = await FILES.run(ssl.create_default_context)
                reader, writer = await self._connect(
                    address, target.port, ssl=self._context, server_hostname=target.host
                )
                try:
                    connection = h11.Connection(h11.CLIENT)
                    writer.write(_request_bytes(connection, target, method, headers, body))
                    await writer.drain()
                    return await _read_response(connection, reader, max_bytes, on_data)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            raise OutgoingError(f"did not answer within {limit_s:g} s") from None
        except ssl.SSLError:
            raise OutgoingError("has no valid certificate") from None
        except h11.ProtocolError:
            has_ended = connection.trailing_data == (b"", True)
            raise OutgoingError("closed the connection" if has_ended else "did not answer in HTTP") from None
        except (OSError, asyncio.IncompleteReadError, UnicodeError):
            raise OutgoingError("cannot be reached") from None


def is_public(address: Address) -> bool:
    """Return whether ``address`` and every address that it embeds are public."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64[0]:  # NAT64: IPv4 addresses as seen from an IPv6-only network
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if (
            address in _NAT64[1]
            or address.is_site_local
            or not all(is_public(embedded) for embedded in inner if embedded is not None)
        ):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _resolve(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _public(resolved: Sequence[str]) -> str:
    """Return the first address. Raises OutgoingError unless all are public."""
    try:
        addresses = [ipaddress.ip_address(text) for text in resolved]
    except ValueError:
        addresses = []
    if not addresses or not all(map(is_public, addresses)):
        raise OutgoingError("is not on the public internet", is_private=True)
    return str(addresses[0])


def _request_bytes(
    connection: h11.Connection, target: Target, method: str, headers: Sequence[tuple[str, str]], body: bytes
) -> bytes:
    host = target.host if target.port == 443 else f"{target.host}:{target.port}"
    fields = [("Host", host), ("User-Agent", f"diffserve/{__version__}"), ("Connection", "close")]
    fields += [("Accept-Encoding", "identity"), *headers]
    fields += [("Content-Length", str(len(body)))] if method != "GET" else []
    request = connection.send(h11.Request(method=method, target=target.path, headers=fields)) or b""
    return request + (connection.send(h11.Data(data=body)) or b"") + (connection.send(h11.EndOfMessage()) or b"")


async def _read_response(
    connection: h11.Connection, reader: asyncio.StreamReader, max_bytes: int, on_data: Callable[[int], None]
) -> OutgoingResponse:
    response, body = OutgoingResponse(0, {}, b""), bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(CHUNK_BYTES))
        elif isinstance(event, h11.Response):
            fields = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in event.headers}
            response = OutgoingResponse(event.status_code, fields, b"")
            length = fields.get("content-length", "0")
            _check_length(int(length) if length.isdecimal() else 0, max_bytes)
        elif isinstance(event, h11.Data):
            on_data(len(event.data))
            body += event.data
            _check_length(len(body), max_bytes)
        elif isinstance(event, h11.EndOfMessage):
            return response._replace(body=bytes(body))
        elif isinstance(event, h11.ConnectionClosed):
            raise OutgoingError("closed the connection")


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise OutgoingError(f"sent more than {max_bytes} bytes", is_too_large=True)

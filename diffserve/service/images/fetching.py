"""Downloads images that a request names by URL, only by https and only from the configured hosts (default: none).

A host name is resolved once, all its addresses must be public, and the connection goes to a resolved address. There
are no redirects and no proxies, and the size is limited. The content type of the server is ignored.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import h11
from pydantic import BaseModel

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import show
from diffserve.service.images.inputs import is_address
from diffserve.service.threads import ANSWERS, FILES
from diffserve.version import __version__

MAX_FETCHED_BYTES: Final = 10 << 20
MAX_REQUEST_BYTES: Final = 20 << 20
"""Limit on the bytes that are downloaded for one request."""

FETCH_S: Final = 5.0
"""Limit on one download, from resolving the host name to the last byte."""

MAX_FETCHES: Final = 16
"""Limit on the downloads of one request."""

AT_ONCE: Final = 8
MOST_NAMED: Final = 5
"""Number of allowed hosts that the message about a refused host names."""

PICTURE_KEYS: Final = frozenset({"image", "images", "mask", "image_url", "init_images", "input_image"})
"""JSON fields that hold images; no other field of a body is treated as a URL."""

PLAIN: Final = (bool, int, float)
_URL: Final = re.compile(r"https://[A-Za-z0-9.\-\[\]:]{1,260}(?:[/?][!#-;=?-Z\[\]_a-z|~$&']{0,2000})?", re.ASCII)
_NAT64: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _UrlPosition(NamedTuple):
    """Position of an image URL in a body: ``holder[key]``, or an attribute of a model.

    Attributes:
        holder: The list, dict or model that contains the URL.
        key: The index, key or attribute name in ``holder``.
        name: The name of the field in error messages.
        url: The URL.
    """

    holder: Any
    key: Any
    name: str
    url: str

    def fill(self, text: str) -> None:
        """Replace the URL by ``text``."""
        if isinstance(self.holder, BaseModel):
            setattr(self.holder, self.key, text)
        else:
            self.holder[self.key] = text


class _Budget:
    """Bytes that may still be downloaded for one request."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes


class Fetcher:
    """Downloads images from ``hosts``, each HOST or HOST:PORT; tests replace ``resolve``, ``connect``, ``context``."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        resolve: Callable[[str, int], Sequence[str]] | None = None,
        connect: Callable[..., Awaitable[Streams]] = asyncio.open_connection,
        context: ssl.SSLContext | None = None,
        limit_s: float = FETCH_S,
    ) -> None:
        self._hosts = frozenset(host if ":" in host else f"{host}:443" for host in hosts)
        self._resolve = resolve or _resolve
        self._connect = connect
        self._context = context
        self._limit_s = limit_s
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._resolvers = ThreadPoolExecutor(
            2, thread_name_prefix="resolver"
        )  # own threads, because a resolver can hang

    async def fill(self, *bodies: BaseModel) -> None:
        """Replace every image URL in ``bodies`` by a data URL of the image. Raises InvalidRequest."""
        places = [place for body in bodies for place in _url_positions(body, "", is_picture=False)]
        if len(places) > MAX_FETCHES:
            message = f"{len(places)} images are given as URLs; at most {MAX_FETCHES} are allowed."
            raise InvalidRequest(message, param=places[0].name, code="url_not_allowed")
        targets = [self._target(place.url, place.name) for place in places]
        budget = _Budget(MAX_REQUEST_BYTES)
        files = await asyncio.gather(*(self._fetch(*target, budget) for target in targets))
        for place, file in zip(places, files, strict=True):
            place.fill(f"data:;base64,{await ANSWERS.run(_base64, file)}")

    async def fetch(self, url: str, name: str = "image") -> bytes:
        """Return the file at ``url``. Raises InvalidRequest, which names the parameter ``name``."""
        return await self._fetch(*self._target(url, name), _Budget(MAX_FETCHED_BYTES))

    def _target(self, url: str, name: str) -> tuple[str, int, str, str]:
        """Return the host, port and path of an allowed URL, and ``name``. Raises InvalidRequest."""
        message = (
            f"{name} is a URL, and this server does not fetch images; send the image as a data URL "
            "(data:image/png;base64,...) or upload it."
        )
        check(bool(self._hosts), message, name, "url_not_allowed")
        try:
            parts = urlsplit(url) if _URL.fullmatch(url) else urlsplit("")
            host, port = (parts.hostname or "").lower(), parts.port or 443
        except ValueError:
            parts, host, port = urlsplit(""), "", 443
        if f"{host}:{port}" not in self._hosts:
            names, num_hidden = (
                sorted(allowed_host.removesuffix(":443") for allowed_host in self._hosts),
                len(self._hosts) - MOST_NAMED,
            )
            hosts = ", ".join(names[:MOST_NAMED]) + (f" and {num_hidden} more" if num_hidden > 0 else "")
            message = f"{name} is {show(url)}; images are only fetched by https from {hosts}."
            raise InvalidRequest(message, param=name, code="url_not_allowed")
        path = parts.path or "/"
        return host, port, f"{path}?{parts.query}" if parts.query else path, name

    async def _fetch(self, host: str, port: int, path: str, name: str, budget: _Budget) -> bytes:
        try:
            async with self._at_once, asyncio.timeout(self._limit_s):
                loop = asyncio.get_running_loop()
                resolved = await loop.run_in_executor(self._resolvers, self._resolve, host, port)
                address = _public(resolved, name)
                if self._context is None:
                    self._context = await FILES.run(ssl.create_default_context)
                reader, writer = await self._connect(address, port, ssl=self._context, server_hostname=host)
                try:
                    return await _get(reader, writer, host if port == 443 else f"{host}:{port}", path, name, budget)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            raise _unreadable_error(name, f"did not answer within {self._limit_s:g} s") from None
        except ssl.SSLError:
            raise _unreadable_error(name, "has no valid certificate") from None
        except (OSError, asyncio.IncompleteReadError, UnicodeError):
            raise _unreadable_error(name, "cannot be reached") from None


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


def _public(resolved: Sequence[str], name: str) -> str:
    """Return the first address. Raises InvalidRequest unless all are public."""
    try:
        addresses = [ipaddress.ip_address(text) for text in resolved]
    except ValueError:
        addresses = []
    message = f"the host of {name} is not on the public internet; send the image itself."
    check(bool(addresses) and all(map(is_public, addresses)), message, name, "url_not_allowed")
    return str(addresses[0])


async def _get(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, path: str, name: str, budget: _Budget
) -> bytes:
    """Return the body of the answer to GET ``path``. Raises InvalidRequest."""
    connection = h11.Connection(h11.CLIENT)
    headers = [
        ("Host", host), ("Accept", "image/png, image/jpeg, image/webp"), ("Accept-Encoding", "identity"),
        ("User-Agent", f"diffserve/{__version__}"), ("Connection", "close"),
    ]  # fmt: skip
    request_bytes = connection.send(h11.Request(method="GET", target=path, headers=headers))
    writer.write((request_bytes or b"") + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    body = bytearray()
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            raise _unreadable_error(name, "did not answer in HTTP") from None
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Response):
            _check_head(event, name)
        elif isinstance(event, h11.Data):
            body += event.data
            budget.left_bytes -= len(event.data)
            if len(body) > MAX_FETCHED_BYTES or budget.left_bytes < 0:
                raise _too_large_error(name)
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif isinstance(event, h11.ConnectionClosed):
            raise _unreadable_error(name, "closed the connection")


def _check_head(response: h11.Response, name: str) -> None:
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in response.headers}
    message = f"{name} is a URL that redirects; redirects are not followed, give the final URL."
    check(not 300 <= response.status_code < 400, message, name, "url_not_allowed")
    if response.status_code != 200:
        raise _unreadable_error(name, f"answered {response.status_code}")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise _unreadable_error(name, "sent a compressed body")
    with contextlib.suppress(ValueError):
        if int(headers.get("content-length", "0")) > MAX_FETCHED_BYTES:
            raise _too_large_error(name)


def _url_positions(value: Any, path: str, *, is_picture: bool) -> Iterator[_UrlPosition]:
    """Yield the positions of image URLs in ``value``; with ``is_picture`` the strings of a list are images, too."""
    entries: list[tuple[str | int, Any]]
    if isinstance(value, BaseModel):
        fields, values = type(value).model_fields, value.__dict__
        entries = [(name, child) for name, child in values.items() if name in fields]
    elif isinstance(value, dict):
        entries = [*value.items()]
    elif isinstance(value, list):
        entries = [*enumerate(value)]
    else:
        return
    for key, child in entries:
        if child is None or isinstance(child, PLAIN):
            continue
        is_place = is_picture if isinstance(key, int) else key in PICTURE_KEYS
        if isinstance(child, str):
            if is_place and is_address(child):
                yield _UrlPosition(value, key, _child_name(path, key), child)
        else:
            name = _child_name(path, key)
            yield from _url_positions(child, name, is_picture=is_place)


def _child_name(path: str, key: str | int) -> str:
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else key


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode("ascii")


def _unreadable_error(name: str, why: str) -> InvalidRequest:
    message = f"{name} cannot be fetched: its server {why}; send the image itself."
    return InvalidRequest(message, param=name, code="url_unreadable")


def _too_large_error(name: str) -> InvalidRequest:
    message = (
        f"{name} is too large; at most {MAX_FETCHED_BYTES} bytes are allowed per image, {MAX_REQUEST_BYTES} per "
        "request."
    )
    return InvalidRequest(message, param=name, code="image_too_large")

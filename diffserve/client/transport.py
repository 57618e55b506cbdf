"""HTTP connection of the clients: settings, requests, multipart forms, and streams of server-sent events."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from diffserve.api.errors import ConfigError, DiffserveError, InvalidRequest
from diffserve.client import on_behalf
from diffserve.client.errors import ErrorObject, ServerLost, error_of, error_of_answer, raise_for_transport, unexpected

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 660.0
"""Slightly longer than the request timeout of the server."""

CONNECT_S: Final = 5.0
SILENCE_S: Final = 60.0
"""Read timeout of streams; the server sends keep-alive comments more often than this."""

KEEP_ALIVE_S: Final = 2.0  # the server closes idle connections after 5 s
JSON: Final = {"Content-Type": "application/json"}
KEY_VARIABLE: Final = "DIFFSERVE_API_KEY"
MAX_FIELD_BYTES: Final = 1 << 17
"""Longest value of a form field; the limit of servers is slightly higher."""

DONE: Final = b"[DONE]"
_HEAD: Final = "Content-Disposition: form-data; name="

AnswerT = TypeVar("AnswerT")
EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)


class EventParser:
    """Incremental parser of server-sent events; it ignores comments and fields other than ``data``."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of every event that ``chunk`` completes."""
        if b"\n" not in chunk:  # an image is one long line: join its pieces only once
            self._pending.append(chunk)
            return
        *lines, incomplete_line = b"".join([*self._pending, chunk]).split(b"\n")
        self._pending = [incomplete_line]
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []


class Reader(Protocol[EventT_co]):
    """Decoder of the events of one endpoint, which knows when the stream is complete."""

    @property
    def is_complete(self) -> bool:
        """Whether the stream may end here without missing events."""

    def read(self, data: bytes) -> Iterator[EventT_co]:
        """Yield the typed events in ``data``; unknown events are ignored.

        Raises:
            DiffserveError: The event reports an error.
        """


class _Head(msgspec.Struct, frozen=True):
    type: str = ""
    error: ErrorObject | None = None


class TypedReader(Generic[EventT]):
    """Decoder for events with a ``type`` field.

    Args:
        types: The class of each event type.
        last: Event types that end one part of the answer.
        num_last: Number of events with a type of ``last`` that complete the stream.
    """

    def __init__(self, types: dict[str, type[EventT]], last: frozenset[str], num_last: int) -> None:
        self._types = types
        self._last = last
        self._num_missing = num_last

    @property
    def is_complete(self) -> bool:
        """Whether the stream may end here without missing events."""
        return self._num_missing <= 0

    def read(self, data: bytes) -> Iterator[EventT]:
        """Yield the event in ``data``; events with an unknown type are ignored.

        Raises:
            DiffserveError: The event reports an error.
        """
        if data == DONE:
            return
        head = msgspec.json.decode(data, type=_Head)
        if head.error is not None:
            raise error_of(head.error)
        self._num_missing -= head.type in self._last
        if head.type in self._types:
            yield msgspec.json.decode(data, type=self._types[head.type])


class AsyncStream(Generic[EventT]):
    """Events of a request in order of arrival; an asynchronous iterable that can be used once.

    Entering its ``async with`` block sends the request. Leaving the block, or ``close``, cancels it.

    Attributes:
        request_id: The ID for ``AsyncClient.cancel`` and ``AsyncClient.interrupt``; empty until the block is entered.

    Raises:
        ServerLost: While iterating: the connection ended before the last event.
        DiffserveError: On entry or while iterating: the server reported an error; its class depends on the error code.
    """

    def __init__(self, http: httpx.AsyncClient, request: httpx.Request, reader: Reader[EventT], url: str) -> None:
        self.request_id = ""
        self._http = http
        self._request = request
        self._reader = reader
        self._url = url
        self._response: httpx.Response | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        try:
            response = self._response = await self._http.send(self._request, stream=True)
            if not response.is_success:
                await response.aread()
                raise error_of_answer(self._url, response)
        except httpx.HTTPError as error:
            raise_for_transport(self._url, error)
        self.request_id = response.headers.get("x-request-id", "")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[EventT]:
        if self._response is None:
            raise RuntimeError("enter the stream's async with block before iterating over it.")
        if self._response.status_code == httpx.codes.NO_CONTENT:  # all events were received before
            return
        parser = EventParser()
        try:
            async for chunk in self._response.aiter_bytes():
                for data in parser.feed(chunk):
                    for event in self._reader.read(data):
                        if not self._is_closed:
                            yield event
        except (httpx.HTTPError, httpx.StreamError) as error:
            if not self._is_closed:
                raise_for_transport(self._url, error)
        except msgspec.MsgspecError as error:
            raise unexpected(self._url) from error
        if not self._reader.is_complete and not self._is_closed:
            raise ServerLost(f"the answer from {self._url} ended too early; is the server still running?")

    async def close(self) -> None:
        """Close the connection and end the iteration; the server cancels the request at its next step."""
        self._is_closed = True
        if self._response is not None:
            await self._response.aclose()


class HttpClient:
    """Base class of the asynchronous client: connections, requests and the decoding of answers."""

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = TIMEOUT_S, api_key: str | None = None) -> None:
        self.url = base_url(url)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(**settings(self.url, timeout_s, api_key))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _fetch(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = JSON
    ) -> bytes:
        """Send a request and return the body of its answer; ``headers`` belong to ``body``.

        Raises:
            DiffserveError: The server reported an error, or the connection failed.
        """
        sent_headers = on_behalf.headers() | (dict(headers) if body else {})
        try:
            response = await self._http.request(method, path, content=body, headers=sent_headers)
        except httpx.HTTPError as error:
            raise_for_transport(self.url, error)
        if not response.is_success:
            raise error_of_answer(self.url, response)
        return response.content

    async def _call(
        self, method: str, path: str, kind: type[AnswerT], body: Any = None, headers: Mapping[str, str] = JSON
    ) -> AnswerT:
        """Send ``body``, bytes or an object for JSON, and decode the answer as ``kind``.

        Raises:
            InvalidRequest: A number in ``body`` is not finite.
            DiffserveError: As ``_fetch``, or the answer cannot be decoded.
        """
        content = body if isinstance(body, bytes | None) else encode_json(body)
        data = await self._fetch(method, path, content, headers)
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise unexpected(self.url) from error

    async def _succeeds(self, method: str, path: str, failure_code: str) -> bool:
        """Send a request without a body; return False if the server reports the error ``failure_code``.

        Raises:
            DiffserveError: The server reported another error, or the connection failed.
        """
        try:
            await self._fetch(method, path)
        except DiffserveError as error:
            if error.code != failure_code:
                raise
            return False
        return True

    def _stream(
        self, path: str, body: Any, reader: Reader[EventT], headers: Mapping[str, str] = JSON
    ) -> AsyncStream[EventT]:
        """Return the stream of a POST request with ``body``, bytes or an object for JSON.

        Raises:
            InvalidRequest: A number in ``body`` is not finite.
        """
        content = body if isinstance(body, bytes) else encode_json(body)
        return self._open("POST", path, content, reader, dict(headers))

    def _events(
        self, path: str, reader: Reader[EventT], headers: Mapping[str, str] | None = None
    ) -> AsyncStream[EventT]:
        """Return the stream of a GET request."""
        return self._open("GET", path, None, reader, dict(headers or {}))

    def _open(
        self, method: str, path: str, content: bytes | None, reader: Reader[EventT], headers: dict[str, str]
    ) -> AsyncStream[EventT]:
        timeout = httpx.Timeout(min(self._timeout_s, SILENCE_S), connect=CONNECT_S)
        all_headers = on_behalf.headers() | headers
        request = self._http.build_request(method, path, content=content, headers=all_headers, timeout=timeout)
        return AsyncStream(self._http, request, reader, self.url)


def resource(path: str, *parts: str) -> str:
    """Return ``path`` extended by ``parts``, each of them quoted.

    Raises:
        InvalidRequest: A part is empty.
    """
    if not all(parts):
        raise InvalidRequest(f"the ID for {path} is empty; give an ID.", param="id")
    return "/".join([path, *(quote(part, safe="") for part in parts)])


def settings(url: str, timeout_s: float, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of an httpx client. Proxy settings are ignored for a server on this machine."""
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    return {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "base_url": url,
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S),
        "limits": httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        "trust_env": not _is_here(urlsplit(url).hostname or ""),
    }


def base_url(url: str) -> str:
    """Return the server address ``url`` without ``/v1``.

    Raises:
        ConfigError: ``url`` is not an HTTP address.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"url must be an address such as http://127.0.0.1:8000, got {url[:200]!r}.", param="url")
    return url.rstrip("/").removesuffix("/v1")


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Upload(NamedTuple):
    """File of a form with its name."""

    data: bytes
    filename: str


def form_of(fields: Mapping[str, str], files: Mapping[str, Upload]) -> tuple[bytes, dict[str, str]]:
    """Return the body of a multipart form and its headers."""
    boundary = secrets.token_hex(16)
    pieces: list[bytes] = []
    for name, text in fields.items():
        pieces.append(f"--{boundary}\r\n{_HEAD}{_quoted(name)}\r\n\r\n{text}\r\n".encode())
    for name, file in files.items():
        head = f"{_HEAD}{_quoted(name)}; filename={_quoted(file.filename)}\r\nContent-Type: application/octet-stream"
        pieces += [f"--{boundary}\r\n{head}\r\n\r\n".encode(), file.data, b"\r\n"]
    body = b"".join([*pieces, f"--{boundary}--\r\n".encode()])
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def encode_json(body: Any) -> bytes:
    """Encode ``body`` as JSON.

    Raises:
        InvalidRequest: A number is not finite. JSON has no such numbers; msgspec would write null.
    """
    _check_finite(body)
    return msgspec.json.encode(body)


def _check_finite(value: Any, name: str = "") -> None:
    """Raise InvalidRequest if ``value`` has a number that is not finite; ``name`` is its path in the request."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{name or 'the value'} must be a finite number, got {value}.", param=name or None)
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_finite(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_finite(item, f"{name}[{index}]")


def texts_of(fields: Mapping[str, Any]) -> dict[str, str] | None:
    """Convert the fields of a JSON object to form fields.

    Returns:
        The text of each field, or None if a form cannot represent a value: an empty string, a string that looks like
        JSON, or a value longer than ``MAX_FIELD_BYTES``.

    Raises:
        InvalidRequest: A number is not finite.
    """
    _check_finite(fields)
    texts: dict[str, str] = {}
    for name, value in fields.items():
        if value is None:
            continue
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        is_ambiguous = isinstance(value, str) and (not value or value.lstrip()[:1] in ("{", "["))
        if is_ambiguous or len(text.encode("utf-8", "surrogatepass")) > MAX_FIELD_BYTES:
            return None
        texts[name] = text
    return texts


def _quoted(name: str) -> str:
    safe = re.sub(r'[\x00-\x1f\x7f"\\]', "_", name)
    return f'"{safe}"'

"""Downloads images that a request names by URL, only by https and only from the configured hosts (default: none).

The size is limited, and the content type of the server is ignored.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import show
from diffserve.service.http.outgoing import OutgoingClient, OutgoingError, Target
from diffserve.service.images.inputs import is_address
from diffserve.service.threads import ANSWERS

MAX_FETCHED_BYTES: Final = 10 << 20
MAX_REQUEST_BYTES: Final = 20 << 20
"""Limit on the bytes that are downloaded for one request."""

FETCH_S: Final = 5.0
"""Limit on one download, from resolving the host name to the last byte."""

MAX_FETCHES: Final = 16
"""Limit on the downloads of one request."""

PICTURE_KEYS: Final = frozenset({"image", "images", "mask", "image_url", "init_images", "input_image"})
"""JSON fields that hold images; no other field of a body is treated as a URL."""

PLAIN: Final = (bool, int, float)
ACCEPT: Final = (("Accept", "image/png, image/jpeg, image/webp"),)


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
        self._left_bytes = left_bytes

    def spend(self, num_bytes: int) -> None:
        """Subtract ``num_bytes``. Raises OutgoingError if that is more than is left."""
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise OutgoingError("sent too much", is_too_large=True)


class Fetcher:
    """Downloads images by ``client``, each within ``limit_s`` seconds."""

    def __init__(self, client: OutgoingClient, *, limit_s: float = FETCH_S) -> None:
        self._client = client
        self._limit_s = limit_s

    async def fill(self, *bodies: BaseModel) -> None:
        """Replace every image URL in ``bodies`` by a data URL of the image. Raises InvalidRequest."""
        places = [place for body in bodies for place in _url_positions(body, "", is_picture=False)]
        if len(places) > MAX_FETCHES:
            message = f"{len(places)} images are given as URLs; at most {MAX_FETCHES} are allowed."
            raise InvalidRequest(message, param=places[0].name, code="url_not_allowed")
        targets = [(self._target(place.url, place.name), place.name) for place in places]
        budget = _Budget(MAX_REQUEST_BYTES)
        files = await asyncio.gather(*(self._fetch(*target, budget) for target in targets))
        for place, file in zip(places, files, strict=True):
            place.fill(f"data:;base64,{await ANSWERS.run(_base64, file)}")

    async def fetch(self, url: str, name: str = "image") -> bytes:
        """Return the file at ``url``. Raises InvalidRequest, which names the parameter ``name``."""
        return await self._fetch(self._target(url, name), name, _Budget(MAX_FETCHED_BYTES))

    def _target(self, url: str, name: str) -> Target:
        """Return the address in an allowed URL. Raises InvalidRequest."""
        message = (
            f"{name} is a URL, and this server does not fetch images; send the image as a data URL "
            "(data:image/png;base64,...) or upload it."
        )
        check(bool(self._client), message, name, "url_not_allowed")
        target = self._client.target(url)
        message = f"{name} is {show(url)}; images are only fetched by https from {self._client.host_list}."
        check(target is not None, message, name, "url_not_allowed")
        assert target is not None
        return target

    async def _fetch(self, target: Target, name: str, budget: _Budget) -> bytes:
        limits: Any = {"limit_s": self._limit_s, "max_bytes": MAX_FETCHED_BYTES, "on_data": budget.spend}
        try:
            response = await self._client.request(target, "GET", ACCEPT, **limits)
        except OutgoingError as error:
            message = f"the host of {name} is not on the public internet; send the image itself."
            check(not error.is_private, message, name, "url_not_allowed")
            raise _too_large_error(name) if error.is_too_large else _unreadable_error(name, str(error)) from None
        message = f"{name} is a URL that redirects; redirects are not followed, give the final URL."
        check(not 300 <= response.status < 400, message, name, "url_not_allowed")
        if response.status != 200:
            raise _unreadable_error(name, f"answered {response.status}")
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise _unreadable_error(name, "sent a compressed body")
        return response.body


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

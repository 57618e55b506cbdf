"""Images that a request references by ``file_id``, resolved before the request is checked."""

from __future__ import annotations

import base64
from typing import Final, Protocol, cast

from pydantic import BaseModel
from starlette.requests import Request

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import show
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import ANSWERS, FILES
from diffserve.store.files import Files

MAX_PICTURE_BYTES: Final = 10 << 20
MAX_REQUEST_BYTES: Final = 20 << 20
"""Limit on the total size of the files that one request names."""


class Reference(Protocol):
    """Image within a body: a URL or a file ID."""

    image_url: str | None
    file_id: str | None


class FilePictures:
    """Resolves file IDs; ``files`` is None if the server stores no files."""

    def __init__(self, files: Files | None, owners: Owners | None) -> None:
        self._files = files
        self._owners = owners

    async def fill(self, request: Request, *bodies: BaseModel) -> None:
        """Replace each ``file_id`` in ``bodies`` by a data URL in ``image_url``. Raises InvalidRequest."""
        left_bytes = MAX_REQUEST_BYTES
        for holder, name in [place for body in bodies for place in _find_references(body, "")]:
            data = await FILES.run(self._read, request, holder, name, left_bytes)
            left_bytes -= len(data)
            holder.image_url = f"data:;base64,{await ANSWERS.run(_base64, data)}"
            holder.file_id = None

    def _read(self, request: Request, holder: Reference, name: str, left_bytes: int) -> bytes:
        file_id = str(holder.file_id)
        if holder.image_url is not None:
            message = f"{name} is given beside image_url; give one of them."
            raise InvalidRequest(message, param=name, code="invalid_image")
        if self._files is None or self._owners is None:
            message = f"{name} is given, and this server keeps no files; send the picture as a data URL in image_url."
            raise InvalidRequest(message, param=name, code="file_not_found")
        file = self._files.get(self._owners.of(request), file_id)
        if file is None:
            raise _no_file(file_id, name)
        if file.num_bytes > min(MAX_PICTURE_BYTES, left_bytes):
            message = (
                f"{name} is a file of {file.num_bytes} bytes; at most {MAX_PICTURE_BYTES} are read of a picture, "
                f"{MAX_REQUEST_BYTES} for a request."
            )
            raise InvalidRequest(message, param=name, code="image_too_large")
        try:
            with self._files.open(file) as opened:
                return opened.read()
        except FileNotFoundError:
            raise _no_file(file_id, name) from None


def _find_references(value: object, path: str) -> list[tuple[Reference, str]]:
    """Return the models in ``value`` with a file ID, and the field's name for errors."""
    references: list[tuple[Reference, str]] = []
    if isinstance(value, BaseModel):
        fields, values = type(value).model_fields, value.__dict__
        if values.get("file_id") and "file_id" in fields:
            references.append((cast(Reference, value), f"{path}.file_id"))
        for name, item in values.items():
            if isinstance(item, (BaseModel, list)) and name in fields:
                references += _find_references(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            references += _find_references(item, f"{path}[{place}]")
    return references


def _no_file(file_id: str, name: str) -> InvalidRequest:
    message = f"{name} is {show(file_id)}, and there is no such file of yours; upload it to /v1/files first."
    return InvalidRequest(message, param=name, code="file_not_found")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")

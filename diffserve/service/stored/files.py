"""``/v1/files``: uploaded files, mainly for batches, and images that requests reference by ``file_id``."""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar, cast

from fastapi import FastAPI, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.media.client_slots import ClientSlots
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError
from diffserve.service.http.forms import MEDIA_TYPE, is_form, open_form
from diffserve.service.http.middleware import FILE_BYTES
from diffserve.service.http.routing import After, Order, error_responses
from diffserve.service.http.streams import send_file
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import ANSWERS, FILES, LISTINGS
from diffserve.store.batches import Batches
from diffserve.store.database import PageSelection
from diffserve.store.files import KEPT_S, MAX_FILES, File, Files

PURPOSES: Final = ("batch", "user_data", "vision", "assistants", "evals", "fine-tune")
"""Purposes that clients may give; only batch has an effect."""

ListedPurpose = Literal["", "batch", "user_data", "vision", "assistants", "evals", "fine-tune", "batch_output"]

SHORTEST_S: Final = 3600
MAX_NAME_CHARS: Final = 255
MAX_UPLOADS: Final = 4
"""Uploads that are copied to their place at a time, one of each client."""

MAX_PICTURE_BYTES: Final = 10 << 20
MAX_REQUEST_BYTES: Final = 20 << 20
"""Limit on the total size of the files that one request names."""

UPLOAD: Final = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": SHORTEST_S, "maximum": int(KEPT_S)},
    },
}

T = TypeVar("T")


class FileRoutes:
    """Routes of ``files``; ``batches`` knows which of them are in use."""

    def __init__(self, app: FastAPI, files: Files, batches: Batches, owners: Owners) -> None:
        self._files = files
        self._batches = batches
        self._owners = owners
        self._uploads = ClientSlots(MAX_UPLOADS)
        body = {"requestBody": {"required": True, "content": {MEDIA_TYPE: {"schema": UPLOAD}}}}
        app.post("/v1/files", summary="Upload a file", openapi_extra=body, responses=error_responses(507))(self.upload)
        app.get("/v1/files", summary="List files")(self.list_files)
        app.get("/v1/files/{file_id}", summary="Describe a file")(self.retrieve)
        content: dict[str, Any] = {"content": {"application/octet-stream": {}}, "description": "The file."}
        app.get(
            "/v1/files/{file_id}/content", summary="Download a file", responses={200: content}, response_class=Response
        )(self.content)
        app.delete("/v1/files/{file_id}", summary="Delete a file", responses=error_responses(409))(self.delete)

    async def upload(self, request: Request) -> Response:
        """Store an uploaded file. Its name is only shown to clients."""
        owner = self._owners.of(request)
        if not is_form(request):
            raise HttpError(415, f"upload the file as a form ({MEDIA_TYPE}).", code="unsupported_media_type")
        async with open_form(request, max_files=1) as form:
            purpose, uploads = form.fields.get("purpose"), form.files.get("file")
            if not isinstance(purpose, str) or purpose not in PURPOSES:
                message = "is missing" if purpose is None else f"is {show(purpose)}"
                raise InvalidRequest(f"purpose {message}; give one of {', '.join(PURPOSES)}.", param="purpose")
            if not uploads:
                message = "file is missing; upload it as the form field file."
                raise InvalidRequest(message, param="file", code="missing_required_parameter")
            kept_s = _kept_s(form.fields.get("expires_after[seconds]"))
            name = shown_name(uploads[0].filename or "")
            source = uploads[0].file
            async with self._uploads.taken(owner):
                file = await FILES.run(
                    self._files.add, owner, purpose, name, source, max_bytes=FILE_BYTES, kept_s=kept_s
                )
        return JSONResponse(file_object(file))

    async def list_files(
        self,
        request: Request,
        purpose: Annotated[ListedPurpose, Query(description="Only files with this purpose.")] = "",
        after: After = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = MAX_FILES,
        order: Order = "desc",
    ) -> Response:
        """List the files of the key, page by page."""
        selection = PageSelection(limit, after, order)
        page = await LISTINGS.run(self._files.page, self._owners.of(request), selection, purpose)
        return list_response(page, file_object)

    async def retrieve(self, request: Request, file_id: str) -> Response:
        """Describe a file."""
        return JSONResponse(file_object(await self._file_of(request, file_id)))

    async def content(self, request: Request, file_id: str) -> Response:
        """Return a file's bytes with a media type that no browser renders."""
        file = await self._file_of(request, file_id)
        try:
            opened = await FILES.run(self._files.open, file)
        except FileNotFoundError:
            raise no_file(file_id) from None
        disposition = {"Content-Disposition": f'attachment; filename="{file.id}"', "Cache-Control": "private"}
        return send_file(opened, file.num_bytes, "application/octet-stream", disposition)

    async def delete(self, request: Request, file_id: str) -> Response:
        """Delete a file unless a batch uses it."""
        file = await self._file_of(request, file_id)
        if file.id in await LISTINGS.run(self._batches.files_in_use):
            raise HttpError(409, f"{file.id} is the input of a batch; cancel that first.", code="file_in_use")
        await LISTINGS.run(self._files.delete, file)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def _file_of(self, request: Request, name: str) -> File:
        file = await LISTINGS.run(self._files.get, self._owners.of(request), name)
        if file is None:
            raise no_file(name)
        return file


def file_object(file: File) -> dict[str, Any]:
    """Return OpenAI's object for ``file``."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_s),
        "expires_at": int(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def list_response(page: tuple[list[T], bool] | None, describe: Callable[[T], dict[str, Any]]) -> Response:
    """Return a page in OpenAI's list format.

    Args:
        page: The entries, and whether more follow; None: the entry ``after`` does not exist.
        describe: Returns the API's object for an entry.
    """
    if page is None:
        raise InvalidRequest("after is not the id of an entry; give the id of an entry that was listed.", param="after")
    entries, has_more = page
    data = [describe(entry) for entry in entries]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": data, **ends, "has_more": has_more})


def no_file(name: str) -> HttpError:
    """Return the same error for a missing, an expired and another key's file."""
    return HttpError(404, f"you have no file {show(name)}.", code="file_not_found")


def shown_name(name: str) -> str:
    """Return the last part of a client's file name without unprintable characters."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(c for c in last if unicodedata.category(c)[0] != "C")[:MAX_NAME_CHARS] or "file"


def _kept_s(text: Any) -> float:
    if text in (None, ""):
        return KEPT_S
    if not (isinstance(text, str) and text.isascii() and text.isdigit() and SHORTEST_S <= int(text[:12]) <= KEPT_S):
        message = (
            f"expires_after[seconds] is {show(text)}; it must be a whole number from {SHORTEST_S} to {KEPT_S:.0f}."
        )
        raise InvalidRequest(message, param="expires_after[seconds]")
    return float(text)


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
            message = f"{name} and image_url are both given; give one of them."
            raise InvalidRequest(message, param=name, code="invalid_image")
        if self._files is None or self._owners is None:
            message = f"{name} is given, but this server stores no files; send the image as a data URL in image_url."
            raise InvalidRequest(message, param=name, code="file_not_found")
        file = self._files.get(self._owners.of(request), file_id)
        if file is None:
            raise _no_file(file_id, name)
        if file.num_bytes > min(MAX_PICTURE_BYTES, left_bytes):
            message = (
                f"{name} is a file of {file.num_bytes} bytes; at most {MAX_PICTURE_BYTES} are allowed per image, "
                f"{MAX_REQUEST_BYTES} per request."
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
    message = f"{name} is {show(file_id)}, which is not one of your files; upload it to /v1/files first."
    return InvalidRequest(message, param=name, code="file_not_found")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")

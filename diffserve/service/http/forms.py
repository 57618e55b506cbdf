"""Forms (multipart/form-data): bounded fields and files; fields are parsed as in a JSON body."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import Body, BodyT, parse, show_name
from diffserve.service.http.errors import HttpError
from diffserve.service.lifecycle import hung_up
from diffserve.service.threads import FILES

MEDIA_TYPE: Final = "multipart/form-data"
MAX_FIELDS: Final = 100
MAX_FIELD_BYTES: Final = 1 << 18


FileT = TypeVar("FileT")


class Form(NamedTuple, Generic[FileT]):
    """Fields by name (lists for names that end in []) and uploaded files by name without brackets."""

    fields: dict[str, str | list[str]]
    files: dict[str, list[FileT]]


def is_form(request: Request) -> bool:
    """Return whether the body is declared as a multipart form."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == MEDIA_TYPE


async def complete_body(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body of a form.

    Raises:
        HttpError: The closing boundary is missing. The parser would ignore the truncated last part, and an edit would
            lose its mask.
    """
    _, options = parse_options_header(request.headers.get("content-type"))
    closing, latest = b"--%b--" % options.get(b"boundary", b""), b""
    is_closed = b"boundary" not in options  # without a boundary the parser reports the error
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            latest += chunk
            is_closed = is_closed or closing in latest
            latest = latest[-len(closing) + 1 :]
            yield chunk
    if not is_closed:
        message = "the form ends before its closing boundary, so its last part is incomplete; send it again."
        raise HttpError(400, message, code="invalid_form")


class _Upload(UploadFile):
    """An uploaded file that is written and read in threads of ``FILES`` once it is too large for memory.

    starlette's own class uses anyio's threads, which are the page's.
    """

    async def write(self, data: bytes) -> None:
        """Append ``data``."""
        self.size = (self.size or 0) + len(data)
        if self.size <= _Parser.spool_max_size:
            self.file.write(data)
        else:
            await FILES.run(self.file.write, data)

    async def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, or all that are left."""
        return self.file.read(size) if self._in_memory else await FILES.run(self.file.read, size)

    async def seek(self, offset: int) -> None:
        """Go to ``offset``, which does not block."""
        self.file.seek(offset)

    async def close(self) -> None:
        """Close the file; a temporary one is removed."""
        await FILES.run(self.file.close)


class _Parser(MultiPartParser):
    """Reads forms into files of :class:`_Upload`."""

    def on_headers_finished(self) -> None:
        """Begin a part, after its headers."""
        super().on_headers_finished()
        upload = self._current_part.file
        if upload is not None:
            self._current_part.file = _Upload(upload.file, size=0, filename=upload.filename, headers=upload.headers)

    def on_part_end(self) -> None:
        """End a part. A field that is not UTF-8 is refused, as in JSON; starlette would read it as Latin-1."""
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode()
            except UnicodeDecodeError as error:
                name = show_name(part.field_name)
                raise InvalidRequest(
                    f"{name} is not UTF-8 at byte {error.start}; send text as UTF-8.", param=name
                ) from None
        super().on_part_end()


async def read_form(request: Request, *, max_files: int) -> Form[bytes]:
    """Read a form with all of its files. Raises InvalidRequest or HttpError if it is malformed or too large."""
    async with open_form(request, max_files=max_files) as form:
        files = {name: [await item.read() for item in uploads] for name, uploads in form.files.items()}
    return Form(form.fields, files)


@asynccontextmanager
async def open_form(request: Request, *, max_files: int) -> AsyncIterator[Form[UploadFile]]:
    """Read a form for the length of the block; long files stay on disk."""
    fields: dict[str, str | list[str]] = {}
    files: dict[str, list[UploadFile]] = {}
    limits = {"max_files": max_files, "max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
    try:
        if is_form(request):
            async with aclosing(complete_body(request)) as chunks:
                form = await _Parser(request.headers, chunks, **limits).parse()
        else:  # application/x-www-form-urlencoded
            form = await request.form(**limits)
        try:
            for name, value in form.multi_items():
                bare = name.removesuffix("[]")
                if isinstance(value, UploadFile):
                    files.setdefault(bare, []).append(value)
                elif name.endswith("[]"):
                    values_of_list = fields.setdefault(bare, [])
                    fields[bare] = [*([values_of_list] if isinstance(values_of_list, str) else values_of_list), value]
                elif bare in fields:
                    raise InvalidRequest(f"{show_name(bare)} is given twice; give it once.", param=show_name(bare))
                else:
                    fields[bare] = value
            yield Form(fields, files)
        finally:
            await form.close()
    except (MultiPartException, HTTPException) as error:  # starlette's request converts the first type to the second
        message = error.message if isinstance(error, MultiPartException) else error.detail
        raise HttpError(400, f"the form cannot be read: {message}", code="invalid_form") from None
    except ClientDisconnect:
        raise hung_up() from None


def parse_fields(kind: type[BodyT], fields: Mapping[str, str | list[str]]) -> BodyT:
    """Parse form fields, whose numbers are text, as a JSON body; empty fields are missing. Raises InvalidRequest."""
    return parse(kind, msgspec.json.encode(json_fields(kind, fields)))


def json_fields(kind: type[Body], fields: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """Return the JSON values of form fields, which are not checked; empty fields are missing."""
    schema = _schema_of(kind)
    properties, parts = schema["properties"], schema.get("$defs", {})
    return {
        name: [_parse_value(item, properties.get(name, {}), parts) for item in text]
        if isinstance(text, list)
        else _parse_value(text, properties.get(name, {}), parts)
        for name, text in fields.items()
        if text
    }


@functools.cache
def _schema_of(kind: type[Body]) -> dict[str, Any]:
    return kind.model_json_schema()


def _parse_value(text: str, described: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """Return ``text`` unchanged if the field accepts text, else parsed as JSON."""
    if _accepts_text(described, parts) and not text.lstrip().startswith(("{", "[")):
        return text
    if not described:
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):  # invalid, NaN or 1e400: refused later as a string
        return text


def _accepts_text(described: Mapping[str, Any], parts: Mapping[str, Any]) -> bool:
    if "$ref" in described:
        return _accepts_text(parts.get(described["$ref"].rpartition("/")[2], {}), parts)
    ways = described.get("anyOf", ())
    return described.get("type") == "string" or any(_accepts_text(way, parts) for way in ways)

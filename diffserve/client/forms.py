"""Bodies as forms (RFC 7578), in which files travel as they are; JSON would make them a third longer."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

MAX_FIELD_BYTES: Final = 1 << 17
"""Of a field that goes into a form; servers take little more."""


class Upload(NamedTuple):
    """A file of a form, by the name that it had."""

    data: bytes
    filename: str


def form_of(fields: Mapping[str, str], files: Mapping[str, Upload]) -> tuple[bytes, dict[str, str]]:
    """The body of a form, and the headers that it is sent with."""
    boundary = secrets.token_hex(16)
    pieces: list[bytes] = []
    for name, text in fields.items():
        pieces.append(f"--{boundary}\r\n{_HEAD}{_quoted(name)}\r\n\r\n{text}\r\n".encode())
    for name, file in files.items():
        of_file = f"{_HEAD}{_quoted(name)}; filename={_quoted(file.filename)}\r\nContent-Type: application/octet-stream"
        pieces += [f"--{boundary}\r\n{of_file}\r\n\r\n".encode(), file.data, b"\r\n"]
    body = b"".join([*pieces, f"--{boundary}--\r\n".encode()])
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def texts_of(fields: Mapping[str, Any]) -> dict[str, str] | None:
    """``fields`` of a JSON object as those of a form; ``None`` where a form would say something else: that a text is
    empty, or is one although it looks like JSON, or more than it holds."""
    texts: dict[str, str] = {}
    for name, value in fields.items():
        if value is None:
            continue
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        is_odd = isinstance(value, str) and (not value or value.lstrip()[:1] in ("{", "["))
        if is_odd or len(text.encode("utf-8", "surrogatepass")) > MAX_FIELD_BYTES:
            return None
        texts[name] = text
    return texts


_HEAD: Final = "Content-Disposition: form-data; name="


def _quoted(name: str) -> str:
    safe = re.sub(r'[\x00-\x1f\x7f"\\]', "_", name)
    return f'"{safe}"'

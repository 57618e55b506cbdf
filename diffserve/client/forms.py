"""Multipart form bodies (RFC 7578), which send files as raw bytes; base64 in JSON is a third longer."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

MAX_FIELD_BYTES: Final = 1 << 17
"""Longest value of a form field; the limit of servers is slightly higher."""


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


def texts_of(fields: Mapping[str, Any]) -> dict[str, str] | None:
    """Convert the fields of a JSON object to form fields.

    Returns:
        The text of each field, or None if a form cannot represent a value: an empty string, a string that looks like
        JSON, or a value longer than ``MAX_FIELD_BYTES``.
    """
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


_HEAD: Final = "Content-Disposition: form-data; name="


def _quoted(name: str) -> str:
    safe = re.sub(r'[\x00-\x1f\x7f"\\]', "_", name)
    return f'"{safe}"'

"""Decode images that arrive as text in JSON: base64, bare or as a data URL. URLs are left to ``fetching``."""

from __future__ import annotations

import base64
import binascii
import re
import string
from typing import Final

from diffserve.api.errors import InvalidRequest

_DATA_URL: Final = re.compile(
    r"\s*+data:[\w.+\-/]{0,64}(?:;[\w.+\-]{1,64}=[\w.+\-]{0,64})*;base64,", re.ASCII | re.IGNORECASE
)
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,15}://")
_WHITE_SPACE: Final = string.whitespace.encode()


def is_address(text: str) -> bool:
    """Return whether ``text`` is a URL of an image rather than the image itself."""
    return _ADDRESS.match(text.lstrip()) is not None


def picture_bytes(text: str, name: str) -> bytes:
    """Decode the image file that ``text`` holds as base64 or as a data URL.

    White space is skipped and padding is optional; any other character is refused.

    Raises:
        InvalidRequest: ``text`` is a URL, is empty, or is not base64. The error names the parameter ``name``.
    """
    header = _DATA_URL.match(text)
    if header is None and is_address(text):
        message = f"{name} is an address, and nothing is fetched here; send the picture as a data URL of it."
        raise InvalidRequest(message, param=name, code="url_not_allowed")
    try:
        digits = text[header.end() if header else 0 :].encode("ascii").translate(None, _WHITE_SPACE)
        num_padding = len(digits) - len(digits.rstrip(b"="))
        unpadded = digits if num_padding > 2 else digits.rstrip(b"=")
        data = base64.b64decode(unpadded + b"=" * (-len(unpadded) % 4), validate=True)
    except (binascii.Error, ValueError):
        message = f"{name} is not base64; send a PNG, JPEG or WebP file in base64, or as a data URL of it."
        raise InvalidRequest(message, param=name, code="invalid_image") from None
    if not data:
        raise InvalidRequest(f"the {name} is empty; send a PNG, JPEG or WebP file.", param=name, code="invalid_image")
    return data

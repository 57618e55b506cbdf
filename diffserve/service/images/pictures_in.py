"""Pictures that come within JSON: base64, bare or as a data URL. Addresses have been followed before, or never will be
(see ``fetching``)."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from diffserve.errors import InvalidRequest

_DATA_URL: Final = re.compile(r"data:[\w.+\-/]{0,64}(?:;[\w.+\-]{1,64}=[\w.+\-]{0,64})*;base64,", re.ASCII)
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,15}://")


def is_address(text: str) -> bool:
    """Whether ``text`` says where a picture lies rather than what it is."""
    return _ADDRESS.match(text.lstrip()) is not None


def picture_bytes(text: str, name: str) -> bytes:
    """The file that ``text`` is. InvalidRequest blames ``name`` for what is none, an address from which this server
    would have to fetch it included."""
    found = _DATA_URL.match(text)
    if found is None and is_address(text):
        said = f"{name} is an address, and nothing is fetched here; send the picture as a data URL of it."
        raise InvalidRequest(said, param=name, code="url_not_allowed")
    try:
        data = base64.b64decode(text[found.end() :] if found else text, validate=True)
    except (binascii.Error, ValueError):
        said = f"{name} is not base64; send a PNG, JPEG or WebP file in base64, or as a data URL of it."
        raise InvalidRequest(said, param=name, code="invalid_image") from None
    if not data:
        raise InvalidRequest(f"the {name} is empty; send a PNG, JPEG or WebP file.", param=name, code="invalid_image")
    return data

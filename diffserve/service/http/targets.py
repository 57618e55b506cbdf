"""What stands after the method: an address of this server, or the whole of it, as clients of a proxy write it."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from starlette.types import Scope

from diffserve.service.http.hosts import AUTHORITY

_ABSOLUTE: Final = re.compile(rf"https?://({AUTHORITY.pattern})(/.*)?".encode(), re.IGNORECASE | re.DOTALL)


def take_origin_form(scope: Scope) -> None:
    """Have a target in absolute form be read as if it were in origin form (RFC 9112 3.2.2): its path is the path, and
    its authority the Host, whatever the header says. Anything else stays as it is.
    """
    whole = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"") if scope["type"] == "http" else None
    if whole is None:
        return
    authority, path = whole.groups()
    scope["raw_path"] = path or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    scope["headers"] = [(b"host", authority), *(one for one in scope["headers"] if one[0].lower() != b"host")]

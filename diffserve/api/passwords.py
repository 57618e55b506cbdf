"""Passwords in addresses, which no message may show."""

from __future__ import annotations

import re
from typing import Final

_PASSWORD: Final = re.compile(r"(?<=://)([^/@\s:]*):[^\s]*@|(\bpassword=)[^&\s]*", re.IGNORECASE)


def hide_password(text: str) -> str:
    """Return ``text`` with the password of an address in it replaced by ``***``."""
    return _PASSWORD.sub(lambda match: f"{match[2]}***" if match[2] else f"{match[1]}:***@", text)

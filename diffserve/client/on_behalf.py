"""For whom a page asks that lives in the server's own process: told beside a secret that this process alone has.

Without it all visitors of a page would be one client, and share what one client may have. From anybody else the header
says nothing.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from typing import Final, NamedTuple

HEADER: Final = "X-Diffserve-On-Behalf-Of"
_SECRET: Final = secrets.token_hex(16)
_told: ContextVar[str] = ContextVar("on_behalf_of", default="")


class Asker(NamedTuple):
    """Who asks: the ``addresses`` that proxies told and the last one's own, commas between, a ``key`` of theirs that
    tells them apart, and ``key_id``: by which key they came in, where the server asks for one."""

    addresses: str
    key: str
    key_id: str = ""


def ask_for(asker: Asker) -> None:
    """From now on what is asked in this context, and in tasks that begin in it, is asked for ``asker``."""
    _told.set(f"{_SECRET} {asker.key_id} {asker.key} {asker.addresses}")


def own_key() -> str:
    """What a page in the server's own process comes in by, where the server asks for keys."""
    return f"page-{_SECRET}"


def headers() -> dict[str, str]:
    """What says so."""
    return {HEADER: told} if (told := _told.get()) and told.isascii() and told.isprintable() else {}


def asker_in(header: str | None) -> Asker | None:
    """Who is told in ``header``, where this process wrote it."""
    secret, _, rest = (header or "").partition(" ")
    if not secrets.compare_digest(secret.encode("utf-8", "replace"), _SECRET.encode()):
        return None
    key_id, _, rest = rest.partition(" ")
    key, _, addresses = rest.partition(" ")
    return Asker(addresses, key, key_id)

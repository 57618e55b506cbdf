"""Header by which the web page in the server's process says for which visitor it sends a request.

Without it, all visitors of the page would share the limits of one client. The header contains a secret of this process,
so that other clients cannot forge it.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from typing import Final, NamedTuple

HEADER: Final = "X-Diffserve-On-Behalf-Of"
_SECRET: Final = secrets.token_hex(16)
_visitor: ContextVar[str] = ContextVar("on_behalf_of", default="")


class Asker(NamedTuple):
    """Visitor of the page on whose behalf a request is sent.

    Attributes:
        addresses: The addresses from the proxies' headers and that of the connection, separated by commas.
        key: A key that distinguishes visitors with the same address.
        key_id: The ID of the API key with which the visitor signed in, if the server requires one.
    """

    addresses: str
    key: str
    key_id: str = ""


def ask_for(asker: Asker) -> None:
    """Send all later requests of this context, and of tasks started in it, on behalf of ``asker``."""
    _visitor.set(f"{_SECRET} {asker.key_id} {asker.key} {asker.addresses}")


def own_key() -> str:
    """Return the API key of the page in the server's process."""
    return f"page-{_SECRET}"


def headers() -> dict[str, str]:
    """Return the header that names the visitor of this context; empty if there is none or it is not printable ASCII."""
    value = _visitor.get()
    return {HEADER: value} if value and value.isascii() and value.isprintable() else {}


def asker_in(header: str | None) -> Asker | None:
    """Return the visitor in ``header``, or None unless this process wrote the header."""
    secret, _, visitor = (header or "").partition(" ")
    if not secrets.compare_digest(secret.encode("utf-8", "replace"), _SECRET.encode()):
        return None
    key_id, _, visitor = visitor.partition(" ")
    key, _, addresses = visitor.partition(" ")
    return Asker(addresses, key, key_id)

"""Users that a trusted proxy has authenticated and names in a header (``[serve] trusted_user_header``).

Such a user counts as an API key of the scope "generate" with its own share, history and limits; no key is needed. The
header is believed only if the connection comes from one of ``trusted_proxies``, which must overwrite it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from diffserve.service.http.errors import HttpError, reply_for
from diffserve.store.keys import MAX_USER_CHARS

STATE: Final = "proxied_user"


def proxied_user(scope: Scope) -> str:
    """Return the name of the user of a request, "" if no trusted proxy names one."""
    name: str = scope.get("state", {}).get(STATE, "")
    return name


class ProxiedUsers:
    """Middleware that stores the user's name in the state of each request.

    Args:
        app: The application behind.
        header: The name of the header with the user's name in UTF-8.
        trusted_proxies: The addresses that may send it.
    """

    def __init__(self, app: ASGIApp, *, header: str, trusted_proxies: Sequence[str]) -> None:
        self.app = app
        self._header = header
        self._name = header.lower().encode()
        self._trusted = frozenset(trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with the user in its state, or refuse a malformed header."""
        if scope["type"] == "http" and scope.get("client") and scope["client"][0] in self._trusted:
            try:
                scope["state"][STATE] = self._user(scope)
            except HttpError as error:
                scope["state"]["error_code"] = error.code
                await reply_for(scope["path"], error).response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _user(self, scope: Scope) -> str:
        values = [value for name, value in scope["headers"] if name == self._name]
        if len(values) > 1:
            raise self._refused(f"is given {len(values)} times; the proxy must replace what clients send")
        try:
            name = values[0].decode().strip() if values else ""
        except UnicodeDecodeError:
            raise self._refused("is not UTF-8") from None
        if len(name) > MAX_USER_CHARS or not name.isprintable():
            raise self._refused(f"must have at most {MAX_USER_CHARS} printable characters")
        return name

    def _refused(self, reason: str) -> HttpError:
        return HttpError(400, f"header {self._header} {reason}.", code="invalid_user")

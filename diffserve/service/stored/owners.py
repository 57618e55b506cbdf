"""Ownership of stored objects: they belong to the key of the request."""

from __future__ import annotations

from starlette.requests import Request

from diffserve.service.http.addresses import is_loopback
from diffserve.service.http.errors import HttpError
from diffserve.service.http.keys import KeyRing
from diffserve.service.lifecycle import owner_of
from diffserve.settings.config import ServeConfig


class Owners:
    """Owners of stored objects: keys, or "" for the local machine if there are no keys.

    Without keys (``allow_open``) nothing is stored for other machines, because any client could read it.
    """

    def __init__(self, config: ServeConfig, ring: KeyRing | None) -> None:
        self._ring = ring
        self._is_alone = is_loopback(config.host)

    def of(self, request: Request) -> str:
        """Return the owner for ``request``. Raises HttpError if nothing may be stored for it."""
        owner = self.owner(request)
        if owner is None:
            message = "this server has no API keys and stores nothing without them; create one with diffserve keys add."
            raise HttpError(403, message, code="keys_needed")
        return owner

    def owner(self, request: Request) -> str | None:
        """Return the owner for ``request``, or None if nothing may be stored for it."""
        if self._ring is not None and self._ring.is_closed:
            return owner_of(request)
        return "" if self._is_alone else None

    async def is_good(self, owner: str) -> bool:
        """Return whether ``owner`` may still generate."""
        if not owner or self._ring is None:
            return True
        await self._ring.refresh()
        key = self._ring.by_id(owner)
        return key is not None and key.allows("generate")

    def is_admin(self, request: Request) -> bool:
        """Return whether the request may see the data of all keys."""
        owner = self.of(request)
        if self._ring is None or not self._ring.is_closed:
            return True
        key = self._ring.by_id(owner)
        return key is not None and key.allows("admin")

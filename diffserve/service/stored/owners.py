"""Whose things are asked for: those of the key that a request came in by."""

from __future__ import annotations

from starlette.requests import Request

from diffserve.service.http.errors import HttpError
from diffserve.service.http.hosts import is_loopback
from diffserve.service.http.keys import KeyRing
from diffserve.service.lifecycle import owner_of
from diffserve.settings.config import ServeConfig


class Owners:
    """Who may have things here: keys, and where there are none, whoever is on this machine, as one ("").

    Where other machines come in without a key (``allow_open``), nothing is kept for them: everybody could read it.
    """

    def __init__(self, config: ServeConfig, ring: KeyRing | None) -> None:
        self._ring = ring
        self._is_alone = is_loopback(config.host)

    def of(self, request: Request) -> str:
        """Whose ``request`` is. HttpError for those that nothing is kept for."""
        owner = self.known(request)
        if owner is None:
            message = (
                "this server asks nobody for a key, and so keeps nothing for anybody; diffserve keys add makes one."
            )
            raise HttpError(403, message, code="keys_needed")
        return owner

    def known(self, request: Request) -> str | None:
        """The same, ``None`` for those."""
        if self._ring is not None and self._ring.is_closed:
            return owner_of(request)
        return "" if self._is_alone else None

    def is_good(self, owner: str) -> bool:
        """Whether ``owner`` may still paint."""
        if not owner or self._ring is None:
            return True
        self._ring.look()
        key = self._ring.by_id(owner)
        return key is not None and key.allows("generate")

    def is_admin(self, request: Request) -> bool:
        """Whether who asks may see what is everybody's."""
        owner = self.of(request)
        if self._ring is None or not self._ring.is_closed:
            return True
        key = self._ring.by_id(owner)
        return key is not None and key.allows("admin")

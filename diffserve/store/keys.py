"""API keys: 32 random bytes that are shown once and stored as a SHA-256 digest, with scopes and limits."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

import msgspec
from sqlalchemy import delete, func, insert, select, update

from diffserve.api.bounds import check_share
from diffserve.api.errors import InvalidRequest
from diffserve.store.database import Database, insert_or_ignore
from diffserve.store.errors import StoreError
from diffserve.store.schema import ended_sessions, keys

Scope = Literal["generate", "metrics", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
PREFIX: Final = "ds-"
ID_PREFIX: Final = "key-"
ID_BYTES: Final = 6
ID_CHARS: Final = len(ID_PREFIX) + 2 * ID_BYTES
MAX_RATE: Final = 1_000_000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@\-]{0,63}")


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of an API key, without the key itself.

    Attributes:
        id: The ID of the key.
        name: Its name.
        digest: The SHA-256 of the key.
        scopes: "generate" for the API and the page, "metrics" for /metrics only, "admin" for everything.
        requests_per_minute: Rate limit of requests for work, None if unlimited.
        created_s: When it was created, in seconds since 1970.
        revoked_s: When it was revoked, in seconds since 1970.
        share: Weight of its share of the engine when several keys compete; the usual weight is 1.
    """

    id: str
    name: str
    digest: bytes
    scopes: tuple[Scope, ...]
    requests_per_minute: int | None = None
    created_s: float
    revoked_s: float | None = None
    share: float = 1.0

    def allows(self, scope: Scope) -> bool:
        """Return whether the key has ``scope``; "admin" includes every scope."""
        return scope in self.scopes or "admin" in self.scopes


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of ``key``. Keys have enough entropy, so a salt or a slow hash is not needed."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """Table of API keys.

    Args:
        database: The database.
        clock: Returns seconds since 1970.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def add(
        self,
        name: str,
        scopes: Sequence[str] = ("generate",),
        requests_per_minute: int | None = None,
        share: float = 1.0,
    ) -> tuple[str, Key]:
        """Create a key.

        Args:
            name: A unique name.
            scopes: What it may do, see ``SCOPES``.
            requests_per_minute: Rate limit, None if unlimited.
            share: Weight of its share of the engine.

        Returns:
            The key, which cannot be recovered later, and its metadata.

        Raises:
            InvalidRequest: A value is invalid, or the name is taken.
        """
        if not _NAME.fullmatch(name):
            rule = "must be 1 to 64 letters, digits, dots, dashes, underscores or @, starting with a letter or digit"
            raise InvalidRequest(f"name {rule}, got {name[:80]!r}.", param="name")
        valid_scopes = [scope for scope in SCOPES if scope in scopes]
        if not valid_scopes or set(scopes) - set(SCOPES):
            values = ", ".join(map(repr, scopes))[:80] or "none"
            message = f"scopes must be one or more of {', '.join(SCOPES)}, got {values}."
            raise InvalidRequest(message, param="scope")
        if requests_per_minute is not None and not 1 <= requests_per_minute <= MAX_RATE:
            bounds = f"must be between 1 and {MAX_RATE}, or omitted for no limit"
            raise InvalidRequest(f"requests per minute {bounds}, got {requests_per_minute}.", param="rate")
        check_share(share)
        text = PREFIX + secrets.token_urlsafe(32)
        key = Key(
            id=f"{ID_PREFIX}{secrets.token_hex(ID_BYTES)}",
            name=name,
            digest=digest_of(text),
            scopes=tuple(valid_scopes),
            requests_per_minute=requests_per_minute,
            created_s=self._clock(),
            share=share,
        )
        row = msgspec.structs.asdict(key) | {"scopes": " ".join(valid_scopes)}
        try:
            with self._database.writing() as connection:
                connection.execute(insert(keys), row)
        except StoreError as error:
            if error.reason != "duplicate":
                raise
            message = f"a key named {name!r} already exists; revoke it first or choose another name."
            raise InvalidRequest(message, param="name") from None
        return text, key

    def mark(self) -> tuple[object, ...]:
        """Return a value that changes whenever a key is created or revoked, or a session is ended."""
        revoked_s, sessions = keys.c.revoked_s, select(func.max(ended_sessions.c.number)).scalar_subquery()
        query = select(
            func.count(keys.c.id), func.max(keys.c.created_s), func.count(revoked_s), func.max(revoked_s), sessions
        )
        with self._database.reading() as connection:
            return tuple(connection.execute(query).one())

    def all(self) -> list[Key]:
        """Return all keys, including revoked ones, in order of creation."""
        with self._database.reading() as connection:
            rows = connection.execute(select(keys).order_by(keys.c.created_s, keys.c.id)).all()
        return [Key(**{**row._mapping, "scopes": tuple(row.scopes.split())}) for row in rows]

    def revoke(self, name: str) -> Key:
        """Revoke the key with this name or ID for good.

        Raises:
            InvalidRequest: There is no such key, or it is already revoked.
        """
        matches = [key for key in self.all() if name in (key.name, key.id) and key.revoked_s is None]
        if not matches:
            raise InvalidRequest(f"there is no active key {name[:80]!r}.", param="name")
        with self._database.writing() as connection:
            connection.execute(update(keys).where(keys.c.id == matches[0].id).values(revoked_s=self._clock()))
        return matches[0]

    def end_session(self, signature: str, expires_s: float) -> None:
        """End the session with ``signature``, which would expire at ``expires_s`` (seconds since 1970)."""
        with self._database.writing() as connection:
            connection.execute(delete(ended_sessions).where(ended_sessions.c.expires_s < self._clock()))
            row = {"signature": signature, "expires_s": expires_s}
            connection.execute(insert_or_ignore(connection, ended_sessions), row)

    def ended_sessions(self) -> frozenset[str]:
        """Return the signatures of sessions that were ended before they expired."""
        with self._database.reading() as connection:
            return frozenset(connection.execute(select(ended_sessions.c.signature)).scalars())

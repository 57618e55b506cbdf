"""API keys: 32 random bytes each, told once, kept as their SHA-256, with what they may do."""

from __future__ import annotations

import hashlib
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

import msgspec

from diffserve.api.bounds import check_share
from diffserve.api.errors import InvalidRequest
from diffserve.store.database import Database

Scope = Literal["generate", "metrics", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
PREFIX: Final = "ds-"
ID_PREFIX: Final = "key-"
ID_BYTES: Final = 6
ID_CHARS: Final = len(ID_PREFIX) + 2 * ID_BYTES
MAX_RATE: Final = 1_000_000
ADD: Final = (
    "INSERT INTO keys (id, name, digest, scopes, requests_per_minute, created_s, share) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@\-]{0,63}")


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a key; not the key itself.

    scopes               generate: the API and the page; metrics: /metrics alone; admin: everything
    requests_per_minute  that it may ask for work; ``None``: any number
    share                how many times as much of the engine it gets as others do, while they all want some
    revoked_s            when it ended, in seconds since 1970
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
        """Whether it may do that."""
        return scope in self.scopes or "admin" in self.scopes


def digest_of(key: str) -> bytes:
    """SHA-256: a key has so many random bytes that guessing is no way, and salt would only cost time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """The keys of ``database``. ``clock``: seconds since 1970."""

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
        """(the key, which nobody will ever tell again; what is known of it). Raises InvalidRequest."""
        if not _NAME.fullmatch(name):
            said = "it is 1 to 64 letters, digits, dots, dashes, underscores or @, a letter or digit first."
            raise InvalidRequest(f"the name is {name[:80]!r}; {said}", param="name")
        known = [scope for scope in SCOPES if scope in scopes]
        if not known or set(scopes) - set(SCOPES):
            said = f"scopes are {', '.join(map(repr, scopes))[:80] or 'none'}; choose of {', '.join(SCOPES)}."
            raise InvalidRequest(said, param="scope")
        if requests_per_minute is not None and not 1 <= requests_per_minute <= MAX_RATE:
            said = f"requests a minute are {requests_per_minute}; give 1 to {MAX_RATE}, or leave it out for any number."
            raise InvalidRequest(said, param="rate")
        check_share(share)
        text = PREFIX + secrets.token_urlsafe(32)
        key = Key(
            id=f"{ID_PREFIX}{secrets.token_hex(ID_BYTES)}",
            name=name,
            digest=digest_of(text),
            scopes=tuple(known),
            requests_per_minute=requests_per_minute,
            created_s=self._clock(),
            share=share,
        )
        row = (key.id, name, key.digest, " ".join(known), requests_per_minute, key.created_s, share)
        try:
            with self._database.connected() as connection:
                connection.execute(ADD, row)
        except sqlite3.IntegrityError:
            said = f"there is a key {name!r} already; revoke it first, or take another name."
            raise InvalidRequest(said, param="name") from None
        return text, key

    def mark(self) -> tuple[object, ...]:
        """Return a value that changes with every key that is made or revoked and every session that is ended."""
        with self._database.connected() as connection:
            sessions = "(SELECT max(number) FROM ended_sessions)"
            query = f"SELECT count(*), max(created_s), count(revoked_s), max(revoked_s), {sessions} FROM keys"
            return tuple(connection.execute(query).fetchone())

    def all(self) -> list[Key]:
        """Every one, revoked or not, in the order in which they were made."""
        with self._database.connected() as connection:
            rows = connection.execute("SELECT * FROM keys ORDER BY created_s, id").fetchall()
        return [Key(**{**dict(row), "scopes": tuple(row["scopes"].split())}) for row in rows]

    def revoke(self, name: str) -> Key:
        """End the key of that name or id, for good. Raises InvalidRequest where there is none."""
        found = [key for key in self.all() if name in (key.name, key.id) and key.revoked_s is None]
        if not found:
            raise InvalidRequest(f"there is no key {name[:80]!r} that is not revoked already.", param="name")
        with self._database.connected() as connection:
            connection.execute("UPDATE keys SET revoked_s = ? WHERE id = ?", (self._clock(), found[0].id))
        return found[0]

    def end_session(self, signature: str, expires_s: float) -> None:
        """Note that the session with ``signature``, which would expire at ``expires_s``, is over."""
        with self._database.connected() as connection:
            connection.execute("DELETE FROM ended_sessions WHERE expires_s < ?", (self._clock(),))
            connection.execute(
                "INSERT OR IGNORE INTO ended_sessions (signature, expires_s) VALUES (?, ?)", (signature, expires_s)
            )

    def ended_sessions(self) -> frozenset[str]:
        """Return the signatures of sessions that were ended before they expired."""
        with self._database.connected() as connection:
            return frozenset(row["signature"] for row in connection.execute("SELECT signature FROM ended_sessions"))

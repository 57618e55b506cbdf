"""API keys: 32 random bytes that are shown once and stored as a SHA-256 digest, with scopes and limits."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, get_args

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
MAX_PER_DAY: Final = 1_000_000_000
USER: Final = "user:"
"""Prefix of the names of keys that hold the limits of a user of a proxy; the names of other keys have no colon."""

USER_ID_PREFIX: Final = "user-"
MAX_USER_CHARS: Final = 256
CLOCK_ERROR_S: Final = 24 * 3600.0
"""Time for which ended sessions are remembered after their expiry, in case the clock is set back."""
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
        images_per_day: Quota of images per UTC day; 0: no quota; None: not set, which is the server's default for a
            user of a proxy and no quota for a key.
        device_seconds_per_day: Quota of device time in seconds per UTC day, with the same special values.
    """

    id: str
    name: str
    digest: bytes
    scopes: tuple[Scope, ...]
    requests_per_minute: int | None = None
    created_s: float
    revoked_s: float | None = None
    share: float = 1.0
    images_per_day: int | None = None
    device_seconds_per_day: float | None = None

    def allows(self, scope: Scope) -> bool:
        """Return whether the key has ``scope``; "admin" includes every scope."""
        return scope in self.scopes or "admin" in self.scopes


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of ``key``. Keys have enough entropy, so a salt or a slow hash is not needed."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def user_id(name: str) -> str:
    """Return the key ID of a user of a proxy: a digest, so that names do not appear in logs and file names."""
    return f"{USER_ID_PREFIX}{hashlib.sha256(name.encode()).hexdigest()[:24]}"


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
        images_per_day: int | None = None,
        device_seconds_per_day: float | None = None,
        *,
        is_user: bool = False,
    ) -> tuple[str, Key]:
        """Create a key, or an entry with the limits of a user.

        Args:
            name: A unique name, or that of the user.
            scopes: What it may do, see ``SCOPES``.
            requests_per_minute: Rate limit, None if unlimited.
            share: Weight of its share of the engine.
            images_per_day: Quota of images, see ``Key``.
            device_seconds_per_day: Quota of device time in seconds, see ``Key``.
            is_user: Whether ``name`` is a user that a proxy names; a user that was revoked is admitted again.

        Returns:
            The key, which cannot be recovered later, and its metadata. A user does not need the key.

        Raises:
            InvalidRequest: A value is invalid, or the name is taken.
        """
        if is_user:
            if not (name.strip() == name and 1 <= len(name) <= MAX_USER_CHARS and name.isprintable()):
                rule = f"must have 1 to {MAX_USER_CHARS} printable characters"
                raise InvalidRequest(f"the name of a user {rule}, got {name[:80]!r}.", param="name")
        elif not _NAME.fullmatch(name):
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
        _check_quotas(images_per_day, device_seconds_per_day)
        text = PREFIX + secrets.token_urlsafe(32)
        key = Key(
            id=user_id(name) if is_user else f"{ID_PREFIX}{secrets.token_hex(ID_BYTES)}",
            name=f"{USER}{name}" if is_user else name,
            digest=digest_of(text),
            scopes=tuple(valid_scopes),
            requests_per_minute=requests_per_minute,
            created_s=self._clock(),
            share=share,
            images_per_day=images_per_day,
            device_seconds_per_day=device_seconds_per_day,
        )
        row = msgspec.structs.asdict(key) | {"scopes": " ".join(valid_scopes)}
        try:
            with self._database.writing() as connection:
                connection.execute(delete(keys).where(keys.c.id == key.id, keys.c.revoked_s.is_not(None)))
                connection.execute(insert(keys), row)
        except StoreError as error:
            if error.reason != "duplicate":
                raise
            message = f"a key named {key.name!r} already exists; revoke it first or choose another name."
            if is_user:
                message = f"{key.name!r} already exists; change its limits with diffserve keys set {key.name}."
            raise InvalidRequest(message, param="name") from None
        return text, key

    def mark(self) -> tuple[object, ...]:
        """Return a value that changes whenever a key is created, changed or revoked, or a session is ended."""
        revoked_s, sessions = keys.c.revoked_s, select(func.max(ended_sessions.c.number)).scalar_subquery()
        query = select(
            func.count(keys.c.id),
            func.max(keys.c.created_s),
            func.count(revoked_s),
            func.max(revoked_s),
            sessions,
            func.sum(keys.c.num_changes),
        )
        with self._database.reading() as connection:
            return tuple(connection.execute(query).one())

    def all(self) -> list[Key]:
        """Return all keys, including revoked ones, in order of creation."""
        with self._database.reading() as connection:
            rows = connection.execute(select(keys).order_by(keys.c.created_s, keys.c.id)).all()
        fields = [{name: row._mapping[name] for name in Key.__struct_fields__} for row in rows]
        return [Key(**{**values, "scopes": tuple(values["scopes"].split())}) for values in fields]

    def revoke(self, name: str) -> Key:
        """Revoke the key with this name or ID for good.

        Raises:
            InvalidRequest: There is no such key, or it is already revoked.
        """
        key = self._active(name)
        with self._database.writing() as connection:
            connection.execute(update(keys).where(keys.c.id == key.id).values(revoked_s=self._clock()))
        return key

    def change_quotas(
        self, name: str, images_per_day: int | None = None, device_seconds_per_day: float | None = None
    ) -> Key:
        """Change the quotas of a key.

        Args:
            name: Name or ID of the key.
            images_per_day: New quota of images per UTC day, see ``Key``; None: unchanged.
            device_seconds_per_day: New quota of device time in seconds per UTC day; None: unchanged.

        Raises:
            InvalidRequest: There is no such key, or a value is out of bounds.
        """
        _check_quotas(images_per_day, device_seconds_per_day)
        key = self._active(name)
        quotas = {"images_per_day": images_per_day, "device_seconds_per_day": device_seconds_per_day}
        changes: dict[str, Any] = {field: value for field, value in quotas.items() if value is not None}
        with self._database.writing() as connection:
            counted = changes | {"num_changes": keys.c.num_changes + 1}
            connection.execute(update(keys).where(keys.c.id == key.id).values(counted))
        return msgspec.structs.replace(key, **changes)

    def _active(self, name: str) -> Key:
        """Return the key with this name or ID. Raises InvalidRequest if there is none that is not revoked."""
        matches = [key for key in self.all() if name in (key.name, key.id) and key.revoked_s is None]
        if not matches:
            raise InvalidRequest(f"there is no active key {name[:80]!r}.", param="name")
        return matches[0]

    def end_session(self, signature: str, expires_s: float) -> None:
        """End the session with ``signature``, which would expire at ``expires_s`` (seconds since 1970)."""
        with self._database.writing() as connection:
            connection.execute(delete(ended_sessions).where(ended_sessions.c.expires_s < self._clock() - CLOCK_ERROR_S))
            row = {"signature": signature, "expires_s": expires_s}
            connection.execute(insert_or_ignore(connection, ended_sessions), row)

    def ended_sessions(self) -> frozenset[str]:
        """Return the signatures of sessions that were ended before they expired."""
        with self._database.reading() as connection:
            return frozenset(connection.execute(select(ended_sessions.c.signature)).scalars())


def _check_quotas(images_per_day: int | None, device_seconds_per_day: float | None) -> None:
    for name, value in (("images-per-day", images_per_day), ("device-seconds-per-day", device_seconds_per_day)):
        if value is not None and not 0 <= value <= MAX_PER_DAY:
            bounds = f"must be between 0 (no quota) and {MAX_PER_DAY}"
            raise InvalidRequest(f"{name} {bounds}, got {value:g}.", param=name.replace("-", "_"))

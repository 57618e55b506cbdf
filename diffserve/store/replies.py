"""Stored answers for idempotency keys: kept for a day, within a total size."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
from sqlalchemy import Connection, delete, func, insert, select

from diffserve.store.database import Database
from diffserve.store.schema import replies

KEPT_S: Final = 24 * 3600.0
MAX_REPLY_BYTES: Final = 32 << 20
"""Longer answers are not stored."""

MAX_BYTES: Final = 512 << 20
"""Total size of the stored answers; the oldest are deleted first."""


class Reply(NamedTuple):
    """Stored answer to a request; ``request`` is the digest of that request."""

    request: bytes
    status: int
    headers: dict[str, str]
    body: bytes


class Replies:
    """Table of stored answers.

    Args:
        database: The database.
        max_bytes: Total size of the answers.
        clock: Returns seconds since 1970.
    """

    def __init__(
        self, database: Database, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._max_bytes = max_bytes
        self._clock = clock

    def get(self, name: bytes) -> Reply | None:
        """Return the answer of the last day with the key digest ``name``, or None."""
        query = select(replies).where(replies.c.id == name, replies.c.created_s > self._clock() - KEPT_S)
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        return Reply(row.request, row.status, msgspec.json.decode(row.headers), row.body)

    def add(self, name: bytes, reply: Reply) -> bool:
        """Store ``reply`` and delete old ones; return False if it is too long to store."""
        if len(reply.body) > min(MAX_REPLY_BYTES, self._max_bytes):
            return False
        now_s = self._clock()
        headers = msgspec.json.encode(reply.headers).decode()
        row = {"id": name, **reply._asdict(), "headers": headers, "created_s": now_s}
        with self._database.writing(at_once=False, exclusive=True) as connection:
            is_old = replies.c.created_s <= now_s - KEPT_S
            connection.execute(delete(replies).where(is_old | (replies.c.id == name)))
            connection.execute(insert(replies), row)
            _trim(connection, self._max_bytes)
        return True


def name_of(owner: str, path: str, key: str) -> bytes:
    """Return the digest under which the answer to a request with the idempotency key ``key`` is stored."""
    return hashlib.sha256("\0".join((owner, path, key)).encode()).digest()


def _trim(connection: Connection, max_bytes: int) -> None:
    num_bytes = func.length(replies.c.body).label("num_bytes")
    total = connection.execute(select(func.coalesce(func.sum(num_bytes), 0))).scalar_one()
    while total > max_bytes:
        oldest = connection.execute(select(replies.c.id, num_bytes).order_by(replies.c.created_s).limit(1)).one()
        connection.execute(delete(replies).where(replies.c.id == oldest.id))
        total -= oldest.num_bytes

"""Stored answers for idempotency keys: kept for a day, within a total size."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from diffserve.store.database import Database

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
        with self._database.connected() as connection:
            query = "SELECT * FROM replies WHERE id = ? AND created_s > ?"
            row = connection.execute(query, (name, self._clock() - KEPT_S)).fetchone()
        if row is None:
            return None
        return Reply(row["request"], row["status"], msgspec.json.decode(row["headers"]), row["body"])

    def add(self, name: bytes, reply: Reply) -> bool:
        """Store ``reply`` and delete old ones; return False if it is too long to store."""
        if len(reply.body) > min(MAX_REPLY_BYTES, self._max_bytes):
            return False
        now_s = self._clock()
        headers = msgspec.json.encode(reply.headers).decode()
        with self._database.connected(at_once=False) as connection:
            connection.execute("DELETE FROM replies WHERE created_s <= ?", (now_s - KEPT_S,))
            row = (name, reply.request, reply.status, headers, reply.body, now_s)
            connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?)", row)
            _trim(connection, self._max_bytes)
        return True


def name_of(owner: str, path: str, key: str) -> bytes:
    """Return the digest under which the answer to a request with the idempotency key ``key`` is stored."""
    return hashlib.sha256("\0".join((owner, path, key)).encode()).digest()


def _trim(connection: sqlite3.Connection, max_bytes: int) -> None:
    (total,) = connection.execute("SELECT coalesce(sum(length(body)), 0) FROM replies").fetchone()
    while total > max_bytes:
        query = "SELECT id, length(body) AS num_bytes FROM replies ORDER BY created_s LIMIT 1"
        oldest = connection.execute(query).fetchone()
        connection.execute("DELETE FROM replies WHERE id = ?", (oldest["id"],))
        total -= oldest["num_bytes"]

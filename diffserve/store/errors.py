"""Errors of the store, the same for SQLite and PostgreSQL. Nothing here imports a database library."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Final, Literal

from diffserve.api.passwords import hide_password

Reason = Literal["full", "unwritable", "unreachable", "duplicate", "other"]

SQLITE_REASONS: Final[dict[int, Reason]] = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_IOERR: "unwritable",
    sqlite3.SQLITE_READONLY: "unwritable",
    sqlite3.SQLITE_CANTOPEN: "unreachable",
    sqlite3.SQLITE_CORRUPT: "unreachable",
    sqlite3.SQLITE_NOTADB: "unreachable",
}
"""Reasons by the primary result code of SQLite."""

NO_TABLE: Final = "no such table"
"""Beginning of SQLite's message after its file was deleted: the next connection creates an empty one."""

UNIQUE_CODES: Final = (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
POSTGRESQL_REASONS: Final[dict[str, Reason]] = {
    "53100": "full",
    "58030": "unwritable",
    "25006": "unwritable",
    "23505": "duplicate",
}
"""Reasons by SQLSTATE: disk_full, io_error, read_only_sql_transaction and unique_violation."""

UNREACHABLE_CLASSES: Final = ("08", "53", "57")
"""Classes of SQLSTATE: connection exception, insufficient resources, operator intervention such as a shutdown."""


class StoreError(Exception):
    """Failure of the database. The message contains neither SQL nor values nor passwords.

    Attributes:
        name: Name of the error: SQLITE_FULL, or a class of psycopg such as DiskFull.
        reason: What happened: the disk is full, it cannot be written, the database cannot be reached, a unique value
            exists already, or something else.
    """

    def __init__(self, message: str, name: str = "", reason: Reason = "other") -> None:
        super().__init__(message)
        self.name = name or type(self).__name__
        self.reason = reason


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Convert the errors of SQLAlchemy within the block to StoreError."""
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError

    try:
        yield
    except DBAPIError as error:
        raise _store_error(error.orig or error) from error
    except SQLAlchemyError as error:
        reason: Reason = "unreachable" if isinstance(error, TimeoutError) else "other"
        raise StoreError(hide_password(str(error)), type(error).__name__, reason) from error


def _store_error(error: BaseException) -> StoreError:
    message = hide_password(str(error).strip().partition("\n")[0])
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None) or 0
        reason = "duplicate" if code in UNIQUE_CODES else SQLITE_REASONS.get(code & 0xFF, "other")
        if message.startswith(NO_TABLE):
            reason = "unreachable"
        return StoreError(message, getattr(error, "sqlite_errorname", type(error).__name__), reason)
    state = getattr(error, "sqlstate", None)
    if state is None:  # the connection was lost or never made
        return StoreError(message, type(error).__name__, "unreachable")
    is_unreachable = state.startswith(UNREACHABLE_CLASSES)
    reason = POSTGRESQL_REASONS.get(state, "unreachable" if is_unreachable else "other")
    return StoreError(message, type(error).__name__, reason)

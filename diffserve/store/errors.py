"""Errors of the store, the same for SQLite and PostgreSQL. Nothing here imports a database library."""

from __future__ import annotations

import contextlib
import re
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

REFUSALS: Final = {
    'database ".*" does not exist': "3D000",
    'role ".*" (does not exist|is not permitted)|no pg_hba.conf entry': "28000",
    "authentication failed|no password supplied": "28P01",
    "permission denied for database": "42501",
}
"""SQLSTATE by the English text of a refused connection, which libpq reports without it."""

SIGN_IN: Final = "correct user and password in store.url, or let the user in (pg_hba.conf)"
FREE_SPACE: Final = "free space on its disk"
POSTGRESQL_FIXES: Final = {
    "3D000": "create the database or change store.url",
    "28000": SIGN_IN,
    "28P01": SIGN_IN,
    "42501": "grant its role the rights on the schema and all tables, or make it their owner",
    "42P07": "it belongs to another program: choose an empty database (store.url)",
    "53100": FREE_SPACE,
}
"""Fixes by SQLSTATE: invalid_catalog_name, invalid_authorization_specification, invalid_password,
insufficient_privilege, duplicate_table and disk_full."""

SQLITE_FIXES: Final = {
    sqlite3.SQLITE_FULL: FREE_SPACE,
    sqlite3.SQLITE_BUSY: "try again when no other program uses it",
}
"""Fixes by the primary result code of SQLite."""


class StoreError(Exception):
    """Failure of the database. The text contains neither SQL nor values nor passwords.

    Attributes:
        name: Name of the error: SQLITE_FULL, or a class of psycopg such as DiskFull.
        reason: What happened: the disk is full, it cannot be written, the database cannot be reached, a unique value
            exists already, or something else.
        fix: What the operator of the server can do; empty: what helps against most errors.
        address: The file, or the address without its password; empty if unknown.
    """

    def __init__(self, text: str, name: str = "", reason: Reason = "other", fix: str = "") -> None:
        super().__init__(text)
        self.name = name or type(self).__name__
        self.reason = reason
        self.fix = fix
        self.address = ""

    @property
    def param(self) -> str:
        """The setting that says where the database is."""
        return "url" if "://" in self.address else "data_dir"

    @property
    def message(self) -> str:
        """Sentence for the operator of the server, with the address of the database and the fix."""
        usual_fix = "move it away or choose another folder (serve.data_dir)"
        if self.param == "url":
            is_down = self.reason == "unreachable"
            usual_fix = "start the database or change store.url" if is_down else "choose another database (store.url)"
        return f"{self.address or 'the database'} cannot be used ({self}); {self.fix or usual_fix}."


@contextlib.contextmanager
def store_errors(address: str) -> Iterator[None]:
    """Convert the errors of SQLAlchemy within the block to StoreError.

    Args:
        address: The file, or the address without its password, for messages.
    """
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError
    from sqlalchemy.exc import TimeoutError as PoolTimeout

    try:
        try:
            yield
        except DBAPIError as error:
            raise _store_error(error.orig or error) from error
        except SQLAlchemyError as error:
            reason: Reason = "unreachable" if isinstance(error, PoolTimeout) else "other"
            raise StoreError(hide_password(str(error)), type(error).__name__, reason) from error
    except StoreError as error:
        error.address = address
        raise


def _store_error(error: BaseException) -> StoreError:
    text = hide_password(str(error).strip().partition("\n")[0])
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None) or 0
        reason = "duplicate" if code in UNIQUE_CODES else SQLITE_REASONS.get(code & 0xFF, "other")
        if text.startswith(NO_TABLE):
            reason = "unreachable"
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        return StoreError(text, name, reason, SQLITE_FIXES.get(code & 0xFF, ""))
    state = getattr(error, "sqlstate", None)
    if state is None:  # the connection was lost or never made
        state = next((REFUSALS[pattern] for pattern in REFUSALS if re.search(pattern, text)), "")
        return StoreError(text, type(error).__name__, "unreachable", POSTGRESQL_FIXES.get(state, ""))
    is_unreachable = state.startswith(UNREACHABLE_CLASSES)
    reason = POSTGRESQL_REASONS.get(state, "unreachable" if is_unreachable else "other")
    return StoreError(text, type(error).__name__, reason, POSTGRESQL_FIXES.get(state, ""))

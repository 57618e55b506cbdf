"""Database of a server, SQLite or PostgreSQL: connections, rows of tables and the lock of the data folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeVar, get_origin

import msgspec
from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, Table, func, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from diffserve.api.errors import ConfigError
from diffserve.api.passwords import hide_password
from diffserve.store.engines import postgresql_engines, sqlite_engines
from diffserve.store.errors import StoreError, store_errors
from diffserve.store.migration import back_up, check_file, check_revision, upgrade
from diffserve.store.schema import secrets

FILE: Final = "diffserve.sqlite"
LOCK: Final = "server.lock"
EXCLUSIVE_LOCK: Final = 7_233_175_521
"""Advisory lock of PostgreSQL that exclusive transactions hold."""

Entry = TypeVar("Entry", bound=msgspec.Struct)
Order = Literal["asc", "desc"]


class PageSelection(NamedTuple):
    """Selection of a page; ``after`` is the ID of the last entry of the previous page, empty for the first page."""

    limit: int
    after: str = ""
    order: Order = "desc"


class Database:
    """Database of a server with the data folder ``folder``; created if it is missing, and upgraded if it is old.

    Args:
        folder: The data folder. Without ``url`` it also contains the database, an SQLite file with mode 0600.
        url: Address of a PostgreSQL database, such as postgresql://user:password@host/name. Servers with the same
            address must share the data folder.

    Attributes:
        folder: The data folder.
        file: The path of the SQLite file.
        is_postgresql: Whether ``url`` was given.
        tell_commit: Called after every commit with its duration in seconds, in the thread of the commit.

    Raises:
        ConfigError: The database is from a newer version, damaged, unreachable or not writable. It is left unchanged.
    """

    def __init__(self, folder: Path, url: str = "") -> None:
        self.folder = folder
        self.file = folder / FILE
        self.is_postgresql = bool(url)
        self._address = hide_password(url) if url else str(self.file)
        self.tell_commit: Callable[[float], None] = lambda _: None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not url:
                os.close(os.open(self.file, os.O_CREAT | os.O_RDWR, 0o600))
            self._engines = postgresql_engines(url) if url else sqlite_engines(self.file)
            try:
                self._open()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            where = folder if url else self.file
            message = f"{where} cannot be written: {error.strerror}; fix it or choose another folder (serve.data_dir)."
            raise ConfigError(message, param="data_dir") from None
        except StoreError as error:
            raise ConfigError(error.message, param=error.param) from None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a connection that only reads, for one thread.

        Yields:
            The connection.

        Raises:
            StoreError: The database cannot be read.
        """
        with store_errors(self._address), self._engines.reads.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, *, at_once: bool = True, exclusive: bool = False) -> Iterator[Connection]:
        """Open a connection for one thread, and commit when the block ends without an exception.

        Args:
            at_once: Whether the commit is flushed to the disk, which takes milliseconds. Otherwise it survives a crash
                of the process but perhaps not a power failure; such connections are reused for small, frequent writes.
            exclusive: Whether other exclusive transactions wait for this one, so that what it reads stays true until
                its commit. The first statement of other transactions must be a write.

        Yields:
            The connection.

        Raises:
            StoreError: The database cannot be read or written; nothing is committed.
        """
        with self._transaction(self._engines.flushed if at_once else self._engines.delayed, exclusive) as connection:
            yield connection

    @contextlib.contextmanager
    def _transaction(self, engine: Engine, exclusive: bool) -> Iterator[Connection]:
        """Open a connection of ``engine``, and commit when the block ends; see ``writing``."""
        with store_errors(self._address), engine.connect() as connection:
            try:
                if exclusive and self.is_postgresql:
                    connection.execute(select(func.pg_advisory_xact_lock(EXCLUSIVE_LOCK)))
                elif exclusive:
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                yield connection
                began_s = time.perf_counter()
                connection.commit()
            except SQLAlchemyError:
                connection.invalidate()
                raise
        self.tell_commit(time.perf_counter() - began_s)

    def _open(self) -> None:
        """Check the database before any write, back up an old SQLite file, and upgrade the schema."""
        with self.reading() as connection:
            revision = check_revision(connection, self._address)
            if not self.is_postgresql:
                check_file(connection, self.file)
                back_up(connection, self.file, revision)
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        with self._transaction(self._engines.upgrades, exclusive=True) as connection:
            upgrade(connection)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark the folder as used by a running server during the block.

        One connection stays open, because closing SQLite's last connection would remove the write-ahead log.
        """
        with contextlib.ExitStack() as stack:
            if not self.is_postgresql:
                connection = stack.enter_context(self.reading())
                connection.execute(select(func.count()).select_from(secrets)).scalar_one()
            fcntl.flock(stack.enter_context(self._lock_file()), fcntl.LOCK_SH)
            stack.callback(self.close)
            yield

    def close(self) -> None:
        """Close the idle connections; a later use opens new ones."""
        for engine in self._engines:
            engine.dispose()

    @property
    def is_served(self) -> bool:
        """Whether a running server uses this folder."""
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _lock_file(self) -> BinaryIO:
        """Open the file that a running server locks; the lock is released when its process ends."""
        return os.fdopen(os.open(self.file.with_name(LOCK), os.O_CREAT | os.O_RDWR, 0o600), "r+b")

    def page(
        self, kind: type[Entry], table: Table, owner: str, selection: PageSelection, *where: ColumnElement[bool]
    ) -> tuple[list[Entry], bool] | None:
        """Read a page of ``owner``'s rows of a table with the columns ``number``, ``id`` and ``owner``.

        Args:
            kind: The type of the rows.
            table: The table.
            owner: The ID of the API key.
            selection: Which page.
            where: Further conditions.

        Returns:
            The rows and whether more follow, or None if ``owner`` has no entry ``selection.after``.
        """
        number, is_owned = table.c.number, table.c.owner == owner
        query = select_rows(kind, table).where(is_owned, *where)
        is_descending = selection.order == "desc"
        with self.reading() as connection:
            if selection.after:
                after = connection.execute(select(number).where(is_owned, table.c.id == selection.after)).scalar()
                if after is None:
                    return None
                query = query.where(number < after if is_descending else number > after)
            order = number.desc() if is_descending else number.asc()
            limit = selection.limit + 1  # one more, to see whether more rows follow
            rows = connection.execute(query.order_by(order).limit(limit)).all()
        return [read_row(kind, row) for row in rows[: selection.limit]], len(rows) > selection.limit

    def forget(self) -> None:
        """Truncate SQLite's write-ahead log, so that deleted data does not remain in it."""
        if not self.is_postgresql:
            with self.reading() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    @property
    def wal_bytes(self) -> int:
        """Size of SQLite's write-ahead log in bytes, 0 if there is none."""
        try:
            return self.file.with_name(f"{FILE}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def stamp(self) -> object:
        """Value that differs after a change by any process: of SQLite, modification times and sizes of the files."""
        if self.is_postgresql:
            return object()  # always different: only a query can tell
        return tuple(_stamp(file) for file in (self.file, self.file.with_name(f"{FILE}-wal")))

    def secret(self, name: str) -> bytes:
        """Return the 32 random bytes called ``name``; they are created once and then stay the same."""
        with self.writing() as connection:
            connection.execute(insert_or_ignore(connection, secrets), {"name": name, "value": os.urandom(32)})
            return bytes(connection.execute(select(secrets.c.value).where(secrets.c.name == name)).scalar_one())


def insert_or_ignore(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT into ``table`` that does nothing if the row exists already."""
    return insert_for(connection, table).on_conflict_do_nothing()


def insert_for(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT into ``table`` with the methods ``on_conflict_...`` of the database of ``connection``."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def insert_row(connection: Connection, table: Table, row: msgspec.Struct) -> None:
    """Insert ``row`` into ``table``, whose columns are the fields of the row; dictionaries are stored as JSON."""
    values = msgspec.structs.asdict(row)
    values |= {name: msgspec.json.encode(values[name]).decode() for name in _json_columns(type(row))}
    connection.execute(insert(table), values)


def find_row(connection: Connection, kind: type[Entry], table: Table, **equal: str) -> Entry | None:
    """Return the row of ``table`` whose columns have the values ``equal``, or None."""
    row = connection.execute(select_rows(kind, table).filter_by(**equal)).first()
    return None if row is None else read_row(kind, row)


def select_rows(kind: type[msgspec.Struct], table: Table) -> Select[Any]:
    """Return the query of the columns of ``table`` that ``kind`` has; others, which may be large, are not read."""
    return select(*(table.c[name] for name in kind.__struct_fields__))


def read_row(kind: type[Entry], row: Row[Any]) -> Entry:
    """Convert a row of a table to ``kind``."""
    columns = row._asdict()
    values = {name: columns[name] for name in kind.__struct_fields__}
    return kind(**values | {name: msgspec.json.decode(values[name]) for name in _json_columns(kind)})


@cache
def _json_columns(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if get_origin(field.type) is dict)


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return (0, 0)
    return status.st_mtime_ns, status.st_size

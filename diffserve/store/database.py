"""SQLite database of a server: schema migrations, connections, rows of tables and the lock of the data folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple, TypeVar, get_origin

import msgspec

from diffserve.api.errors import ConfigError

FILE: Final = "diffserve.sqlite"
LOCK: Final = "server.lock"
BUSY_S: Final = 5.0
MOST_IDLE: Final = 2
"""Idle connections that are kept open for writes with ``at_once=False``."""

MIGRATIONS: Final = (
    """
    CREATE TABLE keys (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        scopes TEXT NOT NULL,
        requests_per_minute INTEGER,
        created_s REAL NOT NULL,
        revoked_s REAL
    ) STRICT;
    CREATE UNIQUE INDEX keys_by_name ON keys (name) WHERE revoked_s IS NULL;
    CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
    """,
    """
    CREATE TABLE files (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_s REAL NOT NULL,
        expires_s REAL NOT NULL
    ) STRICT;
    CREATE INDEX files_by_owner ON files (owner, number);
    CREATE TABLE batches (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        input_file TEXT NOT NULL,
        output_file TEXT NOT NULL,
        error_file TEXT NOT NULL,
        status TEXT NOT NULL,
        metadata TEXT NOT NULL,
        error TEXT NOT NULL,
        times TEXT NOT NULL,
        created_s REAL NOT NULL,
        expires_s REAL NOT NULL,
        num_lines INTEGER NOT NULL,
        num_completed INTEGER NOT NULL,
        num_failed INTEGER NOT NULL,
        output_bytes INTEGER NOT NULL,
        error_bytes INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX batches_by_owner ON batches (owner, number);
    CREATE INDEX batches_by_status ON batches (status);
    CREATE TABLE batch_lines (
        batch TEXT NOT NULL,
        line INTEGER NOT NULL,
        PRIMARY KEY (batch, line)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE replies (
        id BLOB PRIMARY KEY,
        request BLOB NOT NULL,
        status INTEGER NOT NULL,
        headers TEXT NOT NULL,
        body BLOB NOT NULL,
        created_s REAL NOT NULL
    ) STRICT;
    CREATE INDEX replies_by_age ON replies (created_s);
    CREATE TABLE history (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        file TEXT NOT NULL,
        words TEXT NOT NULL,
        model TEXT NOT NULL,
        recipe TEXT NOT NULL,
        created_s REAL NOT NULL
    ) STRICT;
    CREATE INDEX history_by_owner ON history (owner, number);
    CREATE INDEX history_by_age ON history (created_s);
    CREATE UNIQUE INDEX history_by_file ON history (file);
    CREATE TABLE usage (
        owner TEXT NOT NULL,
        day TEXT NOT NULL,
        requests INTEGER NOT NULL,
        pictures INTEGER NOT NULL,
        evaluations INTEGER NOT NULL,
        input_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        PRIMARY KEY (owner, day)
    ) STRICT, WITHOUT ROWID;
    """,
    "ALTER TABLE keys ADD COLUMN share REAL NOT NULL DEFAULT 1.0",
    """
    CREATE TABLE ended_sessions (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        signature TEXT NOT NULL UNIQUE,
        expires_s REAL NOT NULL
    ) STRICT;
    """,
    """
    CREATE TABLE experiments (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        model TEXT NOT NULL,
        plan TEXT NOT NULL,
        status TEXT NOT NULL,
        error TEXT NOT NULL,
        times TEXT NOT NULL,
        created_s REAL NOT NULL,
        num_images INTEGER NOT NULL,
        estimated_s REAL
    ) STRICT;
    CREATE INDEX experiments_by_owner ON experiments (owner, number);
    CREATE INDEX experiments_by_status ON experiments (status);
    """,
    "ALTER TABLE history ADD COLUMN favorite INTEGER NOT NULL DEFAULT 0",
)
"""Migration scripts, one per schema version. Add new ones; never change a released one."""

MAX_CHECKED_BYTES: Final = 64 << 20
"""Files up to this size are checked for damage when they are opened."""

Row = TypeVar("Row", bound=msgspec.Struct)
Order = Literal["asc", "desc"]


class PageSelection(NamedTuple):
    """Selection of a page; ``after`` is the ID of the last entry of the previous page, empty for the first page."""

    limit: int
    after: str = ""
    order: Order = "desc"


class Database:
    """SQLite database in ``folder``; it is created with mode 0600 if it is missing, and migrated if it is old.

    Attributes:
        file: The path of the database.
        tell_commit: Called after every commit with its duration in seconds, in the thread of the commit.

    Raises:
        ConfigError: The file is from a newer version, damaged or not writable. It is left unchanged.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self.tell_commit: Callable[[float], None] = lambda _: None
        self._idle: deque[sqlite3.Connection] = deque()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.file, os.O_CREAT | os.O_RDWR, 0o600))
            with self.connected() as connection:
                self._check(connection)
                connection.execute("PRAGMA journal_mode = WAL")
            self._migrate()
        except OSError as error:
            message = (
                f"{self.file} cannot be written: {error.strerror}; fix it or choose another folder (serve.data_dir)."
            )
            raise ConfigError(message, param="data_dir") from None
        except sqlite3.Error as error:
            raise ConfigError(
                f"{self.file} cannot be used ({error}); move it away or choose another folder (serve.data_dir).",
                param="data_dir",
            ) from None

    @contextlib.contextmanager
    def connected(self, *, at_once: bool = True) -> Iterator[sqlite3.Connection]:
        """Open a connection for one thread, and commit when the block ends without an exception.

        Args:
            at_once: Whether the commit is flushed to the disk, which takes milliseconds. Otherwise it survives a crash
                of the process but perhaps not a power failure; such connections are reused for small, frequent writes.

        Yields:
            The connection.
        """
        connection = self._connect(at_once=True) if at_once else self._pop_idle() or self._connect(at_once=False)
        is_good = False
        try:
            with connection:
                yield connection
                began_s = time.perf_counter() if connection.in_transaction else None
            if began_s is not None:
                self.tell_commit(time.perf_counter() - began_s)
            is_good = True
        finally:
            if is_good and not at_once and len(self._idle) < MOST_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def _connect(self, *, at_once: bool) -> sqlite3.Connection:
        connection = sqlite3.connect(self.file, timeout=BUSY_S, check_same_thread=at_once)
        connection.row_factory = sqlite3.Row
        connection.execute(f"PRAGMA synchronous = {'FULL' if at_once else 'NORMAL'}")
        connection.execute("PRAGMA secure_delete = ON")
        return connection

    def _pop_idle(self) -> sqlite3.Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark the folder as used by a running server during the block.

        One connection stays open, because closing the last connection would remove the write-ahead log.
        """
        with (
            contextlib.closing(sqlite3.connect(self.file, check_same_thread=False)) as connection,
            self._lock_file() as lock,
        ):
            connection.execute("SELECT count(*) FROM secrets").fetchone()
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield

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
        self,
        kind: type[Row],
        table: str,
        owner: str,
        selection: PageSelection,
        where: str = "",
        values: Sequence[str | float] = (),
    ) -> tuple[list[Row], bool] | None:
        """Read a page of ``owner``'s rows of a table with the columns ``number``, ``id`` and ``owner``.

        Args:
            kind: The type of the rows.
            table: The name of the table.
            owner: The ID of the API key.
            selection: Which page.
            where: Further SQL conditions, each with a leading " AND ".
            values: The parameters of ``where``.

        Returns:
            The rows and whether more follow, or None if ``owner`` has no entry ``selection.after``.
        """
        with self.connected() as connection:
            if selection.after:
                query = f"SELECT number FROM {table} WHERE owner = ? AND id = ?"
                after = connection.execute(query, (owner, selection.after)).fetchone()
                if after is None:
                    return None
                where += f" AND number {'<' if selection.order == 'desc' else '>'} {after['number']}"
            limit = selection.limit + 1  # one more, to see whether more rows follow
            order = f"ORDER BY number {'DESC' if selection.order == 'desc' else 'ASC'} LIMIT {limit}"
            query = f"SELECT * FROM {table} WHERE owner = ?{where} {order}"
            rows = connection.execute(query, (owner, *values)).fetchall()
        return [read_row(kind, row) for row in rows[: selection.limit]], len(rows) > selection.limit

    def forget(self) -> None:
        """Truncate the write-ahead log, so that deleted data does not remain in it."""
        with self.connected() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log in bytes, 0 if there is none."""
        try:
            return self.file.with_name(f"{FILE}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Modification times and sizes of the database files, which differ after a change by any process."""
        return tuple(_stamp(file) for file in (self.file, self.file.with_name(f"{FILE}-wal")))

    def secret(self, name: str) -> bytes:
        """Return the 32 random bytes called ``name``; they are created once and then stay the same."""
        with self.connected() as connection:
            connection.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (name, os.urandom(32)))
            return bytes(connection.execute("SELECT value FROM secrets WHERE name = ?", (name,)).fetchone()[0])

    def _check(self, connection: sqlite3.Connection) -> None:
        """Check version and integrity before any write, and back up a database that will be migrated.

        Raises:
            ConfigError: The file is from a newer version.
            sqlite3.Error: The file is damaged or not a database.
        """
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise ConfigError(
                f"{self.file} was written by a newer diffserve (version {version}, this one supports up to "
                f"{len(MIGRATIONS)}); upgrade diffserve or choose another folder (serve.data_dir).",
                param="data_dir",
            )
        if self.file.stat().st_size <= MAX_CHECKED_BYTES:
            (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if result != "ok":
                raise sqlite3.DatabaseError("it is damaged")
        if 0 < version < len(MIGRATIONS):
            part = self.file.with_name(f"{FILE}.{os.getpid()}.part")
            part.unlink(missing_ok=True)
            connection.execute("VACUUM INTO ?", (str(part),))
            part.chmod(0o600)
            part.replace(self.file.with_name(f"{FILE}.version-{version}"))

    def _migrate(self) -> None:
        with self.connected() as connection:
            connection.execute("BEGIN IMMEDIATE")  # if two processes start together, only one migrates
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            for script in MIGRATIONS[version:]:
                for statement in filter(str.strip, script.split(";")):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {max(version, len(MIGRATIONS))}")


def insert_row(connection: sqlite3.Connection, table: str, row: msgspec.Struct) -> None:
    """Insert ``row`` into ``table``, whose columns are the fields of the row; dictionaries are stored as JSON."""
    values = msgspec.structs.asdict(row)
    values |= {name: msgspec.json.encode(values[name]).decode() for name in _json_columns(type(row))}
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))


def find_row(connection: sqlite3.Connection, kind: type[Row], table: str, **equal: str) -> Row | None:
    """Return the row of ``table`` whose columns have the values ``equal``, or None."""
    conditions = " AND ".join(f"{name} = ?" for name in equal)
    row = connection.execute(f"SELECT * FROM {table} WHERE {conditions}", tuple(equal.values())).fetchone()
    return None if row is None else read_row(kind, row)


def read_row(kind: type[Row], row: sqlite3.Row) -> Row:
    """Convert a row of a table to ``kind``."""
    values = {name: row[name] for name in kind.__struct_fields__}
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

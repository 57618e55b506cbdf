"""Connections to the store's database: how SQLite and PostgreSQL are configured."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, NamedTuple

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from diffserve.api.errors import ConfigError

BUSY_S: Final = 5.0
"""How long a write to SQLite waits for another process."""

MOST_IDLE: Final = 2
"""Idle connections to SQLite that are kept open for small, frequent writes."""

POOL_SIZE: Final = 4
MAX_OVERFLOW: Final = 12
CONNECT_S: Final = 5
ANSWER_S: Final = 10.0
"""How long a statement waits for PostgreSQL, which may hang without closing its connections."""


class Engines(NamedTuple):
    """Engines of one database.

    Attributes:
        reads: For reads; each statement sees what is committed.
        flushed: For commits that are flushed to the disk.
        delayed: For small, frequent commits, which survive a crash of the process but perhaps not a power failure.
        upgrades: For changes of the schema, which may take long.
    """

    reads: Engine
    flushed: Engine
    delayed: Engine
    upgrades: Engine


def sqlite_engines(file: Path) -> Engines:
    """Return engines for an SQLite file. Flushed connections are opened for each use, delayed ones are reused."""
    url = URL.create("sqlite", database=str(file))
    options: dict[str, Any] = {
        "hide_parameters": True,
        "connect_args": {"timeout": BUSY_S, "check_same_thread": False},
    }
    flushed = create_engine(url, poolclass=NullPool, **options)
    delayed = create_engine(url, pool_size=MOST_IDLE, max_overflow=-1, pool_use_lifo=True, **options)
    for engine, mode in ((flushed, "FULL"), (delayed, "NORMAL")):
        _set_on_connect(engine, f"PRAGMA synchronous = {mode}", "PRAGMA secure_delete = ON")
    return Engines(flushed, flushed, delayed, flushed)


def postgresql_engines(url: str) -> Engines:
    """Return engines for the PostgreSQL database at ``url``.

    Raises:
        ConfigError: The address is not valid, or psycopg is not installed.
    """
    try:
        parsed = make_url(url).set(drivername="postgresql+psycopg")
    except (ArgumentError, ValueError):
        message = "store.url is not an address of a database; write it as postgresql://USER:PASSWORD@HOST:5432/NAME."
        raise ConfigError(message, param="url") from None
    options: dict[str, Any] = {
        "hide_parameters": True,
        "pool_size": POOL_SIZE,
        "max_overflow": MAX_OVERFLOW,
        "pool_pre_ping": True,
        "connect_args": {"connect_timeout": CONNECT_S, "application_name": "diffserve"},
    }
    try:
        flushed = create_engine(parsed, **options)
        delayed = create_engine(parsed, **options)
        upgrades = create_engine(parsed, poolclass=NullPool, hide_parameters=True, connect_args=options["connect_args"])
    except ModuleNotFoundError as error:
        message = f"store.url needs {error.name}, which is not installed: pip install 'diffserve[postgresql]'."
        raise ConfigError(message, param="url") from None
    for engine in (flushed, delayed):
        _limit_answers(engine)
    _set_on_connect(delayed, "SET synchronous_commit = off")
    return Engines(flushed.execution_options(isolation_level="AUTOCOMMIT"), flushed, delayed, upgrades)


def _limit_answers(engine: Engine) -> None:
    """Close a connection whose server does not answer within ``ANSWER_S``; psycopg itself would wait for ever."""
    import psycopg

    class LimitedConnection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return super().wait(_limited(gen), *arguments, **keywords)
            except TimeoutError:
                self.close()
                raise psycopg.OperationalError(f"the database did not answer within {ANSWER_S:g} s") from None

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: object, _record: object, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        return LimitedConnection.connect(*arguments, **keywords)


def _limited(work: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run psycopg's generator ``work``, which gets a false value while nothing arrives. Raises TimeoutError."""
    end_s = time.monotonic() + ANSWER_S
    try:
        io_state = next(work)
        while True:
            ready = yield io_state
            if not ready and time.monotonic() > end_s:
                raise TimeoutError
            io_state = work.send(ready)
    except StopIteration as end:
        return end.value


def _set_on_connect(engine: Engine, *statements: str) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        cursor.close()
        connection.commit()

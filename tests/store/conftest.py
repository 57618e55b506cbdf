"""Databases for tests of the store: every test that takes one runs with SQLite and with PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffserve.store import Database
from tests.postgresql import PostgreSQL, running_postgresql

OpenDatabase = Callable[[], Database]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    with running_postgresql() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def open_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenDatabase]:
    """Return a function that opens the same database in ``tmp_path`` at each call."""
    opened: list[Database] = []

    def open_again() -> Database:
        opened.append(Database(tmp_path, url))
        return opened[-1]

    url = request.getfixturevalue("postgresql").create_database() if request.param == "postgresql" else ""
    yield open_again
    for database in opened:
        database.close()


@pytest.fixture
def database(open_database: OpenDatabase) -> Database:
    return open_database()

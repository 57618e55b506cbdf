"""SQLite schemas of releases before Alembic, and a row for each of their tables."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from diffserve.store.database import FILE

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
"""Scripts that led from each ``user_version`` to the next one."""

KEY: Final = ("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)", ("key-1", "app", b"digest", "generate", None, 1.0, None))
ROWS: Final = (
    (KEY, ("INSERT INTO secrets VALUES (?, ?)", ("sessions", b"s" * 32))),
    (
        ("INSERT INTO files VALUES (7, 'file-1', 'key-1', 'batch', 'a.jsonl', 3, 1.0, 9e9)", ()),
        (
            "INSERT INTO batches VALUES (8, 'batch_1', 'key-1', '/v1/images/generations', 'file-1', 'file-2', "
            "'file-3', 'in_progress', '{\"for\":\"me\"}', '', '{\"in_progress\":2.0}', 1.0, 9e9, 3, 1, 0, 4, 0)",
            (),
        ),
        ("INSERT INTO batch_lines VALUES ('batch_1', 2)", ()),
        ('INSERT INTO replies VALUES (?, ?, 200, \'{"a":"b"}\', ?, 9e9)', (b"name", b"request", b"body")),
        (
            "INSERT INTO history (number, id, owner, file, words, model, recipe, created_s) "
            "VALUES (9, 'hist_1', 'key-1', 'a.png', 'a red fox', 'embedded', '{\"seed\":1}', 1.5)",
            (),
        ),
        ("INSERT INTO usage VALUES ('key-1', '2026-01-02', 1, 2, 3, 4, 5)", ()),
    ),
    (("UPDATE keys SET share = 2.5", ()),),
    (("INSERT INTO ended_sessions VALUES (3, 'signature', 9e9)", ()),),
    (
        (
            "INSERT INTO experiments VALUES (4, 'exp_1', 'key-1', 'embedded', '{\"steps\":[1]}', 'completed', '', "
            "'{\"completed\":3.0}', 1.0, 2, NULL)",
            (),
        ),
    ),
    (("UPDATE history SET favorite = 1", ()),),
)
"""Statements that fill what each version introduced."""


def create_old_database(folder: Path, version: int) -> None:
    """Create the database of the ``user_version`` ``version``, with a row in every table."""
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.execute("PRAGMA journal_mode = WAL")
        for script, rows in zip(MIGRATIONS[:version], ROWS, strict=False):
            connection.executescript(script)
            for statement, values in rows:
                connection.execute(statement, values)
        connection.execute(f"PRAGMA user_version = {version}")

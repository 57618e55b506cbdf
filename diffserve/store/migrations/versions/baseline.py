"""Baseline: the tables of SQLite's ``user_version`` 6. Databases of versions 1 to 6 receive what they lack."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

LAST_USER_VERSION: Final = 6
"""Version that earlier releases find in SQLite's ``user_version``: they can use a database of this revision."""

INTEGER: Final[sa.types.TypeEngine[Any]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
FLOAT: Final[sa.types.TypeEngine[Any]] = sa.Double().with_variant(sa.REAL(), "sqlite")


def upgrade() -> None:
    """Create all tables and indexes that do not exist, and add columns that versions 3 and 6 introduced."""
    _add_column_if_missing("keys", _column("share", FLOAT, server_default=sa.text("1.0")))
    _add_column_if_missing("history", _column("favorite", INTEGER, server_default=sa.text("0")))
    _create_tables_of_keys()
    _create_tables_of_files()
    _create_tables_of_images()
    if op.get_context().dialect.name == "sqlite":
        op.execute(f"PRAGMA user_version = {LAST_USER_VERSION}")


def _create_tables_of_keys() -> None:
    _create_table(
        "keys",
        _text("id", primary_key=True),
        _text("name"),
        _column("digest", sa.LargeBinary(), unique=True),
        _text("scopes"),
        _column("requests_per_minute", INTEGER, nullable=True),
        _column("created_s", FLOAT),
        _column("revoked_s", FLOAT, nullable=True),
        _column("share", FLOAT, server_default=sa.text("1.0")),
    )
    is_active = sa.text("revoked_s IS NULL")
    op.create_index(
        "keys_by_name", "keys", ["name"],
        unique=True, sqlite_where=is_active, postgresql_where=is_active, if_not_exists=True,
    )  # fmt: skip
    _create_table("secrets", _text("name", primary_key=True), _column("value", sa.LargeBinary()))
    _create_table("ended_sessions", _number(), _text("signature", unique=True), _column("expires_s", FLOAT))
    _create_table(
        "usage",
        _text("owner", primary_key=True),
        _text("day", primary_key=True),
        *_integers("requests", "pictures", "evaluations", "input_tokens", "output_tokens"),
        has_rowid=False,
    )


def _create_tables_of_files() -> None:
    _create_table(
        "files",
        _number(),
        _text("id", unique=True),
        *_texts("owner", "purpose", "filename"),
        *_integers("num_bytes"),
        *_floats("created_s", "expires_s"),
    )
    _create_index("files_by_owner", "files", "owner", "number")
    _create_table(
        "batches",
        _number(),
        _text("id", unique=True),
        *_texts("owner", "endpoint", "input_file", "output_file", "error_file", "status", "metadata", "error", "times"),
        *_floats("created_s", "expires_s"),
        *_integers("num_lines", "num_completed", "num_failed", "output_bytes", "error_bytes"),
    )
    _create_index("batches_by_owner", "batches", "owner", "number")
    _create_index("batches_by_status", "batches", "status")
    line = _column("line", INTEGER, primary_key=True, autoincrement=False)
    _create_table("batch_lines", _text("batch", primary_key=True), line, has_rowid=False)
    _create_table(
        "replies",
        _column("id", sa.LargeBinary(), primary_key=True),
        _column("request", sa.LargeBinary()),
        *_integers("status"),
        _text("headers"),
        _column("body", sa.LargeBinary()),
        *_floats("created_s"),
    )
    _create_index("replies_by_age", "replies", "created_s")


def _create_tables_of_images() -> None:
    _create_table(
        "history",
        _number(),
        _text("id", unique=True),
        *_texts("owner", "file", "words", "model", "recipe"),
        *_floats("created_s"),
        _column("favorite", INTEGER, server_default=sa.text("0")),
    )
    _create_index("history_by_owner", "history", "owner", "number")
    _create_index("history_by_age", "history", "created_s")
    _create_index("history_by_file", "history", "file", unique=True)
    _create_table(
        "experiments",
        _number(),
        _text("id", unique=True),
        *_texts("owner", "model", "plan", "status", "error", "times"),
        *_floats("created_s"),
        *_integers("num_images"),
        _column("estimated_s", FLOAT, nullable=True),
    )
    _create_index("experiments_by_owner", "experiments", "owner", "number")
    _create_index("experiments_by_status", "experiments", "status")


def _create_table(name: str, *columns: sa.Column[Any], has_rowid: bool = True) -> None:
    has_number = columns[0].name == "number"
    op.create_table(
        name, *columns, if_not_exists=True,
        sqlite_strict=True, sqlite_autoincrement=has_number, sqlite_with_rowid=has_rowid,
    )  # fmt: skip


def _create_index(name: str, table: str, *columns: str, unique: bool = False) -> None:
    op.create_index(name, table, columns, unique=unique, if_not_exists=True)


def _add_column_if_missing(table: str, column: sa.Column[Any]) -> None:
    """Add ``column`` to a table that exists without it."""
    inspector = sa.inspect(op.get_bind())
    if inspector.has_table(table) and column.name not in {each["name"] for each in inspector.get_columns(table)}:
        op.add_column(table, column)


def _column(name: str, kind: sa.types.TypeEngine[Any], *, nullable: bool = False, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=nullable, **options)


def _number() -> sa.Column[Any]:
    return _column("number", INTEGER, primary_key=True)


def _text(name: str, **options: Any) -> sa.Column[Any]:
    return _column(name, sa.Text(), **options)


def _texts(*names: str) -> list[sa.Column[Any]]:
    return [_text(name) for name in names]


def _integers(*names: str) -> list[sa.Column[Any]]:
    return [_column(name, INTEGER) for name in names]


def _floats(*names: str) -> list[sa.Column[Any]]:
    return [_column(name, FLOAT) for name in names]

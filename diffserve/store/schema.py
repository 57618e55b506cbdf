"""Tables of the store, for SQLite and PostgreSQL. A change of them needs a revision in ``migrations/versions``."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    REAL,
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeEngine

REVISIONS: Final = ("0001", "0002", "0003", "0004", "0005", "0006")
"""Known schema revisions of Alembic, the oldest first."""

INTEGER: Final[TypeEngine[Any]] = BigInteger().with_variant(Integer(), "sqlite")
FLOAT: Final[TypeEngine[Any]] = Double().with_variant(REAL(), "sqlite")
metadata = MetaData()


def _table(name: str, *parts: SchemaItem, has_number: bool = False, has_rowid: bool = True) -> Table:
    """Define a table; with ``has_number``, its primary key counts the rows in the order of their insertion."""
    number = [Column("number", INTEGER, primary_key=True)] if has_number else []
    return Table(
        name, metadata, *number, *parts,
        sqlite_strict=True, sqlite_autoincrement=has_number, sqlite_with_rowid=has_rowid,
    )  # fmt: skip


def _text(name: str, *, key: bool = False, unique: bool = False, default: str | None = None) -> Column[Any]:
    server_default = None if default is None else text(default)
    return Column(name, Text, primary_key=key, nullable=False, unique=unique or None, server_default=server_default)


def _integer(name: str, *, key: bool = False, default: str | None = None) -> Column[Any]:
    server_default = None if default is None else text(default)
    return Column(
        name, INTEGER, primary_key=key, nullable=False, autoincrement=False, server_default=server_default
    )  # fmt: skip


def _seconds(name: str) -> Column[Any]:
    return Column(name, FLOAT, nullable=False)


def _binary(name: str, *, key: bool = False, unique: bool = False) -> Column[Any]:
    return Column(name, LargeBinary, primary_key=key, nullable=False, unique=unique or None)


keys = _table(
    "keys",
    _text("id", key=True),
    _text("name"),
    _binary("digest", unique=True),
    _text("scopes"),
    Column("requests_per_minute", INTEGER),
    _seconds("created_s"),
    Column("revoked_s", FLOAT),
    Column("share", FLOAT, nullable=False, server_default=text("1.0")),
    Column("images_per_day", INTEGER),
    Column("device_seconds_per_day", FLOAT),
    _integer("num_changes", default="0"),
    Index(
        "keys_by_name",
        "name",
        unique=True,
        sqlite_where=text("revoked_s IS NULL"),
        postgresql_where=text("revoked_s IS NULL"),
    ),
)
secrets = _table("secrets", _text("name", key=True), _binary("value"))
ended_sessions = _table("ended_sessions", _text("signature", unique=True), _seconds("expires_s"), has_number=True)
files = _table(
    "files",
    _text("id", unique=True),
    _text("owner"),
    _text("purpose"),
    _text("filename"),
    _integer("num_bytes"),
    _seconds("created_s"),
    _seconds("expires_s"),
    Index("files_by_owner", "owner", "number"),
    has_number=True,
)
batches = _table(
    "batches",
    _text("id", unique=True),
    _text("owner"),
    _text("endpoint"),
    _text("input_file"),
    _text("output_file"),
    _text("error_file"),
    _text("status"),
    _text("metadata"),
    _text("error"),
    _text("times"),
    _seconds("created_s"),
    _seconds("expires_s"),
    _integer("num_lines"),
    _integer("num_completed"),
    _integer("num_failed"),
    _integer("output_bytes"),
    _integer("error_bytes"),
    _text("base_url", default="''"),
    Index("batches_by_owner", "owner", "number"),
    Index("batches_by_status", "status"),
    has_number=True,
)
batch_lines = _table("batch_lines", _text("batch", key=True), _integer("line", key=True), has_rowid=False)
replies = _table(
    "replies",
    _binary("id", key=True),
    _binary("request"),
    _integer("status"),
    _text("headers"),
    _binary("body"),
    _seconds("created_s"),
    Index("replies_by_age", "created_s"),
)
history = _table(
    "history",
    _text("id", unique=True),
    _text("owner"),
    _text("file"),
    _text("words"),
    _text("model"),
    _text("recipe"),
    _seconds("created_s"),
    _integer("favorite", default="0"),
    Index("history_by_owner", "owner", "number"),
    Index("history_by_age", "created_s"),
    Index("history_by_file", "file", unique=True),
    has_number=True,
)
usage = _table(
    "usage",
    _text("owner", key=True),
    _text("day", key=True),
    _integer("requests"),
    _integer("pictures"),
    _integer("evaluations"),
    _integer("input_tokens"),
    _integer("output_tokens"),
    Column("device_s", FLOAT, nullable=False, server_default=text("0.0")),
    has_rowid=False,
)
experiments = _table(
    "experiments",
    _text("id", unique=True),
    _text("owner"),
    _text("model"),
    _text("plan"),
    _text("status"),
    _text("error"),
    _text("times"),
    _seconds("created_s"),
    _integer("num_images"),
    Column("estimated_s", FLOAT),
    Index("experiments_by_owner", "owner", "number"),
    Index("experiments_by_status", "status"),
    has_number=True,
)
jobs = _table(
    "jobs",
    _text("id"),
    _text("owner"),
    _text("endpoint"),
    _text("status"),
    _text("error"),
    _text("events"),
    _text("holder"),
    _integer("token"),
    _integer("attempts"),
    _integer("losses"),
    _seconds("created_s"),
    _seconds("expires_s"),
    _integer("result_status"),
    _integer("result_bytes"),
    _text("output", default="'{}'"),
    _integer("body_bytes", default="0"),
    Column("prompt", Text),
    _text("digest", default="''"),
    UniqueConstraint("owner", "id"),
    Index("jobs_by_owner", "owner", "number"),
    Index("jobs_by_status", "status", "owner", "number", "body_bytes"),
    has_number=True,
)
job_bodies = _table(
    "job_bodies",  # apart from the jobs, so that these are read and changed without it
    _integer("number", key=True),
    _text("body"),
)
webhook_endpoints = _table(
    "webhook_endpoints",
    _text("id", unique=True),
    _text("owner"),
    _text("name"),
    _text("url"),
    _text("event_types"),
    _binary("secret"),
    _binary("old_secret"),
    _seconds("old_secret_until_s"),
    _seconds("created_s"),
    _seconds("updated_s"),
    _text("disabled"),
    _text("last_error"),
    Index("webhook_endpoints_by_owner", "owner", "number"),
    has_number=True,
)
deliveries = _table(
    "deliveries",
    _text("recipient"),
    _text("event"),
    _text("body"),
    _integer("job"),
    _integer("attempts"),
    _seconds("created_s"),
    _seconds("next_s"),
    Index("deliveries_by_time", "next_s"),
    Index("deliveries_by_recipient", "recipient"),
    has_number=True,
)

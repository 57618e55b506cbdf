"""Schema of a database: its revision, the backup before an upgrade, and the upgrade by Alembic."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, inspect, text

from diffserve.api.errors import ConfigError
from diffserve.store.errors import StoreError
from diffserve.store.schema import REVISIONS

FOLDER: Final = Path(__file__).with_name("migrations")
LAST_USER_VERSION: Final = 7
"""Highest ``user_version`` of SQLite; Alembic's revisions count the schemas from 6 on."""

MAX_CHECKED_BYTES: Final = 64 << 20
"""SQLite files up to this size are checked for damage when they are opened."""


def check_revision(connection: Connection, address: str) -> str | None:
    """Return the revision of a database, which is read before any write; None if Alembic has not migrated it yet.

    Args:
        connection: A connection to the database.
        address: The file, or the address without its password, for error messages.

    Raises:
        ConfigError: The schema is from a newer version.
    """
    revision = _read_revision(connection)
    version = _user_version(connection)
    if version > LAST_USER_VERSION or (revision is not None and revision not in REVISIONS):
        stored = f"version {version}" if revision is None else f"schema {revision}"
        is_file = connection.dialect.name == "sqlite"
        other = "choose another folder (serve.data_dir)" if is_file else "choose another database (store.url)"
        raise ConfigError(
            f"{address} was written by a newer diffserve ({stored}, this one supports up to schema {REVISIONS[-1]}); "
            f"upgrade it (pip install -U diffserve), or {other}.",
            param="data_dir" if is_file else "url",
        )
    return revision


def check_file(connection: Connection, file: Path) -> None:
    """Check an SQLite file for damage unless it is large.

    Raises:
        StoreError: The file is damaged.
    """
    if file.stat().st_size > MAX_CHECKED_BYTES:
        return
    if connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one() != "ok":
        raise StoreError("it is damaged")


def back_up(connection: Connection, file: Path, revision: str | None) -> None:
    """Copy an SQLite file that is about to be upgraded to a file next to it; a new database needs no copy."""
    version = _user_version(connection)
    if revision == REVISIONS[-1] or (revision is None and version == 0):
        return
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    connection.exec_driver_sql("VACUUM INTO ?", (str(part),))
    part.chmod(0o600)
    part.replace(file.with_name(f"{file.name}.version-{version}" if revision is None else f"{file.name}.{revision}"))


def upgrade(connection: Connection) -> None:
    """Upgrade the schema to the newest revision within the current transaction, which excludes other writers."""
    if _read_revision(connection) == REVISIONS[-1]:
        return
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    command.upgrade(config, "head")


def _read_revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return revision


def _user_version(connection: Connection) -> int:
    """Return SQLite's ``user_version``, 0 for a new file and for PostgreSQL."""
    if connection.dialect.name != "sqlite":
        return 0
    return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())

"""Tests of the schema: upgrades from every released version, newer and damaged databases."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, select, text

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.service.http.errors import expected_error, reply_to
from diffserve.store import Database, Keys
from diffserve.store.batches import Batches
from diffserve.store.database import FILE, PageSelection
from diffserve.store.errors import StoreError
from diffserve.store.experiments import Experiments
from diffserve.store.files import Files
from diffserve.store.history import EntryFilter, History
from diffserve.store.jobs import Jobs
from diffserve.store.migration import FOLDER, LAST_USER_VERSION
from diffserve.store.replies import Replies, Reply
from diffserve.store.schema import REVISIONS, metadata
from diffserve.store.schema import jobs as jobs_table
from diffserve.store.usage import Usage, UsageCounts
from tests.store.conftest import OpenDatabase
from tests.store.old_schemas import MIGRATIONS, create_old_database

FIRST = PageSelection(10)
NEW_TABLES = ("webhook_endpoints", "deliveries", "job_bodies")
ADDED_COLUMNS = {
    "keys": ("images_per_day", "device_seconds_per_day", "num_changes"),
    "usage": ("device_s",),
    "batches": ("base_url",),
}
"""Columns that later revisions than the first have added."""


def structure(file: Path) -> list[object]:
    """Return tables, columns, keys and indexes of an SQLite file, apart from Alembic's table."""
    with closing(sqlite3.connect(file)) as connection:
        tables = connection.execute("PRAGMA table_list").fetchall()
        parts: list[object] = [
            row for row in sorted(tables) if row[1] not in ("alembic_version", "sqlite_schema", "sqlite_temp_schema")
        ]
        for table in sorted(metadata.tables):
            for _, name, kind, not_null, default, key in connection.execute(f"PRAGMA table_info({table})"):
                parts.append((table, name, kind, bool(not_null or key), default, key))
            for _, index, unique, _, partial in connection.execute(f"PRAGMA index_list({table})"):
                columns = [row[2] for row in connection.execute(f"PRAGMA index_info({index})")]
                parts.append((table, unique, partial, columns))
    return sorted(parts, key=repr)


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_every_old_database_keeps_its_rows(tmp_path: Path, version: int) -> None:
    create_old_database(tmp_path, version)
    database = Database(tmp_path)
    Database(tmp_path / "new")
    assert structure(tmp_path / FILE) == structure(tmp_path / "new" / FILE)
    [key] = Keys(database).all()
    assert (key.id, key.scopes, key.share) == ("key-1", ("generate",), 2.5 if version >= 3 else 1.0)
    assert database.secret("sessions") == b"s" * 32
    with database.reading() as connection:
        num_rows = {
            name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }
    first_versions = {"keys": 1, "secrets": 1, "ended_sessions": 4, "experiments": 5}
    first_versions |= dict.fromkeys(("jobs", *NEW_TABLES), 7)
    assert num_rows == {name: int(version >= first_versions.get(name, 2)) for name in metadata.tables}
    with closing(sqlite3.connect(tmp_path / f"{FILE}.version-{version}")) as backup:
        assert backup.execute("PRAGMA user_version").fetchone() == (version,)
        assert backup.execute("SELECT name FROM keys").fetchone() == ("app",)
    backups = set(tmp_path.glob("*.version-*"))
    Database(tmp_path)
    assert set(tmp_path.glob("*.version-*")) == backups, "only an upgrade makes a backup"


def test_every_table_of_the_last_version_is_read_as_before(tmp_path: Path) -> None:
    create_old_database(tmp_path, len(MIGRATIONS))
    database = Database(tmp_path)
    files = Files(database, 100)
    batches = Batches(database, files)
    [batch] = batches.unfinished()
    assert (batch.metadata, batch.times, batch.num_lines) == ({"for": "me"}, {"in_progress": 2.0}, 3)
    assert batches.done_lines(batch) == {2}
    assert Replies(database).get(b"name") == Reply(b"request", 200, {"a": "b"}, b"body")
    page = History(database).page("key-1", FIRST, EntryFilter(("Fox",), favorite=True))
    assert page is not None
    assert [(entry.id, entry.recipe) for entry in page[0]] == [("hist_1", {"seed": 1})]
    assert Usage(database).days("2026-01-01") == [("key-1", "2026-01-02", UsageCounts(1, 2, 3, 4, 5))]
    experiment = Experiments(database).get("exp_1")
    assert experiment is not None
    assert (experiment.plan, experiment.estimated_s) == ({"steps": [1]}, None)
    assert Keys(database).ended_sessions() == {"signature"}
    added = batches.add("key-1", "/v1/images/generations", "file-1", 1, {})
    batch_page = batches.page("key-1", PageSelection(1))
    assert batch_page is not None
    assert (batch_page[0][0].id, batch_page[1]) == (added.id, True), "numbers continue after those of the old database"


def test_migrations_lead_to_the_schema_of_the_tables(database: Database) -> None:
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []
    script = ScriptDirectory(FOLDER)
    assert [revision.revision for revision in script.walk_revisions()][::-1] == list(REVISIONS)


def test_a_database_of_an_earlier_revision_is_backed_up_and_upgraded(tmp_path: Path) -> None:
    create_old_database(tmp_path, len(MIGRATIONS))
    Database(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:  # as revision 0001 left it
        for table in ("jobs", *NEW_TABLES):
            connection.execute(f"DROP TABLE {table}")
        for table, columns in ADDED_COLUMNS.items():
            for column in columns:
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
        connection.execute("PRAGMA user_version = 6")
    assert [key.name for key in Keys(Database(tmp_path)).all()] == ["app"]
    with closing(sqlite3.connect(tmp_path / f"{FILE}.0001")) as backup:
        assert backup.execute("SELECT version_num FROM alembic_version").fetchone() == ("0001",)
        assert backup.execute("SELECT name FROM keys").fetchone() == ("app",)
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (LAST_USER_VERSION,)


def test_an_earlier_revision_is_upgraded_with_its_jobs(open_database: OpenDatabase) -> None:
    body = '{"prompt": "a fox on the schöne beach"}'
    database = open_database()
    jobs = Jobs(database)
    jobs.add("key-1", "done", "/v1/images/generations", body, 60.0)
    job = jobs.claim("server")
    assert job is not None
    jobs.finish(job, "succeeded", (200, b"{}"))
    jobs.add("key-1", "one", "/v1/images/generations", body, 60.0)
    with database.writing() as connection:  # as revision 0004 left it
        for statement in (
            "DROP INDEX jobs_by_status",
            "CREATE INDEX jobs_by_status ON jobs (status, owner, number)",
            "ALTER TABLE jobs DROP COLUMN body_bytes",
            "ALTER TABLE jobs DROP COLUMN prompt",
            "ALTER TABLE jobs DROP COLUMN digest",
            "ALTER TABLE jobs ADD COLUMN body TEXT NOT NULL DEFAULT ''",
            "UPDATE jobs SET body = (SELECT body FROM job_bodies)",
            "DROP TABLE job_bodies",
            "ALTER TABLE batches DROP COLUMN base_url",
            "UPDATE alembic_version SET version_num = '0004'",
        ):
            connection.execute(text(statement))
    upgraded = open_database()
    jobs = Jobs(upgraded)
    for name, kept_body in (("one", body), ("done", "")):
        job = jobs.get("key-1", name)
        assert job is not None
        assert (job.prompt, jobs.body(job)) == ("a fox on the schöne beach", kept_body)
        assert not jobs.add("key-1", name, job.endpoint, body.replace(": ", ":"), 60.0)[1], "it is the same job"
    with upgraded.reading() as connection:
        sizes = connection.execute(select(jobs_table.c.body_bytes).order_by(jobs_table.c.number)).scalars().all()
        assert sizes == [0, len(body) + 1]
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, metadata) == []
    with pytest.raises(InvalidRequest, match=r"have 40 bytes and this one has 40; at most 79 are allowed"):
        Jobs(upgraded, max_bytes=79).add("key-1", "two", "/v1/images/generations", body, 60.0)


def test_a_newer_database_is_refused_with_the_command_that_upgrades(open_database: OpenDatabase) -> None:
    database = open_database()
    with database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match=r"written by a newer diffserve \(schema 9999.*pip install -U diffserve"):
        open_database()
    with database.reading() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"


def test_a_newer_user_version_is_refused(tmp_path: Path) -> None:
    create_old_database(tmp_path, len(MIGRATIONS))
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute(f"PRAGMA user_version = {LAST_USER_VERSION + 1}")
    content = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"was written by a newer diffserve \(version 8"):
        Database(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content


@pytest.mark.parametrize("content", [None, b"", b"not a database" * 1000])
def test_a_database_that_is_lost_while_a_server_runs_is_answered_with_503(
    tmp_path: Path, content: bytes | None
) -> None:
    database = Database(tmp_path)
    keys = Keys(database)
    with database.in_use():
        for file in tmp_path.glob(f"{FILE}*"):
            file.unlink()
        if content is not None:
            (tmp_path / FILE).write_bytes(content)
        for use in (keys.all, lambda: keys.add("app")):
            with pytest.raises(StoreError) as failed:
                use()
            expected = expected_error(failed.value)
            assert expected is not None
            assert (reply_to(expected).status, expected.code) == (503, "database_unreachable")


def test_a_broken_database_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=r"cannot be used \(file is not a database\); move it away"):
        Database(tmp_path)
    assert (tmp_path / FILE).read_bytes() == b"not a database" * 100
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Database(tmp_path / "file" / "below")


def test_a_damaged_or_read_only_database_is_reported_and_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        Keys(Database(tmp_path)).add(f"app-{number}")
    intact = (tmp_path / FILE).read_bytes()
    damaged = intact[:4096] + b"\xff" * 8192 + intact[12288:]
    (tmp_path / FILE).write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"cannot be used .* move it away or choose another folder"):
        Database(tmp_path)
    assert (tmp_path / FILE).read_bytes() == damaged

    def refuse(*_: object) -> int:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr("diffserve.store.database.os.open", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written: Read-only file system; fix it or choose another"):
        Database(tmp_path)
    assert (tmp_path / FILE).read_bytes() == damaged

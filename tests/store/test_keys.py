"""Tests of API keys and of the database file."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diffserve.api.errors import ConfigError, InvalidRequest
from diffserve.store import Database, Keys
from diffserve.store.database import FILE, MIGRATIONS
from diffserve.store.keys import digest_of


def test_only_the_digest_of_a_key_is_stored(tmp_path: Path) -> None:
    keys = Keys(Database(tmp_path))
    text, key = keys.add("app", ["generate", "metrics"], 60)
    assert len(text) > 40
    assert key.digest == digest_of(text)
    assert all(text.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    assert keys.all() == Keys(Database(tmp_path)).all() == [key]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    revoked = keys.revoke("app")
    assert (revoked.id, keys.all()[0].revoked_s is not None) == (key.id, True)
    again, other = keys.add("app")
    assert (again != text, other.scopes, other.requests_per_minute) == (True, ("generate",), None)


def test_invalid_keys_are_refused(tmp_path: Path) -> None:
    keys = Keys(Database(tmp_path))
    keys.add("app")
    for name, scopes, rate, message in (
        ("", ["generate"], None, "got ''."),
        (
            "../x",
            ["generate"],
            None,
            "name must be 1 to 64 letters, digits, dots, dashes, underscores or @",
        ),
        ("a" * 65, ["generate"], None, "got 'aaa"),
        ("b", ["all"], None, "scopes must be one or more of generate, metrics, admin, got 'all'."),
        ("b", [], None, "got none."),
        ("b", ["generate"], 0, "requests per minute must be between 1 and 1000000, or omitted for no limit, got 0."),
        ("app", ["generate"], None, "a key named 'app' already exists"),
    ):
        with pytest.raises(InvalidRequest, match=message.replace(".", r"\.")):
            keys.add(name, scopes, rate)
    with pytest.raises(InvalidRequest, match="there is no active key 'x'"):
        keys.revoke("x")


def test_a_newer_or_broken_database_is_left_unchanged(tmp_path: Path) -> None:
    Database(tmp_path)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(ConfigError, match="was written by a newer diffserve"):
        Database(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / FILE).write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=r"cannot be used \(file is not a database\); move it away"):
        Database(tmp_path / "broken")
    assert (tmp_path / "broken" / FILE).read_bytes() == b"not a database" * 100
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Database(tmp_path / "file" / "below")


def test_concurrent_processes_create_one_database_and_one_secret(tmp_path: Path) -> None:
    def open_database(number: int) -> bytes:
        database = Database(tmp_path)
        Keys(database).add(f"app-{number}")
        return database.secret("sessions")

    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(open_database, range(16)))
    assert len(secrets) == 1
    assert len(Keys(Database(tmp_path)).all()) == 16


@pytest.mark.slow
def test_the_command_line_creates_lists_and_revokes_keys(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "diffserve", "keys", *arguments, "--data-dir", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    added = run("add", "app", "--rate", "60")
    assert (added.returncode, added.stdout[:3]) == (0, "ds-")
    assert Keys(Database(tmp_path)).all()[0].digest == digest_of(added.stdout.strip())
    assert "app" in run("list").stdout
    assert run("revoke", "app").returncode == 0
    second_revoke = run("revoke", "app")
    assert (second_revoke.returncode, second_revoke.stderr.count("\n")) == (2, 1)

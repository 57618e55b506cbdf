"""Keys and the file that keeps them."""

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


def test_a_key_is_told_once_and_kept_as_its_digest_alone(tmp_path: Path) -> None:
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


def test_wrong_keys_are_refused(tmp_path: Path) -> None:
    keys = Keys(Database(tmp_path))
    keys.add("app")
    for name, scopes, rate, said in (
        ("", ["generate"], None, "the name is ''"),
        ("../x", ["generate"], None, "the name is '../x'"),
        ("a" * 65, ["generate"], None, "the name is"),
        ("b", ["all"], None, "scopes are 'all'; choose of generate, metrics, admin"),
        ("b", [], None, "scopes are none"),
        ("b", ["generate"], 0, "requests a minute are 0"),
        ("app", ["generate"], None, "there is a key 'app' already"),
    ):
        with pytest.raises(InvalidRequest, match=said.replace(".", r"\.")):
            keys.add(name, scopes, rate)
    with pytest.raises(InvalidRequest, match="there is no key 'x'"):
        keys.revoke("x")


def test_a_file_of_the_future_or_a_broken_one_is_left_as_it_is(tmp_path: Path) -> None:
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


def test_many_at_once_make_one_file_and_one_secret(tmp_path: Path) -> None:
    def enter(number: int) -> bytes:
        database = Database(tmp_path)
        Keys(database).add(f"app-{number}")
        return database.secret("sessions")

    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(enter, range(16)))
    assert len(secrets) == 1
    assert len(Keys(Database(tmp_path)).all()) == 16


@pytest.mark.slow
def test_the_command_line_makes_lists_and_revokes(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "diffserve", "keys", *arguments, "--data-dir", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    made = run("add", "app", "--rate", "60")
    assert (made.returncode, made.stdout[:3]) == (0, "ds-")
    assert Keys(Database(tmp_path)).all()[0].digest == digest_of(made.stdout.strip())
    assert "app" in run("list").stdout
    assert run("revoke", "app").returncode == 0
    twice = run("revoke", "app")
    assert (twice.returncode, twice.stderr.count("\n")) == (2, 1)

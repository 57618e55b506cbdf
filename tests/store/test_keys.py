"""Tests of API keys."""

from __future__ import annotations

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.keys import KeyRing
from diffserve.store import Database, Keys
from diffserve.store.database import FILE
from diffserve.store.keys import digest_of, user_id
from tests.store.conftest import OpenDatabase


def test_only_the_digest_of_a_key_is_stored(open_database: OpenDatabase, tmp_path: Path) -> None:
    database = open_database()
    keys = Keys(database)
    text, key = keys.add("app", ["generate", "metrics"], 60)
    assert len(text) > 40
    assert key.digest == digest_of(text)
    assert all(text.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    assert keys.all() == Keys(open_database()).all() == [key]
    if not database.is_postgresql:
        assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    revoked = keys.revoke("app")
    assert (revoked.id, keys.all()[0].revoked_s is not None) == (key.id, True)
    again, other = keys.add("app")
    assert (again != text, other.scopes, other.requests_per_minute) == (True, ("generate",), None)


def test_invalid_keys_are_refused(database: Database) -> None:
    keys = Keys(database)
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


def test_concurrent_processes_create_one_database_and_one_secret(open_database: OpenDatabase) -> None:
    def add_key(number: int) -> bytes:
        database = open_database()
        Keys(database).add(f"app-{number}")
        return database.secret("sessions")

    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(add_key, range(16)))
    assert len(secrets) == 1
    assert len(Keys(open_database()).all()) == 16


def test_a_change_of_keys_or_sessions_changes_the_mark(open_database: OpenDatabase) -> None:
    keys, other = Keys(open_database()), Keys(open_database())
    marks = [other.mark()]
    keys.add("app")
    marks.append(other.mark())
    keys.revoke("app")
    marks.append(other.mark())
    for _ in range(2):
        keys.end_session("signature", 9e9)
        marks.append(other.mark())
    assert (len(set(marks)), marks[-1] == marks[-2]) == (4, True)
    assert other.ended_sessions() == {"signature"}


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


def test_quotas_can_be_changed_and_change_the_mark(open_database: OpenDatabase) -> None:
    keys, other = Keys(open_database()), Keys(open_database())
    keys.add("app", images_per_day=5, device_seconds_per_day=1.5)
    mark = other.mark()
    changed = keys.change_quotas("app", images_per_day=0)
    assert other.all() == [changed]
    assert (changed.images_per_day, changed.device_seconds_per_day, other.mark() != mark) == (0, 1.5, True)
    with pytest.raises(InvalidRequest, match=r"images-per-day must be between 0 .no quota. and 1000000000, got -1"):
        keys.change_quotas("app", images_per_day=-1)
    with pytest.raises(InvalidRequest, match="there is no active key 'none'"):
        keys.change_quotas("none", images_per_day=1)


def test_a_user_is_blocked_and_admitted_again_whatever_the_clock_says(open_database: OpenDatabase) -> None:
    database, now_s = open_database(), 1e9
    keys = Keys(database, clock=lambda: now_s)
    ring = KeyRing(database, has_users=True, user_limits={"images_per_day": 7})
    name = user_id("alice smith")

    def images_of() -> int | None:
        ring.look()
        key = ring.by_id(name)
        return None if key is None else key.images_per_day

    assert images_of() == 7
    keys.add("alice smith", images_per_day=3, is_user=True)
    assert images_of() == 3
    with pytest.raises(InvalidRequest, match="change its limits with diffserve keys set user:alice smith"):
        keys.add("alice smith", is_user=True)
    now_s -= 3600.0
    keys.revoke("user:alice smith")
    assert images_of() is None
    now_s -= 3600.0
    keys.add("alice smith", device_seconds_per_day=5, is_user=True)
    assert images_of() == 7

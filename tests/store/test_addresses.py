"""Tests of ``[store] url``: bad addresses, passwords, lost connections and servers that share a database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffserve.api.errors import ConfigError
from diffserve.api.passwords import hide_password
from diffserve.service.http.errors import expected_error, reply_to
from diffserve.service.http.keys import KeyRing
from diffserve.settings.layers import load_settings
from diffserve.store import Database, Keys, engines
from diffserve.store.errors import StoreError
from tests.postgresql import PASSWORD, PostgreSQL, running_postgresql


@pytest.fixture
def server() -> Iterator[PostgreSQL]:
    with running_postgresql() as server:
        yield server


def test_passwords_are_hidden_in_addresses() -> None:
    for address in (
        f"postgresql://user:{PASSWORD}@host:5432/name",
        f"postgresql://user:a/{PASSWORD}@b@host/name",
        f"postgresql://host/name?user=a&password={PASSWORD}&sslmode=require",
    ):
        shown = hide_password(f"address {address} is wrong")
        assert PASSWORD not in shown
        assert ("host" in shown, "name" in shown, "is wrong" in shown) == (True, True, True)
    assert hide_password("postgresql://host:5432/name") == "postgresql://host:5432/name"


@pytest.mark.parametrize(
    "env",
    [
        {"DIFFSERVE_STORE_URL": f"mysql://user:{PASSWORD}@host/name"},
        {"DIFFSERVE_STORE_URI": f"postgresql://user:{PASSWORD}@host/name"},
    ],
)
def test_errors_of_settings_do_not_show_a_password(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(env=env)
    assert PASSWORD not in str(refused.value)
    assert "user:***@host" in refused.value.message


def test_settings_in_a_log_do_not_show_the_password() -> None:
    settings = load_settings(env={"DIFFSERVE_STORE_URL": f"postgresql://user:{PASSWORD}@host/name"})
    assert PASSWORD in settings.store.url
    assert PASSWORD not in repr(settings)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"postgresql://user:{PASSWORD}@127.0.0.1:1/name", "start the database or change store.url"),
        (f"postgresql://user:{PASSWORD}@host:port/name", "store.url is not an address of a database"),
    ],
)
def test_an_unusable_address_is_reported_without_its_password(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Database(tmp_path, url)
    assert (PASSWORD in refused.value.message, refused.value.param) == (False, "url")


def test_a_lost_database_is_answered_with_503_and_used_again_when_it_is_back(
    server: PostgreSQL, tmp_path: Path
) -> None:
    database = Database(tmp_path, server.create_database())
    keys = Keys(database)
    keys.add("app")
    server.stop()
    with pytest.raises(StoreError) as failed:
        keys.all()
    assert (failed.value.reason, PASSWORD in str(failed.value)) == ("unreachable", False)
    expected = expected_error(failed.value)
    assert expected is not None
    reply = reply_to(expected)
    assert (reply.status, reply.headers["Retry-After"], b"database_unreachable" in reply.body) == (503, "5", True)
    server.start()
    assert [key.name for key in keys.all()] == ["app"]
    database.close()


def test_a_database_that_hangs_is_unreachable_after_a_while_and_used_again_when_it_answers(
    server: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CONNECT_S", 1)
    monkeypatch.setattr(engines, "ANSWER_S", 0.5)
    database = Database(tmp_path, server.create_database())
    keys, ring = Keys(database), KeyRing(database)
    keys.add("first")
    with server.frozen():
        for use in (keys.all, lambda: keys.add("second")):
            with pytest.raises(StoreError) as failed:
                use()
            assert failed.value.reason == "unreachable"

        async def refresh() -> bool:
            await ring.refresh()
            return ring.is_closed

        assert not asyncio.run(refresh()), "the keys read before stay valid"
    assert [key.name for key in keys.all()] == ["first"]
    ring.look()
    assert ring.is_closed
    database.close()


def test_servers_that_share_a_database_see_keys_and_sessions_of_each_other(server: PostgreSQL, tmp_path: Path) -> None:
    url = server.create_database()
    databases = [Database(tmp_path, url) for _ in range(2)]
    rings = [KeyRing(database) for database in databases]
    text, _ = Keys(databases[0]).add("app")
    for ring in rings:
        ring.look()
        assert ring.find(text) is not None
    key = rings[0].find(text)
    assert key is not None
    session = rings[0].session(key)
    assert rings[1].key_of_session(session) is not None
    rings[0].end_session(session)
    rings[1].look()
    assert rings[1].key_of_session(session) is None
    for database in databases:
        database.close()

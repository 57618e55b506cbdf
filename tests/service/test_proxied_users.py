"""Users that a trusted proxy names: they need no key, and each has its own history, usage and batches."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from diffserve.api.errors import ConfigError
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.keys import KeyRing
from diffserve.service.lifecycle import Gate
from diffserve.service.run import open_store
from diffserve.settings.layers import load_settings
from diffserve.store import Database, Keys
from tests.service.server import GENERATIONS, running_server

HEADER = "X-Forwarded-User"
SETTINGS = {"DIFFSERVE_SERVE_TRUSTED_PROXIES": "10.0.0.1", "DIFFSERVE_SERVE_TRUSTED_USER_HEADER": HEADER}
BROWSER = {"Origin": "http://127.0.0.1", HEADER: "alice"}


def ask(folder: Path, method: str, path: str, headers: Any, *, peer: str = "10.0.0.1") -> httpx.Response:
    """Return the answer of a server, whose engine is still loading, to a request from the address ``peer``."""

    async def run() -> httpx.Response:
        config = load_settings(env=SETTINGS)
        ring = KeyRing(Database(folder), has_users=True)
        app = create_app(EngineClient(config), config.serve, Gate(), ring=ring)
        transport = httpx.ASGITransport(app, client=(peer, 4321))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(run())


def test_only_a_trusted_proxy_names_users(tmp_path: Path) -> None:
    text, _ = Keys(Database(tmp_path)).add("app")
    alice, bearer = {HEADER: "alice"}, {"Authorization": f"Bearer {text}"}
    statuses = {
        "user": ask(tmp_path, "GET", "/v1/models", alice),
        "user with another token": ask(tmp_path, "GET", "/v1/models", alice | {"Authorization": "Bearer eyJ0"}),
        "key": ask(tmp_path, "GET", "/v1/models", bearer),
        "nobody": ask(tmp_path, "GET", "/v1/models", {}),
        "empty": ask(tmp_path, "GET", "/v1/models", {HEADER: " "}),
        "elsewhere": ask(tmp_path, "GET", "/v1/models", alice, peer="10.0.0.2"),
        "metrics": ask(tmp_path, "GET", "/metrics", alice),
    }
    assert {name: answer.status_code for name, answer in statuses.items()} == {
        "user": 503,  # the engine is loading
        "user with another token": 503,
        "key": 503,
        "nobody": 401,
        "empty": 401,
        "elsewhere": 401,
        "metrics": 403,
    }


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((b"alice", b"bob"), "is given 2 times"),
        ((b"\xff\xfe",), "is not UTF-8"),
        ((b"a" * 257,), "at most 256 printable characters"),
        (("a\u202eb".encode(),), "at most 256 printable characters"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, values: tuple[bytes, ...], reason: str) -> None:
    answer = ask(tmp_path, "GET", "/v1/models", [(HEADER.encode(), value) for value in values])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_user"
    assert reason in answer.json()["error"]["message"]


def test_pages_of_other_sites_cannot_use_the_cookie_of_the_proxy(tmp_path: Path) -> None:
    """A browser adds the proxy's cookie to every request, so the origin must be the server's own."""
    assert ask(tmp_path, "POST", GENERATIONS, BROWSER).status_code not in (401, 403)
    for origin in ("https://evil.example", "http://localhost:3000"):
        answer = ask(tmp_path, "POST", GENERATIONS, BROWSER | {"Origin": origin})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    crossing = {HEADER: "alice", "Sec-Fetch-Site": "cross-site"}
    assert ask(tmp_path, "POST", GENERATIONS, crossing).status_code == 403


def test_the_settings_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="without trusted_proxies"):
        load_settings(env={"DIFFSERVE_SERVE_TRUSTED_USER_HEADER": HEADER})
    with pytest.raises(ConfigError, match="the name of a header"):
        load_settings(env=SETTINGS | {"DIFFSERVE_SERVE_TRUSTED_USER_HEADER": "X Forwarded"})
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be written"):  # without a store every request would be accepted
        open_store(load_settings(env=SETTINGS))


@pytest.mark.slow
def test_each_user_has_its_own_history_and_usage(tmp_path: Path) -> None:
    config = f'[serve]\ntrusted_proxies = ["127.0.0.1"]\ntrusted_user_header = "{HEADER}"\n'
    body = {"prompt": "a fox", "num_inference_steps": 1, "seed": 1}
    with running_server(Path("embedded"), tmp_path, config=config, page=True) as server:
        server.wait_until_ready()
        for user, count in (("alice@example.org", 2), ("bob", 1)):
            for _ in range(count):
                server.client.post(GENERATIONS, json=body, headers={HEADER: user}).raise_for_status()
        assert server.client.post(GENERATIONS, json=body).status_code == 401
        for user, count in (("alice@example.org", 2), ("bob", 1), ("carol", 0)):
            history = server.client.get("/v1/history", headers={HEADER: user}).raise_for_status().json()
            assert len(history["data"]) == count
            usage = server.client.get("/v1/usage", headers={HEADER: user}).raise_for_status().json()
            assert usage["total"]["pictures"] == count
            digest = hashlib.sha256(user.encode()).hexdigest()[:24]
            assert {day["key_id"] for day in usage["data"]} <= {f"user-{digest}"}
        assert server.client.get("/", headers={HEADER: "bob", "Accept": "text/html"}).status_code == 200
        refused = server.client.get("/", headers={"Accept": "text/html"}, follow_redirects=False)
        assert (refused.status_code, refused.headers["location"]) == (303, "/login")
        assert "alice" not in server.errors.read_text()

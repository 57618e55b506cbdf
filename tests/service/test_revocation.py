"""Revoked keys and ended sessions: their work is stopped, and no cookie is accepted from another origin."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diffserve.api.errors import ConfigError
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.keys import COOKIE, KeyRing
from diffserve.service.http.revocation import LOOK_EVERY_S
from diffserve.service.lifecycle import Gate
from diffserve.settings.layers import load_settings
from diffserve.store import Database, Keys
from tests.service.server import GENERATIONS, SOON_S, RunningServer, running_server

LONG: dict[str, Any] = {"prompt": "a red fox", "num_inference_steps": 1000, "seed": 1}
SOON_ENOUGH_S = 5.0
"""After a revocation; polling alone takes a second."""


def visit(folder: Path, *requests: tuple[str, str, dict[str, Any]], env: dict[str, str] | None = None) -> list[Any]:
    """Return the answers to (method, path, arguments of httpx), from an application with the keys in ``folder``."""

    async def run() -> list[Any]:
        config = load_settings(env=env or {})
        app = create_app(EngineClient(config), config.serve, Gate(), ring=KeyRing(Database(folder)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return [await client.request(method, path, **arguments) for method, path, arguments in requests]

    return asyncio.run(run())


def cookie(answer: httpx.Response) -> dict[str, str]:
    return {"Cookie": f"{COOKIE}={answer.cookies[COOKIE]}"}


def test_logout_ends_only_that_session(tmp_path: Path) -> None:
    text, _ = Keys(Database(tmp_path)).add("app")
    login = ("POST", "/login", {"data": {"key": text}})
    first, second = map(cookie, visit(tmp_path, login, login))
    ask = "/sdapi/v1/interrupt"
    answers = visit(
        tmp_path,
        ("POST", ask, {"headers": first}),
        ("POST", "/logout", {"headers": first}),
        ("POST", ask, {"headers": first}),
        ("POST", ask, {"headers": second}),
    )
    assert [answer.status_code for answer in answers] == [200, 303, 401, 200]
    after_restart = visit(tmp_path, ("POST", ask, {"headers": first}), ("POST", ask, {"headers": second}))
    assert [answer.status_code for answer in after_restart] == [401, 200]


def test_a_session_ends_in_every_process_of_one_folder(tmp_path: Path) -> None:
    _, key = Keys(Database(tmp_path)).add("app")
    here, there = KeyRing(Database(tmp_path)), KeyRing(Database(tmp_path))
    session = here.session(key)
    assert there.key_of_session(session) == key
    here.end_session(session)
    there.look()
    assert there.key_of_session(session) is None


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8000", 200),
        ("https://paint.example.org", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost:8000", 403),
        ("https://app.example.org", 403),
    ],
)
def test_a_cookie_is_accepted_only_from_a_page_of_the_server(tmp_path: Path, origin: str, status: int) -> None:
    text, _ = Keys(Database(tmp_path)).add("app")
    session = cookie(visit(tmp_path, ("POST", "/login", {"data": {"key": text}}))[0])
    env = {
        "DIFFSERVE_SERVE_PUBLIC_URL": "https://Paint.example.org/sd",
        "DIFFSERVE_SERVE_CORS_ORIGINS": "https://app.example.org",
    }
    origin_header = {"Origin": origin}
    work, login, by_key = visit(
        tmp_path,
        ("POST", "/sdapi/v1/interrupt", {"headers": session | origin_header}),
        ("POST", "/login", {"headers": origin_header, "data": {"key": text}}),
        ("POST", "/sdapi/v1/interrupt", {"headers": {"Authorization": f"Bearer {text}"} | origin_header}),
        env=env,
    )
    assert (work.status_code, login.status_code) == (status, 303 if status == 200 else 403)
    assert by_key.status_code == 200, "a program of this machine that has the key may run on any port"


def test_pages_of_configured_origins_may_call_the_api(tmp_path: Path) -> None:
    env = {"DIFFSERVE_SERVE_CORS_ORIGINS": "https://app.example.org, http://intranet:8080"}
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, is_allowed in (
        ("https://app.example.org", True),
        ("http://intranet:8080", True),
        ("https://x.org", False),
    ):
        origin_header = {"Origin": origin}
        before, answer = visit(
            tmp_path,
            ("OPTIONS", "/sdapi/v1/interrupt", {"headers": origin_header | preflight}),
            ("POST", "/sdapi/v1/interrupt", {"headers": origin_header}),
            env=env,
        )
        assert (before.status_code, answer.status_code) == ((204, 200) if is_allowed else (403, 403))
        assert before.headers.get("access-control-allow-origin") == (origin if is_allowed else None)
        assert answer.headers.get("access-control-allow-origin") == (origin if is_allowed else None)


@pytest.mark.parametrize("origin", ["*", "app.example.org", "https://app.example.org/", "https://APP.example.org"])
def test_an_origin_that_no_browser_sends_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"cors_origins has .*; give each origin as a browser sends it"):
        load_settings(env={"DIFFSERVE_SERVE_CORS_ORIGINS": origin})


@pytest.fixture
def keyed_server(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[RunningServer]:
    Keys(Database(tmp_path / "data")).add("watcher", ["admin"])  # the server asks for keys from its start
    with running_server(tiny_model("sd15"), tmp_path) as server:
        while httpx.get(f"{server.url}/readyz", trust_env=False).status_code != 200:
            time.sleep(0.1)
        yield server


def revoke_soon(keys: Keys, name: str) -> list[float]:
    """Revoke ``name`` in half a second and append the time to the list."""
    times: list[float] = []

    def revoke() -> None:
        keys.revoke(name)
        times.append(time.monotonic())

    threading.Timer(0.5, revoke).start()
    return times


@pytest.mark.slow
def test_requests_of_a_revoked_key_end_within_seconds(keyed_server: RunningServer, tmp_path: Path) -> None:
    keys = Keys(Database(tmp_path / "data"))
    streaming, waiting, browsing = (keys.add(name)[0] for name in ("streaming", "waiting", "browsing"))
    time.sleep(1.5 * LOOK_EVERY_S)
    url, timeout = f"{keyed_server.url}{GENERATIONS}", 10 * SOON_S
    bearer = {"Authorization": f"Bearer {streaming}"}
    times = revoke_soon(keys, "streaming")
    body = LONG | {"stream": True}
    with httpx.stream("POST", url, json=body, headers=bearer, timeout=timeout, trust_env=False) as answer:
        assert answer.status_code == 200
        messages = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert time.monotonic() - times[0] < SOON_ENOUGH_S
    assert messages[0]["type"] == "image_generation.progress"
    assert messages[-1]["error"]["code"] == "invalid_api_key"

    bearer = {"Authorization": f"Bearer {waiting}"}
    times = revoke_soon(keys, "waiting")
    refused = httpx.post(url, json=LONG, headers=bearer, timeout=timeout, trust_env=False)
    assert time.monotonic() - times[0] < SOON_ENOUGH_S
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")

    with httpx.Client(base_url=keyed_server.url, timeout=timeout, trust_env=False) as browser:
        browser.post("/login", data={"key": browsing})
        threading.Timer(0.5, lambda: browser.post("/logout")).start()
        with browser.stream("POST", GENERATIONS, json=body) as answer:
            messages = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert messages[-1]["error"]["code"] == "invalid_api_key"
    assert "Traceback" not in keyed_server.errors.read_text()


@pytest.mark.slow
def test_only_the_key_of_a_request_interrupts_or_cancels_it(keyed_server: RunningServer, tmp_path: Path) -> None:
    keys = Keys(Database(tmp_path / "data"))
    painting, other = ({"Authorization": f"Bearer {keys.add(name)[0]}"} for name in ("painting", "other"))
    time.sleep(1.5 * LOOK_EVERY_S)
    client = httpx.Client(base_url=keyed_server.url, timeout=10 * SOON_S, trust_env=False)
    body = LONG | {"stream": True}
    with client, client.stream("POST", GENERATIONS, json=body, headers=painting) as answer:
        lines = answer.iter_lines()  # kept: the end of the iterator closes the connection, which cancels the request
        next(line for line in lines if "progress" in line)
        place = f"{GENERATIONS}/{answer.headers['x-request-id']}"
        for deed in ("interrupt", "cancel"):
            assert client.post(f"{place}/{deed}", headers=other).status_code == 404
        assert client.post(f"{place}/cancel", headers=painting).status_code == 200

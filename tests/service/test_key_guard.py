"""Authorization: every route is closed without a key, except those listed as open."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from diffserve.api.errors import ConfigError, QueueFull
from diffserve.client.on_behalf import HEADER, Asker, _visitor, ask_for, headers, own_key
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.addresses import Clients
from diffserve.service.http.keys import COOKIE, OPEN, KeyRing, RateLimits
from diffserve.service.images.image_store import ImageStore
from diffserve.service.lifecycle import Gate
from diffserve.service.page import Page
from diffserve.service.run import check_open, open_database, open_ring
from diffserve.settings.layers import load_settings
from diffserve.store import Database, Keys
from tests.service.server import RunningServer, running_server
from ui.mounting import PATHS

Ask = Callable[..., httpx.Response]


class House:
    """An application whose engine is still loading, with keys in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keys(Database(folder))
        self.texts = {scope: self.keys.add(f"for-{scope}", [scope])[0] for scope in ("generate", "metrics", "admin")}
        self.folder = folder
        self.routes: list[tuple[str, str]] = []

    def ask(self, *requests: tuple[str, str, dict[str, str]], environment_key: str = "") -> list[httpx.Response]:
        """Return the answers to (method, path, headers)."""

        async def all_of_them() -> list[httpx.Response]:
            config = load_settings(env={"DIFFSERVE_SERVE_DEBUG": "true"})
            page = Page(lambda *_: ())
            page.route.open_for(PATHS)
            database = Database(self.folder)
            app = create_app(
                EngineClient(config), config.serve, Gate(), page=page.route, ring=KeyRing(database, environment_key),
                pictures=ImageStore(self.folder / "pictures", max_bytes=1), database=database,
            )  # fmt: skip
            for route in app.routes:
                for method in getattr(route, "methods", None) or ("GET",):
                    path = getattr(route, "path", "/").replace("page", "/")
                    self.routes.append((method, re.sub(r"\{\w+(:path)?\}", "x", path)))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return [await client.request(method, path, headers=headers) for method, path, headers in requests]

        return asyncio.run(all_of_them())


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


OF_ONE_ANSWER = ("x-request-id", "openai-processing-ms")
"""Headers that no two answers have in common."""


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def test_every_route_is_closed_without_a_good_key_of_its_scope(house: House) -> None:
    house.ask()
    of_page = {path if path[-1] not in "/=" or path == "/" else f"{path}x" for path in PATHS}
    of_page |= {"/gradio_api/x", "/gradio_api/file=/etc/passwd", "/none"}
    routes = sorted(set(house.routes) | {(method, path) for path in of_page for method in ("GET", "POST")})
    closed = [(method, path) for method, path in routes if path.rstrip("/") not in OPEN or path == "/"]
    closed = [(method, path) for method, path in closed if "/images/files/" not in path]
    assert len(closed) > 60
    assert ("POST", "/v1/images/edits") in closed
    for path in ("/", "/docs", "/openapi.json", "/metrics", "/assets/x", "/static/x", "/gradio_api/file=x"):
        assert ("GET", path) in closed
    wrong = [{}, bearer("ds-wrong"), bearer(""), {"X-Api-Key": house.texts["generate"].upper()}]
    answers = house.ask(*((method, path, headers) for method, path in closed for headers in wrong))
    assert {answer.status_code for answer in answers} == {401}
    assert {answer.headers["www-authenticate"] for answer in answers} == {"Bearer"}
    assert all("key" in answer.text for answer in answers)
    for scope, is_forbidden in (("metrics", lambda path: path.rstrip("/") != "/metrics"), ("generate", is_admins)):
        beyond = [(method, path, bearer(house.texts[scope])) for method, path in closed if is_forbidden(path)]
        assert beyond
        assert {answer.status_code for answer in house.ask(*beyond)} == {403}
    [picture] = house.ask(("GET", "/v1/images/files/00112233445566778899aabbccddeeff.png", {}))
    assert picture.status_code == 404, "a picture's name is a key"
    let_in = house.ask(*((method, path, bearer(house.texts["admin"])) for method, path in closed))
    assert not {401, 403} & {answer.status_code for answer in let_in}


@pytest.mark.parametrize("scope", ["none", "metrics", "admin"])
def test_head_equals_get_without_the_body(house: House, scope: str) -> None:
    house.ask()
    headers = {"Accept": "text/html"} | (bearer(house.texts[scope]) if scope != "none" else {})
    paths = sorted({path for method, path in house.routes if method == "GET"} - {"/metrics"})  # counts the requests
    assert len(paths) > 50
    heads = house.ask(*(("HEAD", path, headers) for path in paths))
    gets = house.ask(*(("GET", path, headers) for path in paths))
    for path, head, get in zip(paths, heads, gets, strict=True):
        assert (head.status_code, head.content) == (get.status_code, b""), path
        for name in OF_ONE_ANSWER:
            assert "" not in (head.headers.pop(name), get.headers.pop(name)), path
        assert head.headers == get.headers, path
    assert 405 not in {head.status_code for head in heads}


def test_an_unsupported_method_lists_the_allowed_ones(house: House) -> None:
    admin, path = bearer(house.texts["admin"]), "/v1/responses/x"
    answers = house.ask(("PUT", "/v1/models", admin), ("PUT", path, admin), ("HEAD", "/v1/images/generations", admin))
    assert [answer.status_code for answer in answers] == [405, 405, 405]
    assert [answer.headers["allow"] for answer in answers] == ["GET, HEAD", "DELETE, GET, HEAD", "POST"]


def test_no_websocket_is_accepted_with_any_key(house: House) -> None:
    async def connect(path: str) -> list[Any]:
        config, sent = load_settings(env={}), list[Any]()
        page = Page(lambda *_: ())
        page.route.open_for(PATHS)
        ring = KeyRing(Database(house.folder))
        app = create_app(EngineClient(config), config.serve, Gate(), page=page.route, ring=ring)
        key = bearer(house.texts["admin"])["Authorization"].encode()
        scope = {"type": "websocket", "path": path, "headers": [(b"authorization", key)], "query_string": b""}

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await app(scope, receive, send)
        return sent

    for path in ("/", "/gradio_api/queue/join", "/v1/models"):
        assert asyncio.run(connect(path)) == ["websocket.close"]


def is_admins(path: str) -> bool:
    return path.startswith("/debug/") or path.rstrip("/").endswith(("/metrics", "/usage/keys"))


def test_keys_are_accepted_in_every_form_that_clients_send(house: House) -> None:
    text = house.texts["generate"]

    def basic(credentials: str) -> dict[str, str]:
        return {"Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}

    good = [bearer(text), {"X-Api-Key": text}, basic(f"me:{text}"), basic(f"{text}:"), basic(text)]
    bad = [basic(":"), {"Authorization": text}, {"Authorization": "Basic !!"}, bearer(text[:-1]), bearer(f"{text}x")]
    answers = house.ask(*(("POST", "/sdapi/v1/interrupt", headers) for headers in (*good, *bad)))
    assert [answer.status_code for answer in answers] == [200] * len(good) + [401] * len(bad)
    assert set(answers[-1].json()) == {"error", "detail", "body", "errors", "code"}, "in the words of who asks there"


def test_revoked_keys_end_within_a_second_and_authorization_stays_required(tmp_path: Path) -> None:
    keys = Keys(Database(tmp_path))
    assert not KeyRing(Database(tmp_path)).is_closed
    ring = KeyRing(Database(tmp_path))
    text, key = keys.add("app")
    assert ring.find(text) is None
    asyncio.run(ring.refresh())
    assert ring.is_closed
    assert ring.find(text) == key
    session = ring.session(key)
    assert ring.key_of_session(session) == key
    changed = session.replace(key.id, "key-environment")
    for wrong in (changed, session[:-1], "", ".", "a.b.c", session.replace(".", "", 1), f"{session}x", "é" * 99):
        assert ring.key_of_session(wrong) is None
    keys.revoke("app")
    ring.look()
    assert ring.find(text) is None
    assert ring.key_of_session(session) is None
    assert ring.is_closed
    assert KeyRing(Database(tmp_path)).is_closed, "a house that had keys does not open by itself"


def test_sessions_end(tmp_path: Path) -> None:
    _, key = Keys(Database(tmp_path)).add("app")
    now_s = 1e9
    ring = KeyRing(Database(tmp_path), clock=lambda: now_s)
    session = ring.session(key)
    now_s += 29 * 24 * 3600
    assert ring.key_of_session(session) == key
    now_s += 2 * 24 * 3600
    assert ring.key_of_session(session) is None


def test_the_environment_key_has_every_scope_and_must_be_long(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [answer] = house.ask(("GET", "/debug/trace", bearer("0123456789abcdef")), environment_key="0123456789abcdef")
    assert answer.status_code == 503
    config = load_settings(env={"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / "new"), "DIFFSERVE_SERVE_HOST": "0.0.0.0"})
    monkeypatch.setenv("DIFFSERVE_API_KEY", "short")
    with pytest.raises(Exception, match="DIFFSERVE_API_KEY has 5 characters"):
        open_ring(open_database(config), config.serve)
    monkeypatch.setenv("DIFFSERVE_API_KEY", "0123456789abcdef")
    check_open(config.serve, open_ring(open_database(config), config.serve))


def test_a_chosen_folder_that_cannot_be_created_stops_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the folder there are no keys, and the server would be open; only the default folder may be missing."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "data"
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        open_database(load_settings(env={"DIFFSERVE_SERVE_DATA_DIR": str(folder)}))
    default = load_settings(env={})
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert default.has_default_data_dir
    assert open_database(default) is None
    assert "cannot be stored" in capsys.readouterr().out


def test_an_unreadable_folder_does_not_disable_authorization(tmp_path: Path) -> None:
    config = load_settings(env={"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path / ("x" * 300))})
    with pytest.raises(ConfigError, match="xxx"):
        open_database(config)


def test_a_browser_signs_in_by_a_form_and_the_page_authenticates_its_requests(house: House) -> None:
    text = house.texts["generate"]

    async def visit() -> None:
        config = load_settings(env={})
        app = create_app(EngineClient(config), config.serve, Gate(), ring=KeyRing(Database(house.folder)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as browser:
            sent = await browser.get("/", headers={"Accept": "text/html"})
            assert (sent.status_code, sent.headers["location"]) == (303, "/login")
            form = await browser.get("/login")
            assert "Sign in" in form.text
            assert form.headers["referrer-policy"] == "same-origin", "with none, browsers send the form from nowhere"
            refused = await browser.post("/login", data={"key": "<b>wrong</b>"})
            assert refused.status_code == 401
            assert "wrong" not in refused.text
            assert (await browser.post("/login", data={"key": house.texts["metrics"]})).status_code == 401
            let_in = await browser.post("/login", data={"key": f" {text} "})
            assert (let_in.status_code, let_in.headers["location"]) == (303, "/")
            cookie = let_in.headers["set-cookie"].lower()
            assert "httponly" in cookie
            assert "samesite=strict" in cookie
            assert text not in cookie
            assert (await browser.post("/sdapi/v1/interrupt")).status_code == 200
            foreign = {"Origin": "https://evil.example"}
            assert (await browser.post("/sdapi/v1/interrupt", headers=foreign)).status_code == 403
            await browser.post("/logout")
            assert COOKIE not in browser.cookies
            assert (await browser.post("/sdapi/v1/interrupt")).status_code == 401
            page = await browser.post("/sdapi/v1/interrupt", headers=bearer(own_key()))
            assert page.status_code == 200

    asyncio.run(visit())


def test_requests_of_a_key_are_limited_per_minute(tmp_path: Path) -> None:
    now_s = 0.0
    _, key = Keys(Database(tmp_path)).add("app", ["generate"], 3)
    limits = RateLimits(lambda: now_s)
    left = [limits.take(key)["x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == ["2", "1", "0"]
    with pytest.raises(QueueFull, match=r"this key is limited to 3 requests per minute; try again in 20\.0 s"):
        limits.take(key)
    now_s = 20.0
    assert limits.take(key)["x-ratelimit-reset-requests"] == "60.0s"


def test_limits_apply_through_the_page_and_separately_per_key(tmp_path: Path) -> None:
    house = House(tmp_path)
    text, key = house.keys.add("few", ["generate"], 2)
    token = _visitor.set("")
    try:
        ask_for(Asker("10.0.0.1", "session", key.id))
        by_page = headers()
    finally:
        _visitor.reset(token)
    ways = [bearer(text), by_page, bearer(text), bearer(house.texts["generate"])]
    answers = house.ask(*(("POST", "/sdapi/v1/interrupt", headers) for headers in ways))
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert int(answers[2].headers["retry-after"]) == 30
    assert answers[2].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[2].headers["x-ratelimit-remaining-requests"] == "0"
    assert "rate_limit_exceeded" in answers[2].text

    def name_of(key_id: str, **headers: str) -> str:
        raw = [
            (HEADER.lower().encode() if name == "behalf" else name.encode(), v.encode()) for name, v in headers.items()
        ]
        scope: dict[str, Any] = {"type": "http", "headers": raw, "client": ("1.2.3.4", 1), "state": {"key_id": key_id}}
        with Clients().name_of(Request(scope)) as name:
            return name

    assert name_of("key-1") == name_of("key-1", authorization="Bearer x") != name_of("key-2")


def test_a_job_that_is_put_counts_as_a_request(tmp_path: Path) -> None:
    house = House(tmp_path)
    text, _ = house.keys.add("few", ["generate"], 1)
    calls = [("PUT", "/v1/jobs/one"), ("PUT", "/v1/jobs/one"), ("GET", "/v1/jobs")]
    answers = house.ask(*((method, path, bearer(text)) for method, path in calls))
    assert [answer.status_code == 429 for answer in answers] == [False, True, False]


@pytest.mark.slow
def test_a_server_requires_keys_created_while_it_runs(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with running_server(tiny_model("sd15"), tmp_path) as server:
        server.wait_until_ready()
        assert server.paint().status_code == 200
        text, _ = Keys(Database(tmp_path / "data")).add("app", ["generate"], 2)
        deadline_s = time.monotonic() + 10.0
        while (refused := server.paint()).status_code == 200 and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert server.status("/readyz") == 200
        assert _painted(server, text) == [200, 200, 429]
        assert text not in server.errors.read_text()


def _painted(server: RunningServer, text: str) -> list[int]:
    body = {"prompt": "a red fox", "num_inference_steps": 1}
    url = f"{server.url}/v1/images/generations"
    return [httpx.post(url, json=body, headers=bearer(text), timeout=60).status_code for _ in range(3)]

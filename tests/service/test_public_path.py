"""Public address of the server, with and without a path prefix of a proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.addresses import PublicPath, public_address
from diffserve.service.http.keys import KeyRing
from diffserve.service.lifecycle import Gate
from diffserve.settings.layers import load_settings
from diffserve.store import Database, Keys

URL = "https://paint.example.org/sd"
FORWARDED = {"X-Forwarded-For": "10.0.0.9"}


async def passed_on(path: str, headers: dict[str, str], **settings: Any) -> tuple[str, str, str | None]:
    """Return path, raw path and root as the application below ``PublicPath`` sees them."""
    passed: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.update(scope)

    raw_headers = [(name.lower().encode(), text.encode()) for name, text in headers.items()]
    scope = {
        "type": "http", "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(), "state": {},
        "client": ("127.0.0.1", 5), "headers": raw_headers,
    }  # fmt: skip

    async def unused(*_: Any) -> Any:
        raise AssertionError

    await PublicPath(app, **settings)(scope, unused, unused)
    address = public_address(passed)
    return passed["path"], passed["raw_path"].decode(), None if address is None else address.root


@pytest.mark.parametrize(
    ("settings", "headers", "root"),
    [
        ({}, {"Host": "localhost:8000", "X-Forwarded-Prefix": "/sd"}, None),
        ({"public_url": URL}, {"Host": "paint.example.org"}, URL),
        ({"public_url": f"{URL}/"}, {"Host": "paint.example.org"}, URL),
        ({"public_url": URL}, {"Host": "127.0.0.1:8000"}, "http://127.0.0.1:8000/sd"),
        ({"public_url": URL}, {"Host": "127.0.0.1:8000", "X-Forwarded-Prefix": "/x"}, "http://127.0.0.1:8000/sd"),
        ({"public_url": URL, "trusted_proxies": ["127.0.0.1"]}, {"Host": "127.0.0.1:8000", **FORWARDED}, URL),
        ({"public_url": URL, "trusted_proxies": ["127.0.0.1"]}, {"Host": "127.0.0.1"}, "http://127.0.0.1/sd"),
        (
            {"trusted_proxies": ["127.0.0.1"]},
            {"X-Forwarded-Host": "a.org", "X-Forwarded-Proto": "https", "X-Forwarded-Prefix": "/a/b/"},
            "https://a.org/a/b",
        ),
        ({"trusted_proxies": ["10.0.0.1"]}, {"X-Forwarded-Host": "a.org", "X-Forwarded-Prefix": "/a"}, None),
        (
            {"trusted_proxies": ["127.0.0.1"]},
            {"Host": "a.org", "X-Forwarded-Prefix": "//evil.org/<script>"},
            "http://a.org",
        ),
    ],
)
def test_the_public_address_comes_from_settings_and_trusted_proxies(
    settings: dict[str, Any], headers: dict[str, str], root: str | None
) -> None:
    assert asyncio.run(passed_on("/v1/models", headers, **settings)) == ("/v1/models", "/v1/models", root)


@pytest.mark.parametrize(
    ("path", "without_prefix"),
    [
        ("/sd/v1/models", "/v1/models"),
        ("/sd/", "/"),
        ("/sdapi/v1/txt2img", "/sdapi/v1/txt2img"),
        ("/sd/sd/metrics", "/metrics"),
        ("/v1/sd/models", "/v1/sd/models"),
    ],
)
def test_an_unstripped_path_prefix_is_removed(path: str, without_prefix: str) -> None:
    passed = asyncio.run(passed_on(path, {"Host": "paint.example.org"}, public_url=URL))
    assert passed[:2] == (without_prefix, without_prefix)


def test_guards_check_the_served_path(tmp_path: Path) -> None:
    text, _ = Keys(Database(tmp_path)).add("app", ["generate"])

    async def run() -> list[httpx.Response]:
        config = load_settings(env={"DIFFSERVE_SERVE_PUBLIC_URL": URL})
        app = create_app(EngineClient(config), config.serve, Gate(), ring=KeyRing(Database(tmp_path)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://paint.example.org") as client:
            bearer = {"Authorization": f"Bearer {text}"}
            login = await client.post("/login", data={"key": text})
            cookie = {"Cookie": login.headers["set-cookie"].partition(";")[0]}
            return [
                *[await client.get(f"/sd{path}", headers=bearer) for path in ("/metrics", "/sd/metrics", "/livez")],
                await client.get("/sd"),
                login,
                await client.post("/sd/logout", headers=cookie | {"Origin": "https://paint.example.org"}),
            ]

    metrics, twice, livez, bare, login, logout = asyncio.run(run())
    assert [answer.status_code for answer in (metrics, twice, livez)] == [403, 403, 200]
    assert (bare.status_code, bare.headers["location"]) == (308, "/sd/")
    assert login.headers["location"] == "/sd/"
    cookie = login.headers["set-cookie"].lower()
    assert "path=/sd;" in cookie
    assert "secure" in cookie
    assert logout.headers["location"] == "/sd/login"

"""The page next to the API: which requests reach it, and answers before it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.lifecycle import Gate
from diffserve.service.page import MountPage, Page
from diffserve.settings.layers import Flag, load_settings
from tests.service.server import RunningServer

PATHS = ("/", "/config", "/assets/", "/api/file=")
Story = Callable[[httpx.AsyncClient, Page], Awaitable[None]]


def tell(story: Story, mount: MountPage) -> None:
    """Run ``story(client, page)`` with an application and the page that ``mount`` builds."""

    async def run() -> None:
        config, page = load_settings(env={}), Page(mount)
        app = create_app(EngineClient(config), config.serve, Gate(), page=page.route)
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await story(client, page)

    asyncio.run(run())


def small_page(lives: list[str]) -> MountPage:
    """Return a page that answers everything with its path and records its lifecycle."""

    def mount(app: FastAPI, url: str) -> tuple[str, ...]:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            lives.append(f"open {url}")
            yield
            lives.append("closed")

        async def answer(path: str) -> Response:
            return HTMLResponse(f"page {path}") if path == "" else PlainTextResponse(f"page {path}")

        app.add_api_route("/{path:path}", answer, methods=["GET", "POST"])
        app.router.lifespan_context = lifespan
        return PATHS

    return mount


def test_the_page_answers_before_during_and_after_its_lifetime() -> None:
    lives: list[str] = []

    async def story(client: httpx.AsyncClient, page: Page) -> None:
        before = await client.get("/")
        assert (before.status_code, before.headers["retry-after"]) == (503, "1")
        assert 'http-equiv="refresh"' in before.text
        assert (await client.get("/config")).status_code == 404
        await page.open("http://127.0.0.1:1")
        assert lives == ["open http://127.0.0.1:1"]
        assert (await client.get("/")).text == "page "
        await page.close()
        assert lives[1:] == ["closed"]
        assert (await client.get("/assets/a.js")).json()["error"]["code"] == "engine_unavailable"

    tell(story, small_page(lives))


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/assets/deep/a.js", 200, "page assets/deep/a.js"),
        ("POST", "/config", 200, "page config"),
        ("GET", "/api/file=/tmp/a.png", 200, "page api/file=/tmp/a.png"),
        ("GET", "/configuration", 404, "unknown_url"),
        ("GET", "/assets", 404, "unknown_url"),
        ("GET", "/api/other", 404, "unknown_url"),
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/images/generations", 405, "method_not_allowed"),
        ("GET", "/livez", 200, "ok"),
        ("GET", "/openapi.json", 200, "/v1/images/generations"),
    ],
)
def test_only_paths_of_the_page_reach_it(method: str, path: str, status: int, text: str) -> None:
    async def story(client: httpx.AsyncClient, page: Page) -> None:
        await page.open("http://127.0.0.1:1")
        answer = await client.request(method, path)
        assert answer.status_code == status
        assert text in answer.text
        await page.close()

    tell(story, small_page([]))


def test_the_guards_apply_before_the_page() -> None:
    async def story(client: httpx.AsyncClient, page: Page) -> None:
        await page.open("http://127.0.0.1:1")
        foreign = await client.post("/config", headers={"Origin": "http://elsewhere.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "origin_not_allowed")
        rebound = await client.get("/", headers={"Host": "elsewhere.example"})
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
        reply = await client.get("/")
        assert "default-src 'self'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        await page.close()

    tell(story, small_page([]))


def test_the_api_works_if_the_page_cannot_be_built(caplog: pytest.LogCaptureFixture) -> None:
    def mount(app: FastAPI, url: str) -> tuple[str, ...]:
        raise RuntimeError("no page today")

    async def story(client: httpx.AsyncClient, page: Page) -> None:
        await page.open("http://127.0.0.1:1")
        assert (await client.get("/")).json()["error"]["code"] == "unknown_url"
        assert (await client.get("/livez")).status_code == 200
        await page.close()

    tell(story, mount)
    assert "the page could not be built" in caplog.text


def test_the_page_can_be_disabled() -> None:
    assert load_settings(env={}).serve.page
    assert not load_settings(env={"DIFFSERVE_SERVE_PAGE": "false"}).serve.page
    assert not load_settings(env={}, flags={"serve.page": Flag("--page/--no-page", False)}).serve.page


@pytest.mark.slow
def test_a_server_without_the_page_has_nothing_at_its_root(server: RunningServer) -> None:
    assert server.client.get("/").json()["error"]["code"] == "unknown_url"

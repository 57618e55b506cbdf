"""Thread pools of the HTTP process: a full pool delays no other kind of work."""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
import httpx
import pytest
from fastapi.routing import APIRoute
from PIL import Image

import diffserve.service
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.lifecycle import Gate
from diffserve.service.threads import BATCHES
from diffserve.settings.layers import load_settings
from diffserve.store.database import Database
from tests.service.server import RunningServer, error_of
from tests.service.test_batches import line

PACKAGE = Path(diffserve.service.__file__).parent
SHARED_POOLS = {"to_thread", "run_in_threadpool", "iterate_in_threadpool", "FileResponse", "StaticFiles"}


def test_the_service_uses_no_shared_thread_pool() -> None:
    uses = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            is_default = (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", "") == "run_in_executor"
                and isinstance(node.args[0], ast.Constant)
            )
            if (name in SHARED_POOLS or is_default) and file.name != "threads.py":  # sets the number of anyio's threads
                uses.append(f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}")
    assert not uses


def test_every_route_is_a_coroutine(tmp_path: Path) -> None:
    async def run() -> None:
        config = load_settings(env={"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path)})
        app = create_app(EngineClient(config), config.serve, Gate(), database=Database(tmp_path))
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        assert len(routes) > 50
        assert not [route.path for route in routes if not inspect.iscoroutinefunction(route.endpoint)]

    asyncio.run(run())


@asynccontextmanager
async def shared_pools_full() -> AsyncIterator[None]:
    """Fill the loop's default pool and anyio's threads for the length of the block."""
    end = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    loop.run_in_executor(None, end.wait)
    limiter = anyio.to_thread.current_default_thread_limiter()
    limiter.total_tokens = 1
    waiting = asyncio.create_task(anyio.to_thread.run_sync(end.wait))
    await asyncio.sleep(0.05)
    try:
        yield
    finally:
        end.set()
        await waiting


def request_line(number: int) -> str:
    """Return a line of a batch."""
    request = {"custom_id": str(number), "method": "POST", "url": "/v1/images/generations", "body": {"prompt": "a fox"}}
    return json.dumps(request)


def test_routes_answer_while_the_pools_of_the_page_are_full(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64)).save(picture, "PNG")

    async def run() -> None:
        config = load_settings(env={"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path)})
        app = create_app(EngineClient(config), config.serve, Gate(), database=Database(tmp_path))
        transport = httpx.ASGITransport(app)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client,
            asyncio.timeout(60.0),
            shared_pools_full(),
        ):
            lines = [request_line(number).ljust(10_000).encode() for number in range(300)]
            large = {"file": ("a.jsonl", b"\n".join(lines))}
            file_id = (await client.post("/v1/files", files=large, data={"purpose": "batch"})).json()["id"]
            content = await client.get(f"/v1/files/{file_id}/content")
            assert len(content.content) == 300 * 10_001 - 1
            body = {"input_file_id": file_id, "endpoint": "/v1/images/generations", "completion_window": "24h"}
            assert (await client.post("/v1/batches", json=body)).status_code == 200
            for path in ("/v1/files", "/v1/batches", "/v1/history", "/v1/usage", "/docs", "/sdapi/v1/samplers"):
                assert (await client.get(path)).status_code == 200, path
            verified = await client.post("/v1/provenance/verify", files={"image": ("a.png", picture.getvalue())})
            assert verified.status_code == 200
            assert (await client.delete(f"/v1/files/{file_id}")).status_code == 409

    asyncio.run(run())


def test_a_full_pool_of_batches_delays_no_listing(tmp_path: Path) -> None:
    async def run() -> None:
        end = threading.Event()
        waiting = [asyncio.create_task(BATCHES.run(end.wait)) for _ in range(20)]
        config = load_settings(env={"DIFFSERVE_SERVE_DATA_DIR": str(tmp_path)})
        app = create_app(EngineClient(config), config.serve, Gate(), database=Database(tmp_path))
        transport = httpx.ASGITransport(app)
        try:
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client,
                asyncio.timeout(60.0),
            ):
                for path in ("/v1/files", "/v1/batches", "/v1/usage", "/docs"):
                    assert (await client.get(path)).status_code == 200, path
        finally:
            end.set()
            await asyncio.gather(*waiting)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("content", ["newlines", "lines"])
def test_checking_large_batches_does_not_delay_other_routes(server: RunningServer, content: str) -> None:
    """Send eight large batches at once: 40 MB of newlines, or 40,000 lines with an invalid last one."""
    lines = [line(f"fox-{number}") for number in range(40_000)]
    data = b"\n" * 40_000_000 if content == "newlines" else b"\n".join([*lines, lines[0]])
    files = {"file": ("in.jsonl", data)}
    file_id = server.client.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/images/generations", "completion_window": "24h"}
    answers: list[httpx.Response] = []

    def create() -> None:
        answers.append(httpx.post(f"{server.url}/v1/batches", json=body, timeout=300.0))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    slowest_s = 0.0
    while True:
        is_over = len(answers) == 8
        started_s = time.monotonic()
        assert server.client.get("/v1/files").status_code == 200
        assert server.client.get(f"/v1/files/{file_id}").status_code == 200
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        if is_over:
            break
    for thread in threads:
        thread.join()
    code = "too_many_lines" if content == "newlines" else "duplicate_custom_id"
    assert {(answer.status_code, error_of(answer)["code"]) for answer in answers} == {(400, code)}
    assert slowest_s < 5.0
    assert server.client.delete(f"/v1/files/{file_id}").status_code == 200

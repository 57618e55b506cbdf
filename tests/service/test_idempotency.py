"""Idempotency-Key: one answer for each key, without an engine and with a server that is killed in between."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import DiffserveError, QueueFull
from diffserve.service.app import _reply
from diffserve.service.stored.idempotency import UNKEPT, Idempotency
from diffserve.service.stored.owners import Owners
from diffserve.settings.layers import load_settings
from diffserve.store import Database
from diffserve.store.replies import Replies
from tests.service.server import GENERATIONS, RunningServer, error_of, files_of, running_server

KEY = "Idempotency-Key"


def test_equal_requests_get_one_answer_and_different_ones_are_refused(tmp_path: Path) -> None:
    """Send requests concurrently, sequentially, and to an application that only shares the database file."""
    bodies: list[bytes] = []
    release = asyncio.Event()

    async def work(request: Request) -> Response:
        bodies.append(await request.body())
        await release.wait()
        if b"wrong" in bodies[-1]:
            raise QueueFull("full", retry_after_s=1.0)
        return JSONResponse({"number": len(bodies)}, headers={"x-diffserve-warnings": "one"})

    def application() -> FastAPI:
        app = FastAPI()
        app.add_exception_handler(DiffserveError, _reply)
        idempotency = Idempotency(Replies(Database(tmp_path)), Owners(load_settings(env={}).serve, None))

        async def answer(request: Request) -> Response:
            return await idempotency.answer(request, work)

        app.add_api_route("/v1/a", answer, methods=["POST"])
        app.add_api_route("/v1/b", answer, methods=["POST"])
        return app

    async def ask_all() -> None:
        def client() -> httpx.AsyncClient:
            return httpx.AsyncClient(transport=httpx.ASGITransport(application()), base_url="http://x")

        async with client() as http_client:
            both = [
                asyncio.create_task(http_client.post("/v1/a", json={"a": 1, "b": 2}, headers={KEY: "k"}))
                for _ in range(5)
            ]
            while not bodies:
                await asyncio.sleep(0.001)
            other = await http_client.post("/v1/a", json={"a": 2}, headers={KEY: "k"})
            assert (other.status_code, error_of(other)["code"]) == (422, "idempotency_key_reused")
            release.set()
            answers = await asyncio.gather(*both)
            assert [answer.json() for answer in answers] == [{"number": 1}] * 5
            assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, *["true"] * 4]
            assert (await http_client.post("/v1/b", json={"a": 1, "b": 2}, headers={KEY: "k"})).json() == {"number": 2}
            assert (await http_client.post("/v1/a", json={"a": 1, "b": 2})).json() == {"number": 3}, (
                "without a key, anew"
            )
            for number in (4, 5):
                refused = await http_client.post("/v1/a", json={"wrong": 1}, headers={KEY: "w"})
                assert (refused.status_code, len(bodies)) == (429, number), "what failed is done again"
            for file in (b"x", b"x", b"y"):
                sent = await http_client.post("/v1/a", files={"file": file}, headers={KEY: "form"})
            assert (sent.status_code, len(bodies)) == (422, 6), "a form is the same whatever its boundary"
            for bad in (b"", b"k" * 256, "schlüssel".encode("latin-1"), b"a\tb"):
                answer = await http_client.post("/v1/a", json={}, headers=[(KEY.encode(), bad)])
                assert (answer.status_code, error_of(answer)["param"]) == (400, KEY)
        async with client() as later:
            again = await later.post("/v1/a/".rstrip("/"), content=b'{"b":2,  "a":1}', headers={KEY: "k"})
            assert (again.status_code, len(bodies)) == (422, 6), "JSON that does not say so is something else"
            again = await later.post("/v1/a", json={"b": 2, "a": 1}, headers={KEY: "k"})
            assert (again.json(), again.headers["x-diffserve-warnings"]) == ({"number": 1}, "one")

    asyncio.run(ask_all())


def test_answers_are_stored_for_a_day_within_limits(tmp_path: Path) -> None:
    from diffserve.store.replies import Reply, name_of

    now_s = 1e9
    replies = Replies(Database(tmp_path), max_bytes=100, clock=lambda: now_s)
    for number in range(4):
        replies.add(name_of("", "/a", str(number)), Reply(b"d", 200, {}, b"x" * 40))
        now_s += 1
    is_stored = [replies.get(name_of("", "/a", str(number))) is not None for number in range(4)]
    assert is_stored == [False, False, True, True]
    replies.add(name_of("", "/a", "long"), Reply(b"d", 200, {}, b"x" * 101))
    assert replies.get(name_of("", "/a", "long")) is None
    assert replies.get(name_of("key-other", "/a", "3")) is None
    now_s += 24 * 3600
    assert replies.get(name_of("", "/a", "3")) is None


@pytest.mark.parametrize("is_full", [True, False])
def test_an_answer_that_cannot_be_stored_is_reported(tmp_path: Path, is_full: bool) -> None:
    """Check a full disk and an answer that is too long, also for a request that waits for the same answer."""
    database = Database(tmp_path)
    if is_full:
        with database.writing() as connection:
            trigger = "CREATE TRIGGER full BEFORE INSERT ON replies BEGIN SELECT RAISE(ABORT, 'full'); END"
            connection.exec_driver_sql(trigger)
    replies = Replies(database, max_bytes=1 << 20 if is_full else 8)
    app, bodies, release = FastAPI(), list[bytes](), asyncio.Event()
    idempotency = Idempotency(replies, Owners(load_settings(env={}).serve, None))

    async def work(request: Request) -> Response:
        bodies.append(await request.body())
        await release.wait()
        if b"text" in bodies[-1]:
            return Response(b"no JSON at all")
        if b"plain" in bodies[-1]:
            return JSONResponse([len(bodies), "a list"])
        return JSONResponse({"data": "ä", "warnings": ["one"]}, headers={"x-diffserve-warnings": "one"})

    async def answer(request: Request) -> Response:
        return await idempotency.answer(request, work)

    app.add_api_route("/v1/a", answer, methods=["POST"])

    async def ask_all() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            both = [asyncio.create_task(client.post("/v1/a", json={}, headers={KEY: "k"})) for _ in range(2)]
            while not bodies:
                await asyncio.sleep(0.001)
            release.set()
            for reply in await asyncio.gather(*both):
                assert reply.json() == {"data": "ä", "warnings": ["one", UNKEPT]}
                assert reply.headers["x-diffserve-warnings"] == f"{UNKEPT} | one"
            again = await client.post("/v1/a", json={}, headers={KEY: "k"})
            assert (again.headers.get("idempotent-replayed"), len(bodies)) == (None, 2)
            for kind in ("text", "plain"):
                reply = await client.post("/v1/a", json={kind: 1}, headers={KEY: kind})
                assert (reply.status_code, reply.headers["x-diffserve-warnings"]) == (200, UNKEPT)
                assert UNKEPT not in reply.text

    asyncio.run(ask_all())


@pytest.mark.slow
def test_a_repeated_request_gets_the_same_image(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Disconnect the first client, let a second one wait for the same work, and a third one ask after a restart."""
    body: dict[str, Any] = {"prompt": "a red fox", "num_inference_steps": 150, "size": "64x64"}
    headers = {KEY: "my order"}
    with running_server(tiny_model("sd15"), tmp_path) as server:
        server.wait_until_ready()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}{GENERATIONS}", json=body, headers=headers, timeout=0.5)
        waited = server.client.post(GENERATIONS, json=body, headers=headers)
        assert waited.headers["idempotent-replayed"] == "true"
        first = files_of(waited)
        assert server.num_ended("finished") == 1
        assert server.num_ended("cancelled") == 0
        streamed = _stream(server, body | {"stream": True, "num_inference_steps": 3}, "stream")
        assert b"completed" in streamed
        assert _stream(server, body | {"stream": True, "num_inference_steps": 3}, "stream") == streamed
        _hang_up(server, body | {"stream": True}, "left")
        deadline_s = time.monotonic() + 60
        while server.num_ended("cancelled") == 0 and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert server.num_ended("cancelled") == 1, "hanging up ends a stream"
        server.process.kill()
        server.process.wait()
    with running_server(tiny_model("sd15"), tmp_path) as server:
        server.wait_until_ready()
        assert files_of(server.client.post(GENERATIONS, json=body, headers=headers)) == first
        assert server.num_ended("finished") == 0


def _stream(server: RunningServer, body: dict[str, Any], key: str) -> bytes:
    answer = server.client.post(GENERATIONS, json=body, headers={KEY: key})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    return answer.content


def _hang_up(server: RunningServer, body: dict[str, Any], key: str) -> None:
    with server.client.stream("POST", GENERATIONS, json=body, headers={KEY: key}) as answer:
        next(answer.iter_bytes())


@pytest.mark.slow
def test_fifty_concurrent_requests_generate_one_image(server: RunningServer) -> None:
    before = server.num_ended("finished")
    body = {"prompt": "a blue whale", "num_inference_steps": 5, "size": "64x64"}
    seeds: list[int] = []

    def ask() -> None:
        answer = httpx.post(f"{server.url}{GENERATIONS}", json=body, headers={KEY: "fifty"}, timeout=120)
        seeds.append(answer.json()["data"][0]["seed"])

    threads = [threading.Thread(target=ask) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(seeds), len(set(seeds)), server.num_ended("finished") - before) == (50, 1, 1)

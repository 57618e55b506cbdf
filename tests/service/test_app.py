"""The application without an engine and without a socket: what it describes, and what it tells to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from diffserve.config import load_settings
from diffserve.service.app import create_app
from diffserve.service.engine_client import EngineClient
from diffserve.service.gate import Gate

POSTS = ("/v1/images/generations", "/v1/chat/completions", "/v1/completions", "/v1/prompts/rewrite")


def ask(method: str, path: str, *, peer: str = "127.0.0.1", **settings: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        config = load_settings(env={})
        app = create_app(EngineClient(config), config.serve, Gate())
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **settings)

    return asyncio.run(run())


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from [node["$ref"]] if "$ref" in node else []
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_description_holds_every_address_and_everything_it_refers_to() -> None:
    described = ask("GET", "/openapi.json").json()
    assert set(POSTS) <= set(described["paths"])
    assert "/v1/images/generations/{request_id}/cancel" in described["paths"]
    found = set(references(described))
    assert found >= {f"#/components/schemas/{name}" for name in ("Message", "StreamOptions", "RewriterChoice")}
    assert {name.rpartition("/")[2] for name in found} <= set(described["components"]["schemas"])
    bodies = [described["paths"][path]["post"]["requestBody"]["content"]["application/json"] for path in POSTS]
    assert all(body["schema"]["required"] in (["prompt"], ["messages"]) for body in bodies)


@pytest.mark.parametrize("path", POSTS)
def test_while_the_models_load_everybody_is_asked_to_come_back(path: str) -> None:
    answer = ask("POST", path, json={"prompt": "a", "messages": [{"role": "user", "content": "a"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert answer.headers["retry-after"]


@pytest.mark.parametrize(("peer", "status"), [("127.0.0.1", 503), ("::1", 503), ("192.168.1.5", 403), ("8.8.8.8", 403)])
def test_only_the_servers_own_machine_may_list_request_ids(peer: str, status: int) -> None:
    assert ask("GET", "/debug/trace", peer=peer).status_code == status

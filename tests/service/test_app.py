"""The application without an engine or a socket: its OpenAPI document and its access rules."""

from __future__ import annotations

import asyncio
import re
import socket
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from diffserve.api.errors import ConfigError
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.docs import render
from diffserve.service.http.keys import OPEN, KeyRing
from diffserve.service.images.image_store import ImageStore
from diffserve.service.lifecycle import Gate
from diffserve.service.run import bind, check_open
from diffserve.settings.layers import load_settings
from diffserve.store.database import Database

POSTS = (
    *("/v1/images/generations", "/v1/chat/completions", "/v1/completions", "/v1/prompts/rewrite"),
    *("/v1/responses", "/v1/embeddings"),
)


def ask(
    method: str, path: str, *, peer: str = "127.0.0.1", env: Mapping[str, str] | None = None, **settings: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        config = load_settings(env=env or {})
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


def test_openapi_has_every_path_and_every_referenced_schema() -> None:
    described = ask("GET", "/openapi.json").json()
    assert set(POSTS) <= set(described["paths"])
    assert "/v1/images/generations/{request_id}/cancel" in described["paths"]
    paths = set(references(described))
    assert paths >= {f"#/components/schemas/{name}" for name in ("Message", "StreamOptions", "RewriterChoice")}
    assert {name.rpartition("/")[2] for name in paths} <= set(described["components"]["schemas"])
    stored = described["paths"]["/v1/responses/{response_id}"]
    assert set(stored) == {"get", "delete"}
    assert all({"200", "401", "404"} <= set(method["responses"]) for method in stored.values())
    assert {"200", "400", "413", "429", "503"} <= set(described["paths"]["/v1/embeddings"]["post"]["responses"])
    bodies = [described["paths"][path]["post"]["requestBody"]["content"]["application/json"] for path in POSTS]
    assert all(body["schema"]["required"] in (["prompt"], ["messages"], ["input"]) for body in bodies)


def test_openapi_operation_ids_are_unique(tmp_path: Path) -> None:
    async def describe() -> Any:
        config, pictures = load_settings(env={}), ImageStore(tmp_path / "pictures", max_bytes=1)
        return create_app(EngineClient(config), config.serve, Gate(), pictures=pictures).openapi()["paths"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = asyncio.run(describe())
    names = [method["operationId"] for methods in paths.values() for method in methods.values()]
    assert len(names) == len(set(names))
    assert set(paths["/v1/images/files/{name}"]) == {"get"}


def test_openapi_lists_every_route_with_its_statuses(tmp_path: Path) -> None:
    async def described() -> tuple[set[tuple[str, str]], Any]:
        config = load_settings(env={"DIFFSERVE_SERVE_DEBUG": "true"})
        pictures, ring = ImageStore(tmp_path / "pictures", max_bytes=1), KeyRing(Database(tmp_path))
        app = create_app(EngineClient(config), config.serve, Gate(), pictures=pictures, ring=ring)
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        return {
            (route.path, method) for route in routes for method in (route.methods or set()) - {"HEAD"}
        }, app.openapi()

    routes, document = asyncio.run(described())
    paths = document["paths"]
    assert len(routes) > 70
    for path, method in routes - {("/openapi.json", "GET")}:
        address = path.rstrip("/").replace(":path}", "}")
        operation = (paths.get(address) or paths[f"/v1{address}"])[method.lower()]
        statuses = set(map(int, operation["responses"]))
        assert {400, 403, 413, 415, 500} <= statuses, path
        assert (401 in statuses) == (address not in OPEN or (address, method) == ("/login", "POST")), path
        assert method != "POST" or {408, 429} <= statuses, path
        assert "requestBody" not in operation or address == "/login" or {404, 499, 503, 504, 507} <= statuses, path
        has_key = any(parameter["name"] == "Idempotency-Key" for parameter in operation.get("parameters", ()))
        assert (422 in statuses) == has_key, "nothing else here answers so"
        assert all(response["description"] for response in operation["responses"].values()), path
        assert operation["summary"], path
    progress = paths["/sdapi/v1/progress"]["get"]
    assert [parameter["name"] for parameter in progress["parameters"]] == ["skip_current_image"]
    painted = paths["/v1/images/generations"]["post"]["responses"]["200"]["content"]
    assert set(painted) == {"application/json", "text/event-stream"}
    assert set(paths["/v1/responses/{response_id}"]["get"]["responses"]["200"]["content"]) == set(painted)
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header", "basic"}


def test_api_docs_page_is_complete_and_loads_nothing_external() -> None:
    answer = ask("GET", "/docs")
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert not re.search(r"<script|<link|<img|<iframe|src=|url\(|@import|//", answer.text)
    for path in ask("GET", "/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in answer.text
    assert "<td><code>guidance_scale</code></td>" in answer.text
    hostile = {"info": {"title": "<b>", "version": "1"}, "paths": {"/<i>": {"get": {"responses": {}}}}}
    assert not re.search("<b>1|<i>", render(hostile))


def test_openapi_documents_path_parameters() -> None:
    for path, methods in ask("GET", "/openapi.json").json()["paths"].items():
        for method in methods.values():
            described = {parameter["name"] for parameter in method.get("parameters", []) if parameter["in"] == "path"}
            assert described == set(re.findall(r"{(\w+)", path)), path


@pytest.mark.parametrize("path", POSTS)
def test_requests_get_retry_after_while_the_models_load(path: str) -> None:
    answer = ask("POST", path, json={"prompt": "a", "messages": [{"role": "user", "content": "a"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert answer.headers["retry-after"]


@pytest.mark.parametrize(("peer", "status"), [("127.0.0.1", 503), ("::1", 503), ("192.168.1.5", 403), ("8.8.8.8", 403)])
def test_only_loopback_clients_may_list_request_ids(peer: str, status: int) -> None:
    assert ask("GET", "/debug/trace", peer=peer, env={"DIFFSERVE_SERVE_DEBUG": "true"}).status_code == status


def test_engine_internals_are_served_only_with_the_debug_option() -> None:
    answer = ask("GET", "/debug/trace")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert "/debug/trace" not in ask("GET", "/openapi.json").json()["paths"]


@pytest.mark.parametrize("path", ["/v1%2Fmodels", "/v1/images%2fgenerations", "/livez%00", "/v1%5cmodels"])
def test_an_encoded_slash_or_null_character_is_refused(path: str) -> None:
    answer = ask("GET", path)
    code = "null_character" if "%00" in path else "encoded_slash"
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_a_model_name_may_contain_a_slash() -> None:
    assert ask("GET", "/v1/models/org%2Fname").status_code == 503


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "status"),
    [
        ("127.0.0.1", "", "evil.test", 403),
        ("127.0.0.1", "", "192.168.1.5", 403),
        ("127.0.0.1", "paint.test", "paint.test:8000", 200),
        ("127.0.0.1", "*", "evil.test", 200),
        ("0.0.0.0", "", "evil.test", 403),
        ("0.0.0.0", "", "192.168.1.5:8000", 200),
        ("0.0.0.0", "", "[fe80::1]:8000", 200),
        ("0.0.0.0", "", "localhost:8000", 200),
        ("0.0.0.0", "", "localhost:99999", 403),
        ("0.0.0.0", "paint.test", "192.168.1.5", 403),
        ("0.0.0.0", "paint.test, other.test", "Other.Test", 200),
        ("0.0.0.0", "*", "evil.test", 200),
        ("paint.test", "", "paint.test", 200),
    ],
)
def test_only_allowed_host_names_are_served(bound: str, allowed: str, host: str, status: int) -> None:
    env = {"DIFFSERVE_SERVE_HOST": bound, "DIFFSERVE_SERVE_ALLOWED_HOSTS": allowed}
    answer = ask("GET", "/livez", env=env, headers={"Host": host})
    assert answer.status_code == status
    assert status == 200 or "allowed_hosts" in answer.json()["error"]["message"]


def test_answers_do_not_wait_for_an_acknowledged_head() -> None:
    config = load_settings(env={"DIFFSERVE_SERVE_PORT": "0"}).serve
    with (
        bind(config) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "paint.test"])
def test_other_machines_are_served_only_if_configured(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-open"):
        check_open(load_settings(env={"DIFFSERVE_SERVE_HOST": host}).serve, None)
    check_open(load_settings(env={"DIFFSERVE_SERVE_HOST": host, "DIFFSERVE_SERVE_ALLOW_OPEN": "true"}).serve, None)
    check_open(load_settings(env={}).serve, None)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/models", "/models/", "/v1/models/x", "/models/x/"])
def test_paths_match_without_v1_and_with_a_trailing_slash(path: str) -> None:
    assert ask("GET", path).status_code == 503, "the models are loading, so the route was found"


@pytest.mark.parametrize("path", ["/v2/models", "/v1/v1/models", "/livez/", "/v1/livez"])
def test_no_other_variant_of_a_path_matches(path: str) -> None:
    assert ask("GET", path).json()["error"]["code"] == "unknown_url"

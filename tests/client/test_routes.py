"""Test that both clients have a method for every route under /v1."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest

from diffserve.api.errors import DiffserveError
from diffserve.client import AsyncClient, Client
from diffserve.service.app import create_app
from diffserve.service.engine.client import EngineClient
from diffserve.service.images.image_store import ImageStore
from diffserve.service.lifecycle import Gate
from diffserve.settings.layers import load_settings
from diffserve.store import Database

CONVERSATION = "/{conversation_id}"
WITHOUT_METHOD = {
    "/v1/completions": "chat does more",
    **dict.fromkeys(
        (
            f"/v1/conversations{suffix}"
            for suffix in ("", CONVERSATION, f"{CONVERSATION}/items", f"{CONVERSATION}/items/{{item_id}}")
        ),
        "these clients use previous_response_id",
    ),
    "/v1/images/files/{name}": "fetched by its whole URL, with any client",
    "/v1/responses/{response_id}/input_items": "the caller has the input",
}
EXAMPLES = ((bytes, b"x"), (int, 1), (str, "x"))
"""Example arguments by the type in their annotation."""


def example(annotation: Any) -> Any:
    """Return a value of the type ``annotation``."""
    types = {annotation, *getattr(annotation, "__args__", ())}
    return next(value for kind, value in EXAMPLES if kind in types)


def arguments(method: Callable[..., Any]) -> list[Any]:
    """Return an example for each required parameter of ``method``."""
    hints = get_type_hints(method)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [
        example(hints[parameter.name])
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def methods(kind: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a client class that send a request."""
    functions = {name: value for name, value in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}
    return {name: value for name, value in functions.items() if name != "close"}


def requests_of_client() -> set[tuple[str, str]]:
    """Return (HTTP method, path) of the request of every client method."""
    requests: set[tuple[str, str]] = set()

    def answer(request: httpx.Request) -> httpx.Response:
        requests.add((request.method, request.url.path))
        return httpx.Response(500)

    with Client("http://127.0.0.1:9") as client:
        client._client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url=client.url)
        for method in methods(Client).values():
            with pytest.raises(DiffserveError):
                method(client, *arguments(method))
    return requests


def routes_of_server(folder: Path) -> set[tuple[str, str]]:
    """Return (HTTP method, path) of every route under /v1."""

    async def routes() -> set[tuple[str, str]]:
        config = load_settings(env={})
        pictures, database = ImageStore(folder / "pictures", max_bytes=1), Database(folder)
        app = create_app(EngineClient(config), config.serve, Gate(), pictures=pictures, database=database)
        pairs = [(method, getattr(route, "path", "").rstrip("/")) for route in app.routes for method in _methods(route)]
        return {(method, path) for method, path in pairs if path.startswith("/v1/") and method != "HEAD"}

    return asyncio.run(routes())


def _methods(route: Any) -> set[str]:
    return getattr(route, "methods", None) or set()


def test_every_route_has_a_method_in_both_clients(tmp_path: Path) -> None:
    requests, routes = requests_of_client(), routes_of_server(tmp_path)
    stored = {("POST", "/v1/batches"), ("DELETE", "/v1/files/{file_id}"), ("GET", "/v1/history"), ("GET", "/v1/usage")}
    assert {("POST", "/v1/images/edits"), *stored} <= routes

    def has_method(method: str, path: str) -> bool:
        pattern = re.compile(re.sub(r"\{[^}]*\}", "[^/]+", path))
        return any(method == other and pattern.fullmatch(sent_path) for other, sent_path in requests)

    missing = sorted((m, path) for m, path in routes if path not in WITHOUT_METHOD and not has_method(m, path))
    assert not missing, "add client methods for these routes, or give a reason in WITHOUT_METHOD"
    assert methods(AsyncClient).keys() == methods(Client).keys()

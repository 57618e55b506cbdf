"""Whatever the server offers under /v1, both clients have a function for."""

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
from diffserve.service.images.kept_pictures import KeptPictures
from diffserve.service.lifecycle import Gate
from diffserve.settings.layers import load_settings
from diffserve.store import Database

CONVERSATION = "/{conversation_id}"
WITHOUT_FUNCTION = {
    "/v1/completions": "chat does more",
    **dict.fromkeys(
        (
            f"/v1/conversations{rest}"
            for rest in ("", CONVERSATION, f"{CONVERSATION}/items", f"{CONVERSATION}/items/{{item_id}}")
        ),
        "ours go on by previous_response_id",
    ),
    "/v1/images/files/{name}": "fetched by its whole URL, with any client",
    "/v1/responses/{response_id}/input_items": "who asked knows what",
}
EXAMPLES = ((bytes, b"x"), (int, 1), (str, "x"))
"""Of arguments, by what their annotations name."""


def example(annotation: Any) -> Any:
    """A value that ``annotation`` allows."""
    named = {annotation, *getattr(annotation, "__args__", ())}
    return next(value for kind, value in EXAMPLES if kind in named)


def arguments(method: Callable[..., Any]) -> list[Any]:
    """One for each parameter that wants one."""
    hints = get_type_hints(method)
    wanted = list(inspect.signature(method).parameters.values())[1:]
    named = [one for one in wanted if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return [example(hints[one.name]) for one in named]


def methods(kind: type[Any]) -> dict[str, Callable[..., Any]]:
    """Public ones, which ask a server; of both clients the same."""
    found = {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"}
    return {name: value for name, value in found.items() if name != "close"}


def asked_by_client() -> set[tuple[str, str]]:
    """(method, path) of every function."""
    asked: set[tuple[str, str]] = set()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.add((request.method, request.url.path))
        return httpx.Response(500)

    with Client("http://127.0.0.1:9") as client:
        client._http = httpx.Client(transport=httpx.MockTransport(answer), base_url=client.url)
        for method in methods(Client).values():
            with pytest.raises(DiffserveError):
                method(client, *arguments(method))
    return asked


def offered(folder: Path) -> set[tuple[str, str]]:
    """(method, path) of every route under /v1."""

    async def routes() -> set[tuple[str, str]]:
        config = load_settings(env={})
        pictures, database = KeptPictures(folder / "pictures", max_bytes=1), Database(folder)
        app = create_app(EngineClient(config), config.serve, Gate(), pictures=pictures, database=database)
        found = [(method, getattr(route, "path", "").rstrip("/")) for route in app.routes for method in _methods(route)]
        return {(method, path) for method, path in found if path.startswith("/v1/") and method != "HEAD"}

    return asyncio.run(routes())


def _methods(route: Any) -> set[str]:
    return getattr(route, "methods", None) or set()


def test_every_route_has_a_function_in_both_clients(tmp_path: Path) -> None:
    asked, routes = asked_by_client(), offered(tmp_path)
    kept = {("POST", "/v1/batches"), ("DELETE", "/v1/files/{file_id}"), ("GET", "/v1/history"), ("GET", "/v1/usage")}
    assert {("POST", "/v1/images/edits"), *kept} <= routes

    def has_function(method: str, path: str) -> bool:
        pattern = re.compile(re.sub(r"\{[^}]*\}", "[^/]+", path))
        return any(method == one and pattern.fullmatch(where) for one, where in asked)

    missing = sorted((m, path) for m, path in routes if path not in WITHOUT_FUNCTION and not has_function(m, path))
    assert not missing, "write a function for these in diffserve.client, or say in WITHOUT_FUNCTION why there is none"
    assert methods(AsyncClient).keys() == methods(Client).keys()

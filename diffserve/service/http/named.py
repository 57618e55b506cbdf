"""Addresses as clients write them, and what is asked of a list in one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import show
from diffserve.service.http.openapi import said
from diffserve.store.pages import PageAsked

AnyEndpoint = TypeVar("AnyEndpoint", bound=Callable[..., Awaitable[Response]])

PAGE_PARAMETERS: Final = (
    ("after", {"type": "string"}, "The id of the last entry that was seen."),
    ("limit", {"type": "integer", "minimum": 1}, "How many entries at most."),
    ("order", {"type": "string", "enum": ["asc", "desc"]}, "desc: the newest first."),
)


def named(app: FastAPI, path: str, methods: list[str], **described: Any) -> Callable[[AnyEndpoint], AnyEndpoint]:
    """Offer an endpoint at ``path``, which begins with /v1, and without that and with a slash at its end: clients
    disagree about what a base URL is.
    """

    def add(endpoint: AnyEndpoint) -> AnyEndpoint:
        app.add_api_route(path, endpoint, methods=methods, **described)
        for other in (f"{path}/", path.removeprefix("/v1"), f"{path.removeprefix('/v1')}/"):
            app.add_api_route(other, endpoint, methods=methods, include_in_schema=False)
        return endpoint

    return add


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What an endpoint may answer beside what all may, for the description of the API."""
    return {status: {"description": said(status)} for status in statuses}


def query(*parameters: tuple[str, dict[str, Any], str]) -> dict[str, Any]:
    """``parameters`` (name, schema, what it means) of an address, for the description of the API."""
    told = [{"name": name, "in": "query", "schema": schema, "description": said} for name, schema, said in parameters]
    return {"parameters": told}


def page_asked(request: Request, *, most: int, usual: int) -> PageAsked:
    """Which page of a list ``request`` asks for, of at most ``most`` entries. Raises InvalidRequest."""
    limit = number_asked(request, "limit", range(1, most + 1), usual)
    order = choice_asked(request, "order", ("desc", "asc"))
    return PageAsked(limit, request.query_params.get("after", "")[:200], "asc" if order == "asc" else "desc")


def flag_asked(request: Request, name: str) -> bool:
    """Whether ``name`` is set in the address; without it, it is not. Raises InvalidRequest."""
    return choice_asked(request, name, ("false", "true", "False", "True", "0", "1")) in ("true", "True", "1")


def number_asked(request: Request, name: str, known: range, usual: int) -> int:
    """The whole number that stands in the address. Raises InvalidRequest."""
    text = request.query_params.get(name, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) in known):
        said = f"{name} is {show(text)}; it must be a whole number from {known.start} to {known.stop - 1}."
        raise InvalidRequest(said, param=name)
    return int(text)


def choice_asked(request: Request, name: str, known: Iterable[str], usual: str | None = None) -> str:
    """One of ``known`` that stands in the address, or the first of them, or ``usual``. Raises InvalidRequest."""
    known = tuple(known)
    text = request.query_params.get(name, known[0] if usual is None else usual)
    if text not in known and text != usual:
        raise InvalidRequest(f"{name} is {show(text)}; it must be one of {', '.join(known)}.", param=name)
    return text

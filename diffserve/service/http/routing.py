"""Route class and query parameters that several routes of the API share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Query
from fastapi.routing import APIRoute
from starlette.requests import Request

from diffserve.api.bounds import check
from diffserve.service.http.bodies import show
from diffserve.service.http.openapi import describe_status

After = Annotated[str, Query(max_length=200, description="The ID of the last entry of the previous page.")]
Order = Annotated[Literal["asc", "desc"], Query(description="desc: newest first.")]


class ApiRoute(APIRoute):
    """Route below ``/v1`` that also matches without ``/v1`` and with a trailing slash.

    Clients disagree about whether a base URL contains ``/v1``, and redirects would lose the body of a POST request.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if path.startswith("/v1/"):
            pattern = self.path_regex.pattern.removeprefix("^/v1").removesuffix("$")
            self.path_regex = re.compile(f"^(?:/v1)?{pattern}/?$")


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe error statuses of one route, in addition to those of every route."""
    return {status: {"description": describe_status(status)} for status in statuses}


def bool_query(request: Request, name: str) -> bool:
    """Read the boolean query parameter ``name``, which defaults to false.

    Raises:
        InvalidRequest: The value is not a boolean.
    """
    text = request.query_params.get(name, "false")
    check(text.lower() in ("false", "true", "0", "1"), f"{name} is {show(text)}; it must be true or false.", name)
    return text.lower() in ("true", "1")


def int_query(request: Request, name: str, allowed: range, default: int) -> int:
    """Read the integer query parameter ``name``.

    Raises:
        InvalidRequest: The value is not in ``allowed``.
    """
    text = request.query_params.get(name, str(default))
    message = f"{name} is {show(text)}; it must be a whole number from {allowed.start} to {allowed.stop - 1}."
    check(text.isascii() and text.isdigit() and len(text) < 10 and int(text) in allowed, message, name)
    return int(text)

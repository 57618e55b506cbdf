"""What ``/openapi.json`` says beyond what FastAPI knows of the routes: every status that may come, what errors look
like, how a key is shown, and what comes in pieces.

Bodies are read and errors told by ourselves, so FastAPI can know neither. What a route says of its own answers stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI

from diffserve.service.http.errors import A1111_PATHS
from diffserve.service.http.keys import OPEN
from diffserve.service.http.streams import HEADERS

ALWAYS: Final = (400, 403, 413, 415, 500)
"""The framing, the host, and a body that nobody asked for are looked at before any route; and all may fail."""

CLOSED: Final = (401,)
OF_POSTS: Final = (408, 429)
OF_WORK: Final = (404, 499, 503, 504, 507)
"""Of a body that asks for something: a name in it, being cancelled by its id, the engine, the deadline, the room."""

SAID: Final = {
    200: "Done.",
    400: "Something in the request is wrong; `param` and `message` say what.",
    401: "There is no good key.",
    403: "The key may not do this, or the request comes from another site's page.",
    404: "There is nothing by that name.",
    408: "The body took too long.",
    409: "Not now: something else is going on with it.",
    413: "The body is too long.",
    415: "The body is no JSON that says so, or compressed.",
    422: "That Idempotency-Key stands for another request.",
    429: "There is no room now, or the key's limit is reached; `Retry-After` says when to come back.",
    499: "It was cancelled by its id.",
    500: "The server made a mistake; its log has the `x-request-id` of this answer.",
    503: "The engine is loading or coming back; `Retry-After` says when to come back.",
    504: "It was not finished by its deadline.",
    507: "There is no room in memory, or on the disk, for this.",
}
VALIDATION_ERROR: Final = "Validation Error"
"""Of FastAPI's own check of parameters, which is asked of nothing here."""

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
TEXT: Final = {"type": "string"}
EVENT: Final = {
    "description": "An event, where stream is true.",
    "type": "object",
    "required": ["data"],
    "properties": {"event": TEXT, "data": TEXT},
}
ERROR: Final = {
    "title": "Error",
    "description": "OpenAI's error object.",
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
A1111_ERROR: Final = {
    "title": "A1111Error",
    "description": "An error in the words of A1111.",
    "type": "object",
    "required": ["error", "detail", "body", "errors"],
    "properties": dict.fromkeys(("error", "detail", "body", "errors"), TEXT),
}
SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, as OpenAI's clients send one."},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "basic": {"type": "http", "scheme": "basic", "description": "A key as the password, as A1111's clients send it."},
}
DESCRIPTION: Final = (
    "Pictures from texts and pictures, and what words them. Paths are there without `/v1`, too, and with a slash at "
    "the end. Where the server has no keys, none is asked for. Not served of A1111's API: `interrogate`, the upscaling "
    "routes (`extra-...`), `create` and `train`, `server-...`, and scripts other than ControlNet. Fields of A1111 that "
    "are ignored are named in the warnings."
)


def describe(app: FastAPI) -> None:
    """Have ``app`` say the rest, once all of its routes are there."""
    without = app.openapi

    def openapi() -> dict[str, Any]:
        described = without()
        if "securitySchemes" not in described.get("components", {}):
            _complete(described)
        return described

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's own handbook does


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and operation of all that is ``described``."""
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _complete(described: dict[str, Any]) -> None:
    described["info"]["description"] = DESCRIPTION
    parts = described.setdefault("components", {})
    parts["securitySchemes"] = SCHEMES
    parts.setdefault("schemas", {}).update({"Error": ERROR, "A1111Error": A1111_ERROR})
    for unused in ("HTTPValidationError", "ValidationError"):
        parts["schemas"].pop(unused, None)
    described["security"] = [{}, *({name: []} for name in SCHEMES)]
    for path, method, operation in operations(described):
        _complete_one(path, method, operation)


def _complete_one(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if responses.get("422", {}).get("description") == VALIDATION_ERROR:
        del responses["422"]
    is_open = path in OPEN
    if is_open:
        operation["security"] = []
    statuses = {*ALWAYS, *(() if is_open else CLOSED), *(OF_POSTS if method == "post" else ())}
    has_body = "requestBody" in operation
    statuses |= set(OF_WORK) if has_body else {404} if "{" in path else set()
    if any(one.get("name") == IDEMPOTENCY_KEY for one in operation.get("parameters", ())):
        statuses.add(422)
    statuses |= {int(status) for status in responses if status.isdigit() and int(status) >= 400}
    if not has_body and path != "/livez":
        statuses.add(503)
    kind = "A1111Error" if path.startswith(A1111_PATHS) else "Error"
    for status in sorted(statuses):
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
        told: dict[str, Any] = {"description": said(status), "content": content}
        if status in (429, 503):
            told["headers"] = {"Retry-After": {"description": "Seconds, at most 60.", "schema": {"type": "integer"}}}
        responses[str(status)] = told | responses.get(str(status), {})
    if "200" in responses:
        _describe_success(responses["200"], operation)


def _describe_success(told: dict[str, Any], operation: dict[str, Any]) -> None:
    if told.get("description") == "Successful Response":
        told["description"] = SAID[200]
    told.setdefault("headers", {})["x-request-id"] = {"description": "The id of the request.", "schema": TEXT}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "stream" in body.get("properties", {}):
        told["content"]["text/event-stream"] = {"schema": EVENT}
        told["headers"] |= {name: {"schema": TEXT, "description": "Of a stream."} for name in HEADERS}


def said(status: int) -> str:
    """What ``status`` means here."""
    return SAID.get(status) or HTTPStatus(status).phrase

"""Additions to FastAPI's OpenAPI document: error statuses, request bodies, authentication and event streams.

Request bodies are read by ``http.bodies``, not by FastAPI, because limits on size and shape apply before parsing;
so FastAPI cannot describe them or the errors, which are OpenAI's objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from diffserve.service.http.errors import A1111_PATHS
from diffserve.service.http.keys import OPEN
from diffserve.service.http.streams import HEADERS

STATUSES_OF_ALL: Final = (400, 403, 413, 415, 500)
"""Statuses of every route: middleware checks framing, host, origin and body before routing."""

STATUSES_OF_POSTS: Final = (408, 429)
STATUSES_OF_WORK: Final = (404, 499, 503, 504, 507)
"""Statuses of routes that run work: unknown names, cancellation by ID, engine, deadline, memory."""

STATUS_TEXTS: Final = {
    200: "Done.",
    400: "The request is invalid; `param` and `message` say why.",
    401: "The API key is missing or invalid.",
    403: "The key lacks a permission, or the request comes from another site's page.",
    404: "There is no object with this name.",
    408: "The body did not arrive in time.",
    409: "The object is in a state that does not allow this.",
    413: "The body is too long.",
    415: "The body is compressed or not declared as JSON.",
    422: "The Idempotency-Key belongs to another request.",
    429: "The queue is full, or the key's rate limit or daily quota is reached; `Retry-After` says when to retry.",
    499: "The request was cancelled by its ID.",
    500: "Internal error; the server's log has the `x-request-id` of this response.",
    503: "The engine is loading or restarting; `Retry-After` says when to retry.",
    504: "The deadline has passed.",
    507: "Not enough memory or disk space.",
}
VALIDATION_ERROR: Final = "Validation Error"
"""FastAPI's description of status 422; invalid parameters are answered with status 400 here."""

REFS: Final = "#/components/schemas/{model}"
"""Template of the references to schemas in ``/openapi.json``."""

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
TEXT: Final = {"type": "string"}
EVENT: Final = {
    "description": "A server-sent event, if stream is true.",
    "type": "object",
    "required": ["data"],
    "properties": {"event": TEXT, "data": TEXT},
}


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None
    predicted_s: Annotated[float | None, Field(description="Only if the deadline cannot be met.")] = None


class Error(BaseModel):
    """Body of an error response."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorObject


class A1111Error(BaseModel):
    """Body of an error response in A1111's form."""

    error: str
    detail: str
    body: str
    errors: str


SECURITY_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "An API key as the password, as A1111's clients send it.",
    },
}
DESCRIPTION: Final = (
    "Images from prompts and images, and text generation. Every path also works without `/v1` and with a trailing "
    "slash. A server without keys requires no authentication. Not supported from A1111's API: `interrogate`, the "
    "upscaling "
    "routes (`extra-...`), `create` and `train`, `server-...`, and scripts other than ControlNet. Ignored fields of "
    "A1111 are named in the warnings."
)


def describe_api(app: FastAPI) -> None:
    """Extend ``app.openapi``; call this when all routes exist."""
    openapi_of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = openapi_of_fastapi()
        if "securitySchemes" not in document.get("components", {}):
            _complete(document, app.state.body_schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI's documentation recommends


def describe_status(status: int) -> str:
    """Describe an HTTP status in this API."""
    return STATUS_TEXTS.get(status) or HTTPStatus(status).phrase


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the path, the method and the operation of every route in an OpenAPI document."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def _complete(document: dict[str, Any], body_schemas: dict[str, Any]) -> None:
    document["info"]["description"] = DESCRIPTION
    components = document.setdefault("components", {})
    components["securitySchemes"] = SECURITY_SCHEMES
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas |= body_schemas
    for model in (Error, A1111Error):
        schema = model.model_json_schema(ref_template=REFS)
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
    document["security"] = [{}, *({name: []} for name in SECURITY_SCHEMES)]
    for path, method, operation in operations(document):
        _complete_operation(path, method, operation)


def _complete_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    _add_path_parameters(path, operation)
    responses = operation["responses"]
    if responses.get("422", {}).get("description") == VALIDATION_ERROR:
        del responses["422"]
    is_open = path in OPEN
    if is_open:
        operation["security"] = []
    statuses = {*STATUSES_OF_ALL, *(() if is_open else (401,)), *(STATUSES_OF_POSTS if method == "post" else ())}
    has_body = "requestBody" in operation
    statuses |= set(STATUSES_OF_WORK) if has_body else {404} if "{" in path else set()
    if any(parameter.get("name") == IDEMPOTENCY_KEY for parameter in operation.get("parameters", ())):
        statuses.add(422)
    statuses |= {int(status) for status in responses if status.isdigit() and int(status) >= 400}
    if not has_body and path != "/livez":
        statuses.add(503)
    model = A1111Error if path.startswith(A1111_PATHS) else Error
    for status in sorted(statuses):
        content = {"application/json": {"schema": {"$ref": REFS.format(model=model.__name__)}}}
        response: dict[str, Any] = {"description": describe_status(status), "content": content}
        if status in (429, 503):
            retry_after = {
                "description": "Seconds: at most 60, or until the quota renews.",
                "schema": {"type": "integer"},
            }
            response["headers"] = {"Retry-After": retry_after}
        responses[str(status)] = response | responses.get(str(status), {})
    if "200" in responses:
        _complete_success(responses["200"], operation)


def _add_path_parameters(path: str, operation: dict[str, Any]) -> None:
    """Describe the path parameters of endpoints that take the bare request."""
    parameters = operation.get("parameters", [])
    described = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
    missing = [name for name in re.findall(r"{(\w+)", path) if name not in described]
    if missing:
        operation["parameters"] = [
            *({"in": "path", "name": name, "required": True, "schema": TEXT} for name in missing),
            *parameters,
        ]


def _complete_success(response: dict[str, Any], operation: dict[str, Any]) -> None:
    if response.get("description") == "Successful Response":
        response["description"] = STATUS_TEXTS[200]
    response.setdefault("headers", {})["x-request-id"] = {"description": "The ID of the request.", "schema": TEXT}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "stream" in body.get("properties", {}):
        response["content"]["text/event-stream"] = {"schema": EVENT}
        response["headers"] |= {name: {"schema": TEXT, "description": "Only in streams."} for name in HEADERS}

"""``/docs``: the API description as an HTML page without scripts or external files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from diffserve.service.http.openapi import operations
from diffserve.service.threads import ANSWERS

PATH: Final = "/docs"
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
STYLE: Final = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
details { border-top: 1px solid #8884; padding: .4rem 0 } summary { cursor: pointer }
code { font-size: .95em } table { border-collapse: collapse; margin: .5rem 0; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-top: 1px solid #8883 }
b { display: inline-block; min-width: 3.5rem }
"""


def add_docs(app: FastAPI) -> None:
    """Add the page and ``/openapi.json`` to ``app``."""
    cache: dict[str, bytes] = {}
    turns = asyncio.Lock()

    async def render_once(name: str, make: Callable[[], bytes]) -> bytes:
        async with turns:  # rendering takes a third of a second: once, and in a thread
            if name not in cache:
                cache[name] = await ANSWERS.run(make)
        return cache[name]

    @app.get("/openapi.json", include_in_schema=False)
    async def describe() -> Response:
        document = await render_once("document", lambda: msgspec.json.encode(app.openapi()))
        return Response(document, media_type="application/json")

    @app.get(PATH, summary="API description as an HTML page", response_class=HTMLResponse)
    async def answer() -> Response:
        page = await render_once("page", lambda: render(app.openapi()).encode())
        return HTMLResponse(page, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})


def render(described: dict[str, Any]) -> str:
    """Render an OpenAPI document as HTML."""
    title = f"{described['info']['title']} {described['info']['version']}"
    parts = described.get("components", {}).get("schemas", {})
    text = "".join(_operation(*item, parts) for item in operations(described))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main>'
        f"<h1>{escape(title)}</h1><p>{_render_text(described['info'].get('description', ''))}</p>"
        f'<p>For programs: <a href="openapi.json">openapi.json</a></p>{text}</main></body></html>'
    )


def _operation(path: str, method: str, operation: dict[str, Any], parts: dict[str, Any]) -> str:
    bodies = operation.get("requestBody", {}).get("content", {})
    inside = [_parameters(operation.get("parameters", []))]
    inside += [_body(kind, body.get("schema", {}), parts) for kind, body in bodies.items()]
    inside.append(_table("Answers", _responses(operation["responses"])))
    return (
        f"<details><summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code> "
        f"{escape(operation.get('summary', ''))}</summary>{''.join(inside)}</details>"
    )


def _parameters(parameters: list[dict[str, Any]]) -> str:
    rows = [
        (
            f"<code>{escape(item['name'])}</code>",
            f"in the {escape(item['in'])}",
            _render_text(item.get("description", "")),
        )
        for item in parameters
    ]
    return _table("Parameters", rows) if rows else ""


def _body(kind: str, schema: dict[str, Any], parts: dict[str, Any]) -> str:
    schema = _resolve_reference(schema, parts)
    rows = []
    for name, field in schema.get("properties", {}).items():
        resolved = _resolve_reference(field, parts)
        needed = "needed" if name in schema.get("required", ()) else f"else {escape(str(resolved.get('default')))}"
        description = resolved.get("description", "")
        rows.append((f"<code>{escape(name)}</code>", escape(type_of(field)), needed, _render_text(description)))
    return _table(f"Body: {kind}", rows)


def _responses(responses: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for status, text in sorted(responses.items()):
        yield escape(status), escape(", ".join(text.get("content", {}))), _render_text(text.get("description", ""))


def type_of(field: dict[str, Any]) -> str:
    """Describe the type of a field in words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(type_of(item) for item in field["anyOf"] if item.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(str(value) for value in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "anything"))
    if kind == "array":
        return f"list of {type_of(field.get('items', {}))}"
    low, high = field.get("minimum"), field.get("maximum")
    return kind if low is None or high is None else f"{kind} from {low} to {high}"


def _resolve_reference(schema: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    target: dict[str, Any] = parts.get(str(schema.get("$ref", "")).rpartition("/")[2], {})
    return target | schema


def _table(title: str, rows: Any) -> str:
    text = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h3>{escape(title)}</h3><table>{text}</table>"


def _render_text(text: str) -> str:
    """Render text with `code` in it."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))

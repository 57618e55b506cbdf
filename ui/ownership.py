"""Bind sessions and files of the page to the API key that made them.

Gradio identifies a session by a value that the browser chooses and a file by its path. Both appear in URLs and logs, so
knowing them must not be enough. Where the server asks for keys, each key has its own namespace of sessions, and a file
is only served to keys that uploaded it or that it was shown to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode

from ui.files import PageFiles

if TYPE_CHECKING:
    import gradio as gr

BOUND_QUERIES: Final = frozenset({"session_hash", "upload_id"})
"""Query parameters whose values the browser chooses and that identify something of a visitor."""

_key_id: ContextVar[str] = ContextVar("key_id", default="")
"""The key of the event that is processed in this context; empty where the server asks for none."""


def bound(name: str, key_id: str) -> str:
    """Return the name that gradio gets instead of ``name``: it differs for each key; without a key it is ``name``."""
    return hashlib.sha256(f"{key_id}/{name}".encode()).hexdigest() if key_id else name


def bound_query(query: bytes, key_id: str) -> bytes:
    """Return ``query`` with every identifier of a visitor bound to ``key_id``."""
    if not key_id or not any(name.encode() in query for name in BOUND_QUERIES):
        return query
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    bound_pairs = [(name, bound(value, key_id) if name in BOUND_QUERIES else value) for name, value in pairs]
    return urlencode(bound_pairs).encode()


def key_of(request: gr.Request | None) -> str:
    """Return the id of the key that ``request`` was admitted with; empty where the server asks for none."""
    key_id: str = getattr(getattr(request, "request", None), "scope", {}).get("state", {}).get("key_id", "")
    return key_id


def bind_files(blocks: gr.Blocks, files: PageFiles) -> None:
    """Grant each file that an event shows to the key of the event, and refuse events that name other files."""
    import gradio as gr

    process_api, preprocess, postprocess = blocks.process_api, blocks.preprocess_data, blocks.postprocess_data

    async def process_event(*arguments: Any, **keywords: Any) -> Any:
        request = keywords.get("request")
        token = _key_id.set(key_of(request if isinstance(request, gr.Request) else None))
        try:
            return await process_api(*arguments, **keywords)
        finally:
            _key_id.reset(token)

    async def check_inputs(block_fn: Any, inputs: list[Any], *arguments: Any, **keywords: Any) -> Any:
        key_id = _key_id.get()
        if key_id and not all(files.is_granted(path, key_id) for path in _paths_in(inputs)):
            raise gr.Error("That file was uploaded with another key; upload it again.", print_exception=False)
        return await preprocess(block_fn, inputs, *arguments, **keywords)

    async def grant_outputs(*arguments: Any, **keywords: Any) -> Any:
        data = await postprocess(*arguments, **keywords)
        if key_id := _key_id.get():
            for path in _paths_in(data):
                files.grant(path, key_id)
        return data

    blocks.process_api = process_event  # type: ignore[method-assign]
    blocks.preprocess_data = check_inputs  # type: ignore[method-assign]
    blocks.postprocess_data = grant_outputs  # type: ignore[method-assign]


def _paths_in(data: object) -> Iterator[Path]:
    """Yield the path of every file in values of components."""
    if isinstance(data, dict):
        if isinstance(data.get("path"), str):
            yield Path(data["path"])
        for value in data.values():
            yield from _paths_in(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _paths_in(value)

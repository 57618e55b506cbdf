"""Gradio page whose files belong to API keys, whose failed events are one sentence, and whose API has exact types."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, get_type_hints

import gradio as gr

from diffserve.api.errors import DiffserveError, InvalidRequest
from ui.api_types import correct_types
from ui.guard import event_errors, key_of
from ui.server import Models, Server, sentence

UNREADABLE: Final = "The request cannot be read; reload the page and try again."
OUR_MISTAKE: Final = "The server had an internal error; see its log for details."

_key_id: ContextVar[str] = ContextVar("key_id", default="")
"""The key of the event that is processed in this context; empty where the server asks for none."""

log = logging.getLogger("diffserve.page")


class PageBlocks(gr.Blocks):
    """Page of a server.

    Each file that an event shows is granted to the key of the event, and events that name other files are refused.
    Invalid values are reported as user errors; unexpected exceptions are logged and reported as internal errors.
    """

    def __init__(self, diffserve_server: Server, **options: Any) -> None:
        super().__init__(**options)
        self._diffserve_server = diffserve_server
        self._known_models: Models | None = None

    async def process_api(self, *arguments: Any, **keywords: Any) -> Any:
        """Process an event on behalf of the key of its request."""
        request = keywords.get("request")
        token = _key_id.set(key_of(request if isinstance(request, gr.Request) else None))
        try:
            return await super().process_api(*arguments, **keywords)
        finally:
            _key_id.reset(token)

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Convert the values of an event for its function, after checking them."""
        try:
            key_id, files = _key_id.get(), self._diffserve_server.files
            if key_id and not all(files.is_granted(path, key_id) for path in _paths_in(inputs)):
                raise gr.Error("That file was uploaded with another key; upload it again.")
            if block_fn.is_validator_function:  # it reports invalid values at their fields
                return list(inputs)
            inputs = [
                _number_in(field, value) if isinstance(field, gr.Number) and block_fn.preprocess else value
                for field, value in zip(block_fn.inputs, inputs, strict=True)
            ]
            values: list[Any] = await super().preprocess_data(block_fn, inputs, *arguments, **keywords)
            for field, value in zip(block_fn.inputs, values, strict=True):
                if getattr(field, "multiselect", False) and not isinstance(value, list | None):
                    raise TypeError("a multiple choice requires a list")
            return _filled(block_fn.fn, values)
        except Exception as error:
            text = error.message if isinstance(error, gr.Error) else UNREADABLE
            raise _report(gr.Error(text, print_exception=False), InvalidRequest(text, param="data")) from None

    async def call_function(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function of an event."""
        try:
            return await super().call_function(*arguments, **keywords)
        except gr.Error as error:
            error.print_exception = False
            raise _report(error, InvalidRequest(str(error.message))) from None
        except InvalidRequest as error:
            raise _report(gr.Error(sentence(error), print_exception=False), error) from None
        except Exception:
            log.exception("an event of the page failed")
            raise _report(gr.Error(OUR_MISTAKE, print_exception=False), DiffserveError(OUR_MISTAKE)) from None

    async def postprocess_data(self, *arguments: Any, **keywords: Any) -> list[Any]:
        """Convert the results of an event for the browser, and grant their files."""
        data: list[Any] = await super().postprocess_data(*arguments, **keywords)
        if key_id := _key_id.get():
            for path in _paths_in(data):
                self._diffserve_server.files.grant(path, key_id)
        return data

    def get_api_info(self, all_endpoints: bool = False, page: str | None = None) -> Any:
        """Return gradio's description of the endpoints with the right types."""
        return correct_types(super().get_api_info(all_endpoints, page), self._known_models)

    async def refresh_types(self, app: Any) -> None:
        """Discard the cached endpoint description of ``app`` if the models of the server changed."""
        try:
            models = await self._diffserve_server.models(is_fresh=True)
        except DiffserveError:  # while they are loaded
            return
        if models != self._known_models:
            self._known_models = models
            app.api_info = app.all_app_info = None
            app.page_api_info.clear()


class FreshInfo:
    """ASGI middleware that refreshes the description of the endpoints before it is read."""

    def __init__(self, app: Callable[..., Awaitable[None]], *, blocks: PageBlocks, gradio_app: Any, path: str) -> None:
        self._app = app
        self._blocks = blocks
        self._gradio_app = gradio_app
        self._path = path

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Refresh the types before a request for the API description."""
        if scope["type"] == "http" and scope["path"].rstrip("/") == self._path:
            await self._blocks.refresh_types(self._gradio_app)
        await self._app(scope, receive, send)


def _report(error: gr.Error, answer: DiffserveError) -> gr.Error:
    """Pass ``answer`` to the request that waits for the event, if there is one, and return ``error``."""
    failed = event_errors.get()
    if failed is not None:
        failed.append(answer)
    return error


def _filled(function: Callable[..., Any], values: list[Any]) -> list[Any]:
    """Replace None by an empty string where ``function`` takes text, because clients may send empty fields so."""
    hints = get_type_hints(function) if inspect.isroutine(function) else {}
    kinds = [hints.get(name) for name in inspect.signature(function).parameters]
    return [
        "" if value is None and index < len(kinds) and kinds[index] is str else value
        for index, value in enumerate(values)
    ]


def _number_in(field: gr.Number, value: object) -> object:
    """Return the number for ``field``, which clients may send as text; None for an empty one.

    Raises:
        gr.Error: It is out of bounds; gradio's message would not name the field.
        ValueError: It is no number.
    """
    if isinstance(value, str):
        value = float(value.replace(",", ".")) if value.strip() else None
    low = -math.inf if field.minimum is None else field.minimum
    high = math.inf if field.maximum is None else field.maximum
    if isinstance(value, int | float) and not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise gr.Error(f"{field.label} is {value:g}; give a number {bounds}, or leave it empty.")
    return value


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

"""Middleware for Ray Serve's proxies in front of this server, which makes their responses equal to the server's own.

Ray's proxies accept control headers from clients, add a second request ID and report a lost replica without an error
object. The cluster's environment names this module (``cluster.ray_calls``).
"""

from __future__ import annotations

from typing import Any, Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffserve.api.errors import EngineUnavailable
from diffserve.service.http.errors import reply_to

ID: Final = b"x-request-id"
THEIR_WORDS: Final = frozenset(
    {ID, b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve_multiplexed_model_id"}
)
OURS: Final = b"openai-processing-ms"
"""Header of every answer of a front."""
OWN: Final = "/-/"
"""Beginning of the paths that the proxy itself answers."""


def middlewares() -> list[Any]:
    """Return the middleware of a proxy."""
    return [Middleware(BeforeProxy)]


class BeforeProxy:
    """Removes Ray's control headers and request ID, and turns its errors into error objects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request without Ray's control headers and filter the response."""
        if scope["type"] != "http" or scope["path"].startswith(OWN):
            await self._app(scope, receive, send)
            return
        is_lost = False

        async def send_ours(message: Message) -> None:
            nonlocal is_lost
            if message["type"] == "http.response.start":
                headers = [(name.lower(), value) for name, value in message["headers"]]
                is_lost = OURS not in dict(headers) and message["status"] >= 400
                ids = [item for item in headers if item[0] == ID][:1]
                message = {**message, "headers": [*(item for item in headers if item[0] != ID), *ids]}
            if not is_lost:
                await send(message)
            elif not message.get("more_body", message["type"] == "http.response.start"):
                error = EngineUnavailable("the server is starting; please try again in a moment.")
                await reply_to(error).response(scope, receive, send)

        headers = [item for item in scope["headers"] if item[0].lower() not in THEIR_WORDS]
        await self._app({**scope, "headers": headers}, receive, send_ours)

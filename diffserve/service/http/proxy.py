"""What stands before Ray Serve's proxies, where a front of ours is behind them: one id, one kind of error.

Named in the environment of the cluster (``cluster.ray_calls``). A proxy of Ray Serve takes words of its own in headers
from whoever asks, puts an id of its own beside that of the front, and says of a front that is lost what is no error
object; nothing of that is told here.
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
"""A header of every answer of a front."""
OWN: Final = "/-/"
"""Where a proxy itself answers."""


def middlewares() -> list[Any]:
    """What a proxy is to be wrapped in."""
    return [Middleware(BeforeProxy)]


class BeforeProxy:
    """Has the front behind a proxy answer as one that listens itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the proxy answer, without words for it, and tell of the answer what is the front's."""
        if scope["type"] != "http" or scope["path"].startswith(OWN):
            await self._app(scope, receive, send)
            return
        is_lost = False

        async def send_ours(message: Message) -> None:
            nonlocal is_lost
            if message["type"] == "http.response.start":
                headers = [(name.lower(), value) for name, value in message["headers"]]
                is_lost = OURS not in dict(headers) and message["status"] >= 400
                ids = [one for one in headers if one[0] == ID][:1]
                message = {**message, "headers": [*(one for one in headers if one[0] != ID), *ids]}
            if not is_lost:
                await send(message)
            elif not message.get("more_body", message["type"] == "http.response.start"):
                error = EngineUnavailable("the front is being started; please try again in a moment.")
                await reply_to(error).response(scope, receive, send)

        headers = [one for one in scope["headers"] if one[0].lower() not in THEIR_WORDS]
        await self._app({**scope, "headers": headers}, receive, send_ours)

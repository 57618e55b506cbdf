"""HEAD: what GET would answer, without its body; and ``Allow`` names it wherever GET is."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Has everything below it see a GET where HEAD is asked, and sends the head of its answer alone.

    The answer is complete with its head: of a file or a stream nothing more is read, as when a client hangs up.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_allowing(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 405:
                headers = MutableHeaders(scope=message)
                allowed = {method.strip() for method in headers.get("allow", "").split(",")}
                if "GET" in allowed:
                    headers["allow"] = ", ".join(sorted(allowed | {"HEAD"}))
            await send(message)

        if scope["method"] != "HEAD":
            await self.app(scope, receive, send_allowing)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        scope["method"] = "GET"  # in place: whoever stands above reads from it which route it was
        try:
            await self.app(scope, receive, send_head)
        finally:
            scope["method"] = "HEAD"

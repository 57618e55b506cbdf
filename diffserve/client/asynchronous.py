"""AsyncClient: a server's functions for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Generic, Self, TypeVar, Unpack

import httpx
import msgspec

from diffserve.client import calls, on_behalf
from diffserve.client.answers import Chat, ChatDelta, ChatMessage, ImageEvent, Images, Model, RewriteEvent, Rewrites
from diffserve.client.calls import DEFAULT_URL, JSON, TIMEOUT_S, Call, ChatFields, RewriteFields, StreamCall
from diffserve.client.errors import ServerLost, error_of_answer, raise_for_transport, unexpected
from diffserve.client.events import EventParser, Reader
from diffserve.client.recipe import ImageFields, StreamedImageFields

AnswerT = TypeVar("AnswerT")
EventT = TypeVar("EventT")


class AsyncStream(Generic[EventT]):
    """Events as they come, to be iterated over once. Entering its ``async with`` block sends the request, leaving it
    ends the work.

    request_id  by which somebody else can cancel it; empty before the block is entered

    Iterating raises what the server says went wrong, and ServerLost where it ends too early.
    """

    def __init__(self, http: httpx.AsyncClient, request: httpx.Request, reader: Reader[EventT], url: str) -> None:
        self.request_id = ""
        self._http = http
        self._request = request
        self._reader = reader
        self._url = url
        self._response: httpx.Response | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        try:
            response = self._response = await self._http.send(self._request, stream=True)
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise error_of_answer(self._url, response)
        except httpx.HTTPError as error:
            raise_for_transport(self._url, error)
        self.request_id = response.headers.get("x-request-id", "")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[EventT]:
        if self._response is None:
            raise RuntimeError("enter the stream's async with block before iterating over it.")
        parser = EventParser()
        try:
            async for chunk in self._response.aiter_bytes():
                for data in parser.feed(chunk):
                    for event in self._reader.read(data):
                        if self._is_closed:
                            return
                        yield event
        except (httpx.HTTPError, httpx.StreamError) as error:
            if not self._is_closed:
                raise_for_transport(self._url, error)
        except msgspec.MsgspecError as error:
            raise unexpected(self._url) from error
        if not self._reader.is_complete and not self._is_closed:
            raise ServerLost(f"the answer of {self._url} ended too early; is the server still running?")

    async def close(self) -> None:
        """Hang up; the server ends the work at its next step, and the events end."""
        self._is_closed = True
        if self._response is not None:
            await self._response.aclose()


class AsyncClient:
    """As :class:`diffserve.client.Client`, for asyncio. Streams are entered with ``async with``."""

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = calls.base_url(url)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(**calls.settings(self.url, timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def generate(self, prompt: str, **fields: Unpack[ImageFields]) -> Images:
        """Paint ``prompt`` and wait."""
        return await self._send(calls.generate(prompt, fields))

    def generate_stream(self, prompt: str, **fields: Unpack[StreamedImageFields]) -> AsyncStream[ImageEvent]:
        """Paint ``prompt`` and watch."""
        return self._open(calls.generate_stream(prompt, fields))

    async def cancel(self, request_id: str) -> bool:
        """End a request for pictures; False where it is over already, or was never there."""
        return await self._send(calls.cancel(request_id))

    async def rewrite(self, prompt: str, **fields: Unpack[RewriteFields]) -> Rewrites:
        """Turn the wish ``prompt`` into prompts that the image model reads well."""
        return await self._send(calls.rewrite(prompt, fields))

    def rewrite_stream(self, prompt: str, **fields: Unpack[RewriteFields]) -> AsyncStream[RewriteEvent]:
        """The same, word by word; the last event is the whole answer."""
        return self._open(calls.rewrite_stream(prompt, fields))

    async def chat(self, messages: str | Sequence[ChatMessage], **fields: Unpack[ChatFields]) -> Chat:
        """Have a conversation, or a single text, answered by the language model."""
        return await self._send(calls.chat(messages, fields))

    def chat_stream(
        self, messages: str | Sequence[ChatMessage], **fields: Unpack[ChatFields]
    ) -> AsyncStream[ChatDelta]:
        """The same, word by word."""
        return self._open(calls.chat_stream(messages, fields))

    async def models(self) -> tuple[Model, ...]:
        """Every name that a request may give as its model, the image model first."""
        return await self._send(calls.models())

    async def model(self, name: str) -> Model:
        """One of them, with what it can do. Raises ModelNotFound."""
        return await self._send(calls.model(name))

    async def is_ready(self) -> bool:
        """Whether a request would be worked on now; False while the server loads its models."""
        return await self._send(calls.ready())

    async def _send(self, call: Call[AnswerT]) -> AnswerT:
        headers = on_behalf.headers() | (JSON if call.body else {})
        try:
            response = await self._http.request(call.method, call.path, content=call.body, headers=headers)
        except httpx.HTTPError as error:
            raise_for_transport(self.url, error)
        return calls.read(call, self.url, response)

    def _open(self, call: StreamCall[EventT]) -> AsyncStream[EventT]:
        timeout = calls.stream_timeout(self._timeout_s)
        headers = on_behalf.headers() | JSON
        request = self._http.build_request("POST", call.path, content=call.body, headers=headers, timeout=timeout)
        return AsyncStream(self._http, request, call.reader, self.url)

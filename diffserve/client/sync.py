"""Client: a server's functions as ordinary calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Self, TypeVar, Unpack

import httpx
import msgspec

from diffserve.client import calls
from diffserve.client.answers import Chat, ChatDelta, ChatMessage, ImageEvent, Images, Model, RewriteEvent, Rewrites
from diffserve.client.calls import DEFAULT_URL, JSON, TIMEOUT_S, Call, ChatFields, RewriteFields, StreamCall
from diffserve.client.errors import ServerLost, error_of_answer, raise_for_transport, unexpected
from diffserve.client.events import EventParser, Reader
from diffserve.client.recipe import ImageFields, StreamedImageFields

AnswerT = TypeVar("AnswerT")
EventT = TypeVar("EventT")


class Stream(Generic[EventT]):
    """Events as they come, to be iterated over once. Leaving its ``with`` block, or ``close``, ends the work.

    request_id  by which somebody else can cancel it

    Iterating raises what the server says went wrong, and ServerLost where it ends too early.
    """

    def __init__(self, response: httpx.Response, reader: Reader[EventT], url: str) -> None:
        self.request_id = response.headers.get("x-request-id", "")
        self._response = response
        self._reader = reader
        self._url = url
        self._is_closed = False
        self._events = self._read()

    def __iter__(self) -> Iterator[EventT]:
        return self._events

    def __next__(self) -> EventT:
        return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, from any thread; the server ends the work at its next step, and the events end."""
        self._is_closed = True
        self._response.close()

    def _read(self) -> Iterator[EventT]:
        parser = EventParser()
        try:
            for chunk in self._response.iter_bytes():
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
        is_whole = self._reader.is_complete or self._is_closed
        self.close()
        if not is_whole:
            raise ServerLost(f"the answer of {self._url} ended too early; is the server still running?")


class Client:
    """A diffserve server at ``url``. Safe to share between threads; close it, or use it as a context manager.

    Every method raises what the server says (InvalidRequest, ModelNotFound, QueueFull, EngineUnavailable,
    DeadlineExceeded, RequestCancelled or DiffserveError, with the server's sentence), ServerUnreachable where nobody
    answers, and ServerLost where the connection ends too early.
    """

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = calls.base_url(url)
        self._timeout_s = timeout_s
        self._http = httpx.Client(**calls.settings(self.url, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def generate(self, prompt: str, **fields: Unpack[ImageFields]) -> Images:
        """Paint ``prompt`` and wait."""
        return self._send(calls.generate(prompt, fields))

    def generate_stream(self, prompt: str, **fields: Unpack[StreamedImageFields]) -> Stream[ImageEvent]:
        """Paint ``prompt`` and watch."""
        return self._open(calls.generate_stream(prompt, fields))

    def cancel(self, request_id: str) -> bool:
        """End a request for pictures; False where it is over already, or was never there."""
        return self._send(calls.cancel(request_id))

    def rewrite(self, prompt: str, **fields: Unpack[RewriteFields]) -> Rewrites:
        """Turn the wish ``prompt`` into prompts that the image model reads well."""
        return self._send(calls.rewrite(prompt, fields))

    def rewrite_stream(self, prompt: str, **fields: Unpack[RewriteFields]) -> Stream[RewriteEvent]:
        """The same, word by word; the last event is the whole answer."""
        return self._open(calls.rewrite_stream(prompt, fields))

    def chat(self, messages: str | Sequence[ChatMessage], **fields: Unpack[ChatFields]) -> Chat:
        """Have a conversation, or a single text, answered by the language model."""
        return self._send(calls.chat(messages, fields))

    def chat_stream(self, messages: str | Sequence[ChatMessage], **fields: Unpack[ChatFields]) -> Stream[ChatDelta]:
        """The same, word by word."""
        return self._open(calls.chat_stream(messages, fields))

    def models(self) -> tuple[Model, ...]:
        """Every name that a request may give as its model, the image model first."""
        return self._send(calls.models())

    def model(self, name: str) -> Model:
        """One of them, with what it can do. Raises ModelNotFound."""
        return self._send(calls.model(name))

    def is_ready(self) -> bool:
        """Whether a request would be worked on now; False while the server loads its models."""
        return self._send(calls.ready())

    def _send(self, call: Call[AnswerT]) -> AnswerT:
        try:
            response = self._http.request(
                call.method, call.path, content=call.body, headers=JSON if call.body else None
            )
        except httpx.HTTPError as error:
            raise_for_transport(self.url, error)
        return calls.read(call, self.url, response)

    def _open(self, call: StreamCall[EventT]) -> Stream[EventT]:
        timeout = calls.stream_timeout(self._timeout_s)
        request = self._http.build_request("POST", call.path, content=call.body, headers=JSON, timeout=timeout)
        try:
            response = self._http.send(request, stream=True)
            if response.status_code != httpx.codes.OK:
                response.read()
                raise error_of_answer(self.url, response)
        except httpx.HTTPError as error:
            raise_for_transport(self.url, error)
        return Stream(response, call.reader, self.url)

"""Client: a server's functions as ordinary calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, Unpack

import httpx
import msgspec

from diffserve.client import calls, stored
from diffserve.client.answers import (
    Chat,
    ChatDelta,
    ChatMessage,
    ImageEvent,
    Images,
    Model,
    Provenance,
    RewriteEvent,
    Rewrites,
    ServerCapabilities,
)
from diffserve.client.calls import DEFAULT_URL, TIMEOUT_S, Call, ChatFields, RewriteFields, StreamCall
from diffserve.client.errors import ServerLost, error_of_answer, raise_for_transport, unexpected
from diffserve.client.events import EventParser, Reader
from diffserve.client.recipe import EditFields, ImageFields, StreamedEditFields, StreamedImageFields
from diffserve.client.responses import EmbeddingFields, Embeddings, Response, ResponseEvent, ResponseFields
from diffserve.client.stored import (
    HistoryEntry,
    HistoryFields,
    Listed,
    PageFields,
    StoredBatch,
    StoredFile,
    UsedDay,
)

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
    answers, and ServerLost where the connection ends too early. ``api_key``: where the server asks for one;
    else that of the environment, ``DIFFSERVE_API_KEY``.
    """

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = TIMEOUT_S, api_key: str | None = None) -> None:
        self.url = calls.base_url(url)
        self._timeout_s = timeout_s
        self._http = httpx.Client(**calls.settings(self.url, timeout_s, api_key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def generate(self, prompt: str, *, idempotency_key: str | None = None, **fields: Unpack[ImageFields]) -> Images:
        """Paint ``prompt`` and wait. Asked again by the same ``idempotency_key`` within a day, because the answer never
        came, the pictures are the same, and are not painted again."""
        return self._send(calls.generate(prompt, fields).under(idempotency_key))

    def generate_stream(self, prompt: str, **fields: Unpack[StreamedImageFields]) -> Stream[ImageEvent]:
        """Paint ``prompt`` and watch."""
        return self._open(calls.generate_stream(prompt, fields))

    def edit(self, prompt: str, image: bytes, mask: bytes | None = None, **fields: Unpack[EditFields]) -> Images:
        """Paint ``prompt`` from the picture file ``image``, or only where ``mask`` is transparent (white), and wait."""
        return self._send(calls.edit(prompt, image, mask, fields))

    def edit_stream(
        self, prompt: str, image: bytes, mask: bytes | None = None, **fields: Unpack[StreamedEditFields]
    ) -> Stream[ImageEvent]:
        """The same, and watch."""
        return self._open(calls.edit_stream(prompt, image, mask, fields))

    def vary(self, image: bytes, **fields: Unpack[EditFields]) -> Images:
        """Paint the picture file ``image`` again, by the prompt that it says it was painted by."""
        return self._send(calls.vary(image, fields))

    def verify(self, image: bytes) -> Provenance:
        """What the picture in the file ``image`` says of where it is from."""
        return self._send(calls.verify(image))

    def cancel(self, request_id: str) -> bool:
        """End a request for pictures; False where it is over already, or was never there."""
        return self._send(calls.cancel(request_id))

    def interrupt(self, request_id: str) -> bool:
        """End a request for pictures early: its own answer has the unfinished ones; False where it is over already."""
        return self._send(calls.interrupt(request_id))

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

    def respond(self, given: str | Sequence[Mapping[str, Any]], **fields: Unpack[ResponseFields]) -> Response:
        """Have ``given``, a text or messages, answered or painted (``tools``), in a conversation that can go on."""
        return self._send(calls.respond(given, fields))

    def respond_stream(
        self, given: str | Sequence[Mapping[str, Any]], **fields: Unpack[ResponseFields]
    ) -> Stream[ResponseEvent]:
        """The same, piece by piece; the last event is the whole answer."""
        return self._open(calls.respond_stream(given, fields))

    def response(self, response_id: str) -> Response:
        """One that the server keeps. Raises DiffserveError where it is not there."""
        return self._send(calls.response(response_id))

    def cancel_response(self, response_id: str) -> Response:
        """End one that is made in the background, and how it ended."""
        return self._send(calls.cancel_response(response_id))

    def forget_response(self, response_id: str) -> bool:
        """Have the server forget one; False where it is not there."""
        return self._send(calls.forget_response(response_id))

    def embed(self, texts: str | Sequence[str], **fields: Unpack[EmbeddingFields]) -> Embeddings:
        """Turn ``texts`` into vectors of length 1, by the text encoder of the image model."""
        return self._send(calls.embed(texts, fields))

    def models(self) -> tuple[Model, ...]:
        """Every name that a request may give as its model, the image model first."""
        return self._send(calls.models())

    def capabilities(self) -> ServerCapabilities:
        """What the server takes: fields with their bounds, models, limits, the price."""
        return self._send(calls.capabilities())

    def model(self, name: str) -> Model:
        """One of them, with what it can do. Raises ModelNotFound."""
        return self._send(calls.model(name))

    def upload(self, data: bytes, filename: str = "batch.jsonl", purpose: str = "batch") -> StoredFile:
        """Keep a file at the server: the lines of a batch, above all (:func:`batch_lines`)."""
        return self._send(stored.upload(data, filename, purpose))

    def files(self, **fields: Unpack[PageFields]) -> Listed[StoredFile]:
        """A page of the files kept, the newest first."""
        return self._send(stored.files(fields))

    def file(self, file_id: str) -> StoredFile:
        """What is known of a file."""
        return self._send(stored.file(file_id))

    def file_content(self, file_id: str) -> bytes:
        """What is in a file."""
        return self._send(stored.file_content(file_id))

    def delete_file(self, file_id: str) -> bool:
        """Forget a file; False where there is none."""
        return self._send(stored.delete_file(file_id))

    def begin_batch(
        self, file_id: str, endpoint: str = calls.GENERATIONS, metadata: Mapping[str, str] | None = None
    ) -> StoredBatch:
        """Have the lines of a file worked on for ``endpoint``, when nobody waits."""
        return self._send(stored.begin_batch(file_id, endpoint, metadata or {}))

    def batch(self, batch_id: str) -> StoredBatch:
        """How far a batch is."""
        return self._send(stored.batch(batch_id))

    def batches(self, **fields: Unpack[PageFields]) -> Listed[StoredBatch]:
        """A page of the batches, the newest first."""
        return self._send(stored.batches(fields))

    def cancel_batch(self, batch_id: str) -> StoredBatch:
        """Stop a batch; what was done of it is in its output. Raises InvalidRequest where it is over."""
        return self._send(stored.cancel_batch(batch_id))

    def history(self, **fields: Unpack[HistoryFields]) -> Listed[HistoryEntry]:
        """A page of the pictures that were painted for this key, the newest first."""
        return self._send(stored.history(fields))

    def history_entry(self, entry_id: str) -> HistoryEntry:
        """One of them, with the request that repeats it."""
        return self._send(stored.history_entry(entry_id))

    def history_picture(self, entry_id: str) -> bytes:
        """Its file."""
        return self._send(stored.history_picture(entry_id))

    def history_thumbnail(self, entry_id: str) -> bytes:
        """The same in small, a WebP."""
        return self._send(stored.history_thumbnail(entry_id))

    def forget(self, entry_id: str) -> bool:
        """Remove one from the history, its file with it; False where it is not there."""
        return self._send(stored.forget(entry_id))

    def forget_all(self) -> int:
        """Remove all; how many there were."""
        return self._send(stored.forget_all())

    def usage(self, days: int = 30) -> tuple[UsedDay, ...]:
        """What this key has used, by day, the newest first."""
        return self._send(stored.usage(days))

    def usage_by_key(self, days: int = 30) -> tuple[UsedDay, ...]:
        """The same of every key, for whose key has the scope admin; by day, the newest first."""
        return self._send(stored.usage_by_key(days))

    def is_ready(self) -> bool:
        """Whether a request would be worked on now; False while the server loads its models."""
        return self._send(calls.ready())

    def _send(self, call: Call[AnswerT]) -> AnswerT:
        try:
            response = self._http.request(
                call.method, call.path, content=call.body, headers=dict(call.headers) if call.body else None
            )
        except httpx.HTTPError as error:
            raise_for_transport(self.url, error)
        return calls.read(call, self.url, response)

    def _open(self, call: StreamCall[EventT]) -> Stream[EventT]:
        timeout = calls.stream_timeout(self._timeout_s)
        request = self._http.build_request(
            "POST", call.path, content=call.body, headers=dict(call.headers), timeout=timeout
        )
        try:
            response = self._http.send(request, stream=True)
            if response.status_code != httpx.codes.OK:
                response.read()
                raise error_of_answer(self.url, response)
        except httpx.HTTPError as error:
            raise_for_transport(self.url, error)
        return Stream(response, call.reader, self.url)

"""Asynchronous client of a diffserve server, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, Unpack

import httpx
import msgspec

from diffserve.client import calls, on_behalf, stored
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


class AsyncStream(Generic[EventT]):
    """Events of a request in order of arrival; an asynchronous iterable that can be used once.

    Entering its ``async with`` block sends the request. Leaving the block, or ``close``, cancels it.

    Attributes:
        request_id: The ID for ``AsyncClient.cancel`` and ``AsyncClient.interrupt``; empty until the block is entered.

    Raises:
        ServerLost: While iterating: the connection ended before the last event.
        DiffserveError: On entry or while iterating: the server reported an error; its class depends on the error code.
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
                        if not self._is_closed:
                            yield event
        except (httpx.HTTPError, httpx.StreamError) as error:
            if not self._is_closed:
                raise_for_transport(self._url, error)
        except msgspec.MsgspecError as error:
            raise unexpected(self._url) from error
        if not self._reader.is_complete and not self._is_closed:
            raise ServerLost(f"the answer of {self._url} ended too early; is the server still running?")

    async def close(self) -> None:
        """Close the connection and end the iteration; the server cancels the request at its next step."""
        self._is_closed = True
        if self._response is not None:
            await self._response.aclose()


class AsyncClient:
    """Asynchronous client of a diffserve server, for asyncio.

    It raises the same exceptions as ``Client``. Methods that return an
    ``AsyncStream`` are not coroutines: enter the stream with ``async with``, then iterate over it with ``async for``.
    Close the client after use, or use it as an asynchronous context manager.

    Args:
        url: The address of the server, with or without ``/v1``.
        timeout_s: How long to wait for an answer, in seconds. Streams fail after 60 seconds without any data.
        api_key: The API key. None reads the environment variable ``DIFFSERVE_API_KEY``.

    Attributes:
        url: The address without ``/v1``.

    Raises:
        ConfigError: ``url`` is not an HTTP address.
    """

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float = TIMEOUT_S, api_key: str | None = None) -> None:
        self.url = calls.base_url(url)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(**calls.settings(self.url, timeout_s, api_key))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def generate(
        self, prompt: str, *, idempotency_key: str | None = None, **fields: Unpack[ImageFields]
    ) -> Images:
        """Generate images and wait for all of them.

        Args:
            prompt: What to generate.
            idempotency_key: A unique string that makes a retry safe: within a day, a second call with the same key and
                fields returns the stored answer instead of generating again.
            **fields: Optional request fields, see ``ImageFields``.

        Returns:
            All images of the request, in order. With ``best_of``, the best come first.

        Raises:
            InvalidRequest: A field is wrong, or the key was used for a different request.
            QueueFull: The server has too much queued work; ``retry_after_s`` says when to retry.
            DeadlineUnreachable: The request cannot be finished within its ``deadline_s``.
        """
        return await self._send(calls.generate(prompt, fields).under(idempotency_key))

    def generate_stream(self, prompt: str, **fields: Unpack[StreamedImageFields]) -> AsyncStream[ImageEvent]:
        """Generate images and stream progress, previews and finished images.

        Args:
            prompt: What to generate.
            **fields: Optional request fields, see ``StreamedImageFields``.

        Returns:
            A stream of ``Progress``, ``PartialImage``, ``CompletedImage`` and ``LostImage`` events.
        """
        return self._open(calls.generate_stream(prompt, fields))

    async def edit(self, prompt: str, image: bytes, mask: bytes | None = None, **fields: Unpack[EditFields]) -> Images:
        """Generate images from an existing image and wait for all of them.

        Args:
            prompt: What to generate.
            image: The bytes of the PNG, JPEG or WebP file to start from.
            mask: The bytes of an image file that selects the area to repaint: transparent pixels, or white ones if it
                has no transparency. None repaints the whole image, or its transparent area if it has one.
            **fields: Optional request fields, see ``EditFields``.

        Returns:
            All images of the request, in order.

        Raises:
            InvalidRequest: A field is wrong, or a file is not a readable image.
        """
        return await self._send(calls.edit(prompt, image, mask, fields))

    def edit_stream(
        self, prompt: str, image: bytes, mask: bytes | None = None, **fields: Unpack[StreamedEditFields]
    ) -> AsyncStream[ImageEvent]:
        """Generate images from an existing image and stream its events.

        Args:
            prompt: What to generate.
            image: The bytes of the PNG, JPEG or WebP file to start from.
            mask: The bytes of an image file that selects the area to repaint: transparent pixels, or white ones if it
                has no transparency. None repaints the whole image, or its transparent area if it has one.
            **fields: Optional request fields, see ``StreamedEditFields``.

        Returns:
            A stream of ``Progress``, ``PartialImage``, ``CompletedImage`` and ``LostImage`` events.
        """
        return self._open(calls.edit_stream(prompt, image, mask, fields))

    async def vary(self, image: bytes, **fields: Unpack[EditFields]) -> Images:
        """Generate variations of an image with the prompt stored in its metadata.

        Without such a prompt, the variation is generated with an empty one and the answer has a warning.

        Args:
            image: The bytes of the PNG, JPEG or WebP file to start from.
            **fields: Optional request fields, see ``EditFields``.

        Returns:
            All images of the request, in order.

        Raises:
            InvalidRequest: A field is wrong, or the file is not a readable image.
        """
        return await self._send(calls.vary(image, fields))

    async def verify(self, image: bytes) -> Provenance:
        """Read the provenance marks of an image: XMP, watermark and content credentials.

        Args:
            image: The bytes of the image file.

        Returns:
            The marks that were found, and whether they identify the image as generated.

        Raises:
            InvalidRequest: The file is not a readable image.
        """
        return await self._send(calls.verify(image))

    async def cancel(self, request_id: str) -> bool:
        """Cancel an image request.

        Args:
            request_id: The ``request_id`` of the stream, or the ID in an event.

        Returns:
            True if it was cancelled, False if it is already finished or unknown.
        """
        return await self._send(calls.cancel(request_id))

    async def interrupt(self, request_id: str) -> bool:
        """Stop an image request early; its own answer then contains the unfinished images.

        Args:
            request_id: The ``request_id`` of the stream, or the ID in an event.

        Returns:
            True if it was stopped, False if it is already finished or unknown.
        """
        return await self._send(calls.interrupt(request_id))

    async def rewrite(self, prompt: str, **fields: Unpack[RewriteFields]) -> Rewrites:
        """Rewrite a short description into detailed prompts for the image model.

        Args:
            prompt: The description.
            **fields: Optional request fields, see ``RewriteFields``.

        Returns:
            The prompts, the most likely first.

        Raises:
            InvalidRequest: A field is wrong, such as an unknown style.
        """
        return await self._send(calls.rewrite(prompt, fields))

    def rewrite_stream(self, prompt: str, **fields: Unpack[RewriteFields]) -> AsyncStream[RewriteEvent]:
        """Rewrite a short description into prompts and stream the text during generation.

        Args:
            prompt: The description.
            **fields: Optional request fields, see ``RewriteFields``.

        Returns:
            A stream of ``RewriteDelta`` events. The last event is the complete ``Rewrites``.
        """
        return self._open(calls.rewrite_stream(prompt, fields))

    async def chat(self, messages: str | Sequence[ChatMessage], **fields: Unpack[ChatFields]) -> Chat:
        """Answer a conversation with the language model.

        Args:
            messages: The conversation, or one user message as a string.
            **fields: Optional request fields, see ``ChatFields``.

        Returns:
            The answers (``n`` of them) with token counts.

        Raises:
            InvalidRequest: A field is wrong, or the conversation exceeds the context length.
            ModelNotFound: The server has no such model.
        """
        return await self._send(calls.chat(messages, fields))

    def chat_stream(
        self, messages: str | Sequence[ChatMessage], **fields: Unpack[ChatFields]
    ) -> AsyncStream[ChatDelta]:
        """Answer a conversation and stream the text during generation.

        Args:
            messages: The conversation, or one user message as a string.
            **fields: Optional request fields, see ``ChatFields``.

        Returns:
            A stream of ``ChatDelta`` events.
        """
        return self._open(calls.chat_stream(messages, fields))

    async def respond(
        self, response_input: str | Sequence[Mapping[str, Any]], **fields: Unpack[ResponseFields]
    ) -> Response:
        """Create a response: text, or images if ``tools`` allows them.

        Args:
            response_input: The input, a string or a list of message objects as in the OpenAI Responses API.
            **fields: Optional request fields, see ``ResponseFields``.

        Returns:
            The response. Pass its ``id`` as ``previous_response_id`` to continue the conversation.

        Raises:
            InvalidRequest: A value is not accepted.
        """
        return await self._send(calls.respond(response_input, fields))

    def respond_stream(
        self, response_input: str | Sequence[Mapping[str, Any]], **fields: Unpack[ResponseFields]
    ) -> AsyncStream[ResponseEvent]:
        """Create a response and stream text and image previews.

        Args:
            response_input: The input, a string or a list of message objects as in the OpenAI Responses API.
            **fields: Optional request fields, see ``ResponseFields``.

        Returns:
            A stream of ``ResponseDelta`` and ``ResponsePartial`` events. The last event is a ``ResponseEnd``.
        """
        return self._open(calls.respond_stream(response_input, fields))

    async def response(self, response_id: str) -> Response:
        """Fetch a stored response.

        Args:
            response_id: The ID of the response.

        Returns:
            The response in its current state.

        Raises:
            InvalidRequest: No stored response has this ID.
        """
        return await self._send(calls.response(response_id))

    async def cancel_response(self, response_id: str) -> Response:
        """Cancel a background response.

        Args:
            response_id: The ID of the response.

        Returns:
            The response in its final state.

        Raises:
            InvalidRequest: No stored response has this ID.
        """
        return await self._send(calls.cancel_response(response_id))

    async def forget_response(self, response_id: str) -> bool:
        """Delete a stored response.

        Args:
            response_id: The ID of the response.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._send(calls.forget_response(response_id))

    async def embed(self, texts: str | Sequence[str], **fields: Unpack[EmbeddingFields]) -> Embeddings:
        """Compute embeddings of texts with the text encoder of the image model.

        Args:
            texts: One text or several.
            **fields: Optional request fields, see ``EmbeddingFields``.

        Returns:
            One vector of length 1 per text, in the order of ``texts``.

        Raises:
            InvalidRequest: A value is not accepted.
        """
        return await self._send(calls.embed(texts, fields))

    async def models(self) -> tuple[Model, ...]:
        """List every model name that a request may use.

        Returns:
            The models, the image model first.
        """
        return await self._send(calls.models())

    async def capabilities(self) -> ServerCapabilities:
        """Fetch the capabilities of the server.

        Returns:
            The fields of each endpoint with their bounds, and the models, limits and price of the server.
        """
        return await self._send(calls.capabilities())

    async def model(self, name: str) -> Model:
        """Fetch one model with its capabilities.

        Args:
            name: The name of the model or an alias.

        Returns:
            The model.

        Raises:
            ModelNotFound: The server has no such model.
        """
        return await self._send(calls.model(name))

    async def upload(self, data: bytes, filename: str = "batch.jsonl", purpose: str = "batch") -> StoredFile:
        """Store a file on the server, usually the input of a batch.

        Args:
            data: The contents of the file; ``batch_lines`` builds those of a batch.
            filename: The name to list it by.
            purpose: What the file is for, such as "batch" or "vision".

        Returns:
            The stored file.

        Raises:
            InvalidRequest: The file is too large, or the storage limit of this key is reached.
        """
        return await self._send(stored.upload(data, filename, purpose))

    async def files(self, **fields: Unpack[PageFields]) -> Listed[StoredFile]:
        """List one page of the stored files.

        Args:
            **fields: Optional request fields, see ``PageFields``.

        Returns:
            The files, the newest first unless ``order`` says otherwise.
        """
        return await self._send(stored.files(fields))

    async def file(self, file_id: str) -> StoredFile:
        """Fetch the metadata of a stored file.

        Args:
            file_id: The ID of the file.

        Returns:
            The file's name, size in bytes and times.

        Raises:
            InvalidRequest: No file has this ID.
        """
        return await self._send(stored.file(file_id))

    async def file_content(self, file_id: str) -> bytes:
        """Download the contents of a stored file.

        Args:
            file_id: The ID of the file.

        Returns:
            The contents.

        Raises:
            InvalidRequest: No file has this ID.
        """
        return await self._send(stored.file_content(file_id))

    async def delete_file(self, file_id: str) -> bool:
        """Delete a stored file.

        Args:
            file_id: The ID of the file.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._send(stored.delete_file(file_id))

    async def begin_batch(
        self, file_id: str, endpoint: str = calls.GENERATIONS, metadata: Mapping[str, str] | None = None
    ) -> StoredBatch:
        """Start a batch: the server runs every request of an uploaded file when it is idle.

        Args:
            file_id: The ID of the input file, see ``upload``.
            endpoint: The path that every line is a request for.
            metadata: Strings to store with the batch.

        Returns:
            The new batch.

        Raises:
            InvalidRequest: The input file is missing or wrong, or too many batches are unfinished.
        """
        return await self._send(stored.begin_batch(file_id, endpoint, metadata or {}))

    async def batch(self, batch_id: str) -> StoredBatch:
        """Fetch the current state of a batch.

        Args:
            batch_id: The ID of the batch.

        Returns:
            The batch with its progress.

        Raises:
            InvalidRequest: No batch has this ID.
        """
        return await self._send(stored.batch(batch_id))

    async def batches(self, **fields: Unpack[PageFields]) -> Listed[StoredBatch]:
        """List one page of the batches.

        Args:
            **fields: Optional request fields, see ``PageFields``.

        Returns:
            The batches, the newest first unless ``order`` says otherwise.
        """
        return await self._send(stored.batches(fields))

    async def cancel_batch(self, batch_id: str) -> StoredBatch:
        """Cancel a batch; lines that are already done stay in its output file.

        Args:
            batch_id: The ID of the batch.

        Returns:
            The batch in its new state.

        Raises:
            InvalidRequest: The batch is already finished.
        """
        return await self._send(stored.cancel_batch(batch_id))

    async def history(self, **fields: Unpack[HistoryFields]) -> Listed[HistoryEntry]:
        """List one page of the images that were generated with this API key.

        Args:
            **fields: Optional request fields, see ``HistoryFields``.

        Returns:
            The entries, the newest first unless ``order`` says otherwise.
        """
        return await self._send(stored.history(fields))

    async def history_entry(self, entry_id: str) -> HistoryEntry:
        """Fetch one history entry.

        Args:
            entry_id: The ID of the entry, as in ``ImageFile.history_id``.

        Returns:
            The entry, with the request that reproduces the image.

        Raises:
            InvalidRequest: No history entry has this ID.
        """
        return await self._send(stored.history_entry(entry_id))

    async def history_picture(self, entry_id: str) -> bytes:
        """Download the image file of a history entry.

        Args:
            entry_id: The ID of the entry.

        Returns:
            The bytes of the file.

        Raises:
            InvalidRequest: No history entry has this ID.
        """
        return await self._send(stored.history_picture(entry_id))

    async def history_thumbnail(self, entry_id: str) -> bytes:
        """Download the thumbnail of a history entry.

        Args:
            entry_id: The ID of the entry.

        Returns:
            The bytes of a WebP file, at most 256 pixels wide and high.

        Raises:
            InvalidRequest: No history entry has this ID.
        """
        return await self._send(stored.history_thumbnail(entry_id))

    async def forget(self, entry_id: str) -> bool:
        """Delete a history entry and its image file.

        Args:
            entry_id: The ID of the entry.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._send(stored.forget(entry_id))

    async def forget_all(self) -> int:
        """Delete the whole history of this API key, with the image files.

        Returns:
            How many entries were deleted.
        """
        return await self._send(stored.forget_all())

    async def usage(self, days: int = 30) -> tuple[UsedDay, ...]:
        """Fetch the daily usage of this API key.

        Args:
            days: How many days to report, including today (UTC).

        Returns:
            One entry per day with any usage, the newest first.

        Raises:
            InvalidRequest: ``days`` is not between 1 and 366.
        """
        return await self._send(stored.usage(days))

    async def usage_by_key(self, days: int = 30) -> tuple[UsedDay, ...]:
        """Fetch the daily usage of all API keys; requires the scope ``admin``.

        Args:
            days: How many days to report, including today (UTC).

        Returns:
            One entry per day and key with any usage, the newest first.

        Raises:
            InvalidRequest: ``days`` is not between 1 and 366.
            DiffserveError: This key does not have the scope.
        """
        return await self._send(stored.usage_by_key(days))

    async def is_ready(self) -> bool:
        """Return whether the server accepts work now; it does not while it loads its models.

        Returns:
            True if it is ready.
        """
        return await self._send(calls.ready())

    async def _send(self, call: Call[AnswerT]) -> AnswerT:
        headers = on_behalf.headers() | (dict(call.headers) if call.body else {})
        try:
            response = await self._http.request(call.method, call.path, content=call.body, headers=headers)
        except httpx.HTTPError as error:
            raise_for_transport(self.url, error)
        return calls.read(call, self.url, response)

    def _open(self, call: StreamCall[EventT]) -> AsyncStream[EventT]:
        timeout = calls.stream_timeout(self._timeout_s)
        headers = on_behalf.headers() | dict(call.headers)
        request = self._http.build_request("POST", call.path, content=call.body, headers=headers, timeout=timeout)
        return AsyncStream(self._http, request, call.reader, self.url)

"""The Responses API and embeddings: types of requests and answers, and the methods of the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, Unpack

import msgspec

from diffserve.client.transport import AsyncStream, HttpClient, TypedReader, resource

RESPONSES: Final = "/v1/responses"
EMBEDDINGS: Final = "/v1/embeddings"


class ResponseFields(TypedDict, total=False):
    """Optional fields of a response; ``[{"type": "image_generation"}]`` as ``tools`` enables images."""

    model: str
    instructions: str
    previous_response_id: str
    max_output_tokens: int
    temperature: float
    top_p: float
    seed: int
    store: bool
    background: bool
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]


class EmbeddingFields(TypedDict, total=False):
    """Optional fields of an embedding request."""

    model: str
    dimensions: int
    priority: Literal["interactive", "batch"]
    deadline_s: float


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """Text part of a message."""

    text: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """Message of the language model; its status is "incomplete" if it was truncated."""

    id: str
    status: str
    content: tuple[TextPart, ...]


class PaintedPicture(msgspec.Struct, frozen=True, kw_only=True, tag="image_generation_call"):
    """Image of a response.

    Attributes:
        id: The ID of the item.
        status: Its status.
        file: The bytes of the file, None if it failed.
        revised_prompt: The prompt that it was generated with.
        action: "generate", or "edit" if it started from another image.
        seed: The seed of its noise.
        variation_seed: The seed of the variation noise.
        size: WIDTHxHEIGHT in pixels.
        output_format: The file format.
    """

    id: str
    status: str
    file: bytes | None = msgspec.field(name="result", default=None)
    revised_prompt: str | None = None
    action: str | None = None
    seed: int | None = None
    variation_seed: int | None = None
    size: str | None = None
    output_format: str | None = None


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of the language model."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Response with its messages and images.

    Attributes:
        id: The ID; pass it as ``previous_response_id`` to continue the conversation.
        created_at: When it was created, in seconds since 1970.
        model: Name of the model.
        status: "completed", "incomplete", "cancelled" or "failed". A background response is "in_progress" until it is
            finished; fetch it again to see its state.
        output: Messages and images in order.
        usage: Token counts.
        previous_response_id: The response that this one continues.
        background: Whether it runs in the background.
        error: Code and message of a failed response.
        warnings: Messages for the user.
    """

    id: str
    created_at: int
    model: str
    status: str
    output: tuple[Message | PaintedPicture, ...]
    usage: ResponseUsage | None = None
    previous_response_id: str | None = None
    background: bool = False
    error: dict[str, str | None] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of all messages."""
        texts = (part.text for item in self.output if isinstance(item, Message) for part in item.content)
        return "".join(texts)

    @property
    def pictures(self) -> list[bytes]:
        """The bytes of all image files."""
        return [item.file for item in self.output if isinstance(item, PaintedPicture) and item.file is not None]


class ResponseDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Event with new text of a message."""

    text: str = msgspec.field(name="delta")


class ResponsePartial(msgspec.Struct, frozen=True, kw_only=True):
    """Event with a preview of an image; ``index`` is the position of its item in the output."""

    index: int = msgspec.field(name="output_index")
    partial_image_index: int
    file: bytes = msgspec.field(name="partial_image_b64")


class ResponseEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Last event of a stream, with the complete response."""

    response: Response


ResponseEvent = ResponseDelta | ResponsePartial | ResponseEnd


def response_reader() -> TypedReader[ResponseEvent]:
    """Return the reader for a streamed response."""
    last = ("response.completed", "response.incomplete")
    types: dict[str, type[ResponseEvent]] = {
        "response.output_text.delta": ResponseDelta,
        "response.image_generation_call.partial_image": ResponsePartial,
        **dict.fromkeys(last, ResponseEnd),
    }
    return TypedReader(types, frozenset(last), 1)


class _Vector(msgspec.Struct, frozen=True, kw_only=True):
    embedding: tuple[float, ...]


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token count of an embedding request."""

    prompt_tokens: int


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings by the text encoder of the image model ``model``: one vector of length 1 per text."""

    model: str
    data: tuple[_Vector, ...]
    usage: EmbeddingUsage

    @property
    def vectors(self) -> tuple[tuple[float, ...], ...]:
        """The vectors in the order of the texts."""
        return tuple(entry.embedding for entry in self.data)


class ResponseMethods(HttpClient):
    """Methods of the client for responses and embeddings."""

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
        return await self._call("POST", RESPONSES, Response, {"input": response_input, **fields})

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
        return self._stream(RESPONSES, {"input": response_input, **fields, "stream": True}, response_reader())

    async def response(self, response_id: str) -> Response:
        """Fetch a stored response.

        Args:
            response_id: The ID of the response.

        Returns:
            The response in its current state.

        Raises:
            InvalidRequest: No stored response has this ID.
        """
        return await self._call("GET", resource(RESPONSES, response_id), Response)

    async def cancel_response(self, response_id: str) -> Response:
        """Cancel a background response.

        Args:
            response_id: The ID of the response.

        Returns:
            The response in its final state.

        Raises:
            InvalidRequest: No stored response has this ID.
        """
        return await self._call("POST", resource(RESPONSES, response_id, "cancel"), Response)

    async def forget_response(self, response_id: str) -> bool:
        """Delete a stored response.

        Args:
            response_id: The ID of the response.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._succeeds("DELETE", resource(RESPONSES, response_id), "response_not_found")

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
        return await self._call("POST", EMBEDDINGS, Embeddings, {"input": texts, **fields})

"""Responses, typed: what was said or painted, as a whole and piece by piece; and texts as vectors."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import msgspec

from diffserve.client.events import TypedReader


class ResponseFields(TypedDict, total=False):
    """What a response may be asked with beside its input; ``tools``: ``[{"type": "image_generation", ...}]`` paints."""

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
    """What texts may be embedded with."""

    model: str
    dimensions: int
    priority: Literal["interactive", "batch"]
    deadline_s: float


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message."""

    text: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """What the language model said; its status is "incomplete" where it was cut off."""

    id: str
    status: str
    content: tuple[TextPart, ...]


class PaintedPicture(msgspec.Struct, frozen=True, kw_only=True, tag="image_generation_call"):
    """A picture; ``file`` is ``None`` where it failed.

    revised_prompt  what it was painted by
    action          "generate", or "edit" where it began from another picture
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
    """Tokens of the language model."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What was said and painted; ``id`` is what another response goes on from. One in the ``background`` is
    "in_progress" until it is asked for again and is "completed", "incomplete", "cancelled" or, with an ``error``,
    "failed"."""

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
        """All that was said."""
        said = (part.text for item in self.output if isinstance(item, Message) for part in item.content)
        return "".join(said)

    @property
    def pictures(self) -> list[bytes]:
        """The files that were painted."""
        return [item.file for item in self.output if isinstance(item, PaintedPicture) and item.file is not None]


class ResponseDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of what is said."""

    text: str = msgspec.field(name="delta")


class ResponsePartial(msgspec.Struct, frozen=True, kw_only=True):
    """A picture on its way; ``index``: of its item."""

    index: int = msgspec.field(name="output_index")
    partial_image_index: int
    file: bytes = msgspec.field(name="partial_image_b64")


class ResponseEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last event: the whole of it."""

    response: Response


ResponseEvent = ResponseDelta | ResponsePartial | ResponseEnd


def response_reader() -> TypedReader[ResponseEvent]:
    """Of a response that is streamed."""
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
    """Tokens of the texts."""

    prompt_tokens: int


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """A vector of length 1 for each text, by the text encoder of the image model ``model``."""

    model: str
    data: tuple[_Vector, ...]
    usage: EmbeddingUsage

    @property
    def vectors(self) -> tuple[tuple[float, ...], ...]:
        """In the order of the texts."""
        return tuple(one.embedding for one in self.data)

"""Body of ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from diffserve.api.fields import MAX_SEED
from diffserve.api.sampling_params import MAX_LOGPROBS, MAX_TEMPERATURE
from diffserve.api.text_types import MAX_MESSAGES, MAX_TEXT_CHARS
from diffserve.service.http.bodies import CHANGES_NOTHING, Ignored, IgnoredObject, WorkBody
from diffserve.service.texts.schemas import ChatTokens, Seed, Strict

PAINTS: Final = "image_generation"
MAX_TOOLS: Final = 128
MAX_METADATA: Final = 16

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Id = Annotated[str, Field(min_length=1, max_length=128)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)
]
FileId = Annotated[str, Field(max_length=256, description="ID of a file that you uploaded to /v1/files.")]
MODEL_HELP: Final = "The language model, or an image model; any name if a tool generates images."
ResponseModel = Annotated[str, Field(max_length=256, description=MODEL_HELP)]
TEMPERATURE_HELP: Final = "0: always the most likely token; default: 1."
Temperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE, description=TEMPERATURE_HELP)]
IGNORED: Final = frozenset({"moderation", "context_management"})
REFUSED: Final[dict[str, str]] = {
    "prompt": "this server stores no prompt templates; put the text into input.",
    "response_format": "use text.format.",
    "messages": "use input.",
}


class InputPart(Strict):
    """Part of a message. An image is a data URL or an uploaded file, and the start image of image_generation."""

    type: Literal["input_text", "output_text", "input_image", "refusal"]
    text: Text | None = None
    refusal: Text | None = None
    image_url: str | None = None
    file_id: FileId | None = None


class Item(Strict):
    """Message of the conversation, or an output item of an earlier response, complete or by its id."""

    type: Literal["message", "image_generation_call", "item_reference", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | Annotated[list[InputPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    id: Id | None = None
    result: Annotated[str, Field(description="An image in base64.")] | None = None
    revised_prompt: Text | None = None


class Mask(Strict):
    """Mask of the area to generate again: transparent or white pixels."""

    image_url: Annotated[str, Field(description="A data URL.")] | None = None
    file_id: FileId | None = None


class Tool(BaseModel):
    """The tool ``image_generation``, with the image parameters of ``POST /v1/images/generations``."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, title="ImageGenerationTool")

    type: Annotated[str, Field(max_length=64, description=f"{PAINTS}; there is no other tool.")]
    action: Annotated[
        Literal["generate", "edit", "auto"], Field(description="auto: edit if the conversation has an image.")
    ] = "auto"
    input_image_mask: Mask | None = None
    model: Annotated[str, Field(max_length=256, description="An image model; omitted: the first.")] | None = None
    size: str | None = None
    quality: str | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    input_fidelity: Literal["high", "low"] | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None


class ToolChoice(BaseModel):
    """A tool by its type, or the list of allowed tools."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Annotated[str, Field(max_length=64)]
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class ConversationId(Strict):
    """Reference to a conversation from ``POST /v1/conversations``."""

    id: Id


class TextFormat(Strict):
    """Format of a text; a schema is always enforced token by token, whether ``strict`` is set or not."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema", description="Omitted: any object.")] = None
    strict: bool | None = None


class TextShape(Strict):
    """Format and verbosity of the output text."""

    format: TextFormat | None = None
    verbosity: Annotated[str, Field(max_length=16, description="No effect.")] | None = None


class ResponseBody(WorkBody):
    """Body of a response: OpenAI's fields, and ``seed``."""

    model_config = ConfigDict(title="CreateResponseRequest")
    hints: ClassVar[Mapping[str, str]] = {"input": "give a text or messages"}
    refused: ClassVar[Mapping[str, str]] = REFUSED
    ignored: ClassVar[frozenset[str]] = IGNORED

    input: (
        Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
        | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    )
    model: ResponseModel | None = None
    instructions: Text | None = None
    max_output_tokens: ChatTokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Seed | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=32)] | None = None
    text: TextShape | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[str, Field(max_length=64)] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    background: Annotated[bool, Field(description="Return at once; the result is retrieved by its id.")] | None = None
    store: Annotated[bool, Field(description="Whether to store the response; default: true.")] | None = None
    previous_response_id: Id | None = None
    conversation: Id | ConversationId | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Ignored | None = None
    prompt_cache_options: IgnoredObject | None = None
    reasoning: IgnoredObject | None = None
    stream_options: IgnoredObject | None = None
    max_tool_calls: Annotated[int, Field(ge=0, description=CHANGES_NOTHING)] | None = None

"""Bodies of ``POST /v1/chat/completions``, ``/v1/completions`` and ``/v1/prompts/rewrite``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from diffserve.api.fields import MAX_SEED
from diffserve.api.sampling_params import MAX_BIAS, MAX_BIASES, MAX_LOGPROBS, MAX_STOPS, MAX_TOKENS
from diffserve.api.text_types import MAX_MESSAGES, MAX_PROMPT_TOKENS, MAX_TEXT_CHARS, MAX_TEXTS, MAX_TOKEN_ID
from diffserve.api.types import MAX_PROMPT_CHARS
from diffserve.service.http.bodies import Ignored, IgnoredFlag, IgnoredObject, WorkBody
from diffserve.settings.layers import configs_dir

MAX_CACHE_SALT_CHARS = 256
DEFAULT_CHAT_TOKENS = 1024
DEFAULT_COMPLETION_TOKENS = 16

REFUSED: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("chat_template", "chat_template_kwargs", "tokenizer"),
        "only the model's own chat template is used; format the text yourself and send it to /v1/completions.",
    ),
    **dict.fromkeys(("tools", "functions"), "this server does not call tools."),
    **dict.fromkeys(
        (
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar"),
            *("json_schema", "bad_words", "logits_processors"),
        ),
        'only JSON Schema is supported; use response_format {"type": "json_schema", ...}.',
    ),
    **dict.fromkeys(("prompt_logprobs", "echo"), "the prompt is not returned or scored."),
    **dict.fromkeys(("audio", "web_search_options"), "this server only generates text and does not search the web."),
    "moderation": "this server has no moderation.",
    "suffix": "the model continues a text; it cannot fill gaps.",
}

RewriterMode = Literal["off", "auto", "force"]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
ChatTokens = Annotated[Tokens, Field(description=f"Default: {DEFAULT_CHAT_TOKENS}, or the room left in the context.")]
SAME_SALT: Final = "Requests share cached prefixes only if their salts are equal."
Salt = Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS, description=SAME_SALT)]
Seed = Annotated[int, Field(ge=-1, le=MAX_SEED, description="-1 or null: random.")]
ModelName = Annotated[str, Field(description="A name from /v1/models; omitted: the loaded language model.")]
Prompt = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
ToolChoice = Annotated[str | dict[str, Any], Field(description="none or auto; no effect.")]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,19}$")], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(max_length=MAX_BIASES, description="Values added to the logits of tokens, by token id."),
]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


class Strict(BaseModel):
    """Part of a body with strict types."""

    model_config = ConfigDict(strict=True)


class Part(Strict):
    """Text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class StreamOptions(Strict):
    """``include_usage``: a last chunk with the counts of tokens."""

    include_usage: bool | None = None


class NamedSchema(Strict):
    """JSON Schema for the output; sampling always follows it, whether ``strict`` is set or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema", description="Omitted: any object.")] = None
    strict: bool | None = None


class Format(Strict):
    """Plain text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    object_schema: Annotated[
        dict[str, Any] | None, Field(alias="schema", description="Schema for json_object, as in llama.cpp's server.")
    ] = None


class SamplingBody(WorkBody):
    """Sampling fields: OpenAI's and those that self-hosted servers have in common."""

    refused: ClassVar[Mapping[str, str]] = REFUSED

    model: ModelName | None = None
    n: Annotated[int, Field(ge=1, le=MAX_TEXTS, description="Number of texts; text i uses seed + i.")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(description="0: always the most likely token; default: 1.")] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, description="-1 and 0: every token.")] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    seed: Seed | None = None
    num_beams: Annotated[int, Field(description="Beam search; needs temperature 0.")] | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    best_of: int | None = None
    response_format: Format | None = None
    cache_salt: Salt | None = None

    tool_choice: ToolChoice | None = None
    function_call: ToolChoice | None = None
    user: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Ignored | None = None
    reasoning_effort: Ignored | None = None
    verbosity: Ignored | None = None
    store: IgnoredFlag | None = None
    parallel_tool_calls: IgnoredFlag | None = None
    metadata: IgnoredObject | None = None
    prediction: IgnoredObject | None = None
    prompt_cache_options: IgnoredObject | None = None


PAINTED: Final = (
    'With "image", or a model name that ends in ":image", an image is generated and returned in message.images.'
)


class ChatBody(SamplingBody):
    """A conversation to be answered."""

    model_config = ConfigDict(title="CreateChatCompletionRequest")
    hints: ClassVar[Mapping[str, str]] = {"messages": "give at least one message with role and content"}

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: ChatTokens | None = None
    max_tokens: Annotated[Tokens, Field(description="An older name for max_completion_tokens.")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True, description=PAINTED)] | None = None


class CompletionBody(SamplingBody):
    """Texts to be continued."""

    model_config = ConfigDict(title="CreateCompletionRequest")
    hints: ClassVar[Mapping[str, str]] = {"prompt": "give the text to continue"}

    prompt: (
        Prompt
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    )
    max_tokens: Annotated[Tokens, Field(description=f"Default: {DEFAULT_COMPLETION_TOKENS}.")] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: (
        Annotated[bool, Field(description="Whether to add the tokenizer's special tokens to a prompt.")] | None
    ) = None


class RewriteBody(WorkBody):
    """Prompt to be rewritten for the image model."""

    model_config = ConfigDict(title="RewritePromptRequest")
    hints: ClassVar[Mapping[str, str]] = {"prompt": "give a prompt to rewrite"}

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
    model: ModelName | None = None
    n: (
        Annotated[int, Field(ge=1, le=MAX_TEXTS, description="Number of prompts; the first is the most likely one.")]
        | None
    ) = None
    style: Annotated[str, Field(description="Prompt style; default: that of the image model.")] | None = None
    seed: Seed | None = None
    system: (
        Annotated[str, Field(max_length=MAX_PROMPT_CHARS, description="System prompt, in place of that of the style.")]
        | None
    ) = None
    force: Annotated[bool, Field(description="Use the result even if the model was unsure about it.")] | None = None
    stream: bool | None = None
    user: Ignored | None = None
    safety_identifier: Ignored | None = None


class RewriterChoice(BaseModel):
    """Detailed form of ``prompt_rewriter`` in an image request."""

    model_config = ConfigDict(strict=True, extra="forbid")

    style: str | None = None
    seed: Seed | None = None
    system: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    force: bool | None = None


@cache
def styles() -> tuple[str, ...]:
    """Return the names of the files in ``configs/rewriter``."""
    return tuple(sorted(path.stem for path in (configs_dir() / "rewriter").glob("*.toml")))

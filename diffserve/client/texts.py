"""Rewritten prompts and chat: types of requests and answers, and the methods of the client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypedDict, Unpack

import msgspec

from diffserve.client.errors import ErrorObject, error_of
from diffserve.client.recipe import Cost, RewriterFields
from diffserve.client.transport import DONE, AsyncStream, HttpClient, TypedReader

REWRITE: Final = "/v1/prompts/rewrite"
CHAT: Final = "/v1/chat/completions"


class RewriteFields(RewriterFields, total=False):
    """Optional fields of a prompt rewrite."""

    model: str
    n: int
    priority: Literal["interactive", "batch"]
    deadline_s: float


class ChatFields(TypedDict, total=False):
    """Optional fields of a chat completion."""

    model: str
    n: int
    max_completion_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[str, float]
    repetition_penalty: float
    stop: str | list[str]
    seed: int
    response_format: dict[str, Any]
    priority: Literal["interactive", "batch"]
    deadline_s: float


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by origin; ``cached_tokens`` came from the prefix cache."""

    cached_tokens: int = 0


class TextUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request, and its share of the device time in seconds."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens = PromptTokens()
    device_s: float = 0.0
    cost: Cost | None = None


class TextTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds: in the queue, to the first token, per output token, and in total."""

    queue_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


class RewrittenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a prompt rewrite.

    Attributes:
        prompt: The original prompt.
        revised_prompt: The new prompt, None if the original should be used; ``fallback`` and ``warning`` say why.
        warning: A message for the user.
        fallback: A code for the reason, such as "unsure".
        mean_entropy: Uncertainty of the model in nats per token.
    """

    prompt: str
    revised_prompt: str | None
    warning: str | None = None
    fallback: str | None = None
    mean_entropy: float | None = None


class Rewrites(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a prompt rewrite, the most likely first."""

    id: str
    created: int
    model: str
    style: str
    prompts: tuple[RewrittenPrompt, ...] = msgspec.field(name="data")
    usage: TextUsage
    timings: TextTimings
    warnings: tuple[str, ...] = ()


class RewriteDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of the rewritten prompt ``index``; provisional until the last event, ``Rewrites``."""

    id: str
    index: int
    text: str = msgspec.field(name="delta")


RewriteEvent = RewriteDelta | Rewrites


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the answers to a conversation."""

    index: int
    message: ChatMessage
    finish_reason: str


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """All answers to a conversation."""

    id: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: TextUsage
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].message.content


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of the answer ``index``; the last one has a ``finish_reason``."""

    index: int
    text: str
    finish_reason: str | None = None


def rewrite_reader() -> TypedReader[RewriteEvent]:
    """Return the reader for a prompt rewrite."""
    completed = "prompt_rewrite.completed"
    types: dict[str, type[RewriteEvent]] = {"prompt_rewrite.delta": RewriteDelta, completed: Rewrites}
    return TypedReader(types, frozenset({completed}), 1)


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    error: ErrorObject | None = None


class ChatReader:
    """Decoder of chat completion chunks; ``[DONE]`` completes the stream."""

    def __init__(self) -> None:
        self.is_complete = False

    def read(self, data: bytes) -> Iterator[ChatDelta]:
        """Yield the new text of each choice in the chunk ``data``.

        Raises:
            DiffserveError: The chunk reports an error.
        """
        if data == DONE:
            self.is_complete = True
            return
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            raise error_of(chunk.error)
        for choice in chunk.choices:
            text = choice.delta.content or ""
            if text or choice.finish_reason:
                yield ChatDelta(index=choice.index, text=text, finish_reason=choice.finish_reason)


class TextMethods(HttpClient):
    """Methods of the client for rewritten prompts and chat."""

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
        return await self._call("POST", REWRITE, Rewrites, {"prompt": prompt, **fields})

    def rewrite_stream(self, prompt: str, **fields: Unpack[RewriteFields]) -> AsyncStream[RewriteEvent]:
        """Rewrite a short description into prompts and stream the text during generation.

        Args:
            prompt: The description.
            **fields: Optional request fields, see ``RewriteFields``.

        Returns:
            A stream of ``RewriteDelta`` events. The last event is the complete ``Rewrites``.
        """
        return self._stream(REWRITE, {"prompt": prompt, **fields, "stream": True}, rewrite_reader())

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
        return await self._call("POST", CHAT, Chat, {"messages": _turns(messages), **fields})

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
        body = {"messages": _turns(messages), **fields, "stream": True}
        return self._stream(CHAT, body, ChatReader())


def _turns(messages: str | Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    return (ChatMessage(role="user", content=messages),) if isinstance(messages, str) else messages

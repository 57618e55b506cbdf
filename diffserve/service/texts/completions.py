"""``POST /v1/chat/completions`` and ``POST /v1/completions``: endpoints, and OpenAI's answers and stream chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.text_types import (
    FinishReason,
    LanguageModelInfo,
    TextAccepted,
    TextDelta,
    TextEvent,
    TextFinished,
    TextRequest,
    TextResult,
    TextUsage,
    TokenInfo,
)
from diffserve.service.admission import Ticket
from diffserve.service.endpoint import Endpoint, RequestPlan, ServiceContext
from diffserve.service.http.addresses import share_of
from diffserve.service.http.middleware import TEXT_BODY_BYTES, too_long
from diffserve.service.http.streams import Events, event
from diffserve.service.lifecycle import json_response, read_json
from diffserve.service.models import check_language_model
from diffserve.service.texts.completion_plan import CompletionPlan, plan_chat, plan_completion
from diffserve.service.texts.schemas import ChatBody, CompletionBody, SamplingBody
from diffserve.service.threads import ANSWERS
from diffserve.settings.config import ServeConfig

Json = dict[str, Any]
IMPOSSIBLE = -9999.0


class ChatAnswers:
    """Format of ``/v1/chat/completions``; ``first_index`` is the choice of text 0 of a prompt."""

    chunk_kind = "chat.completion.chunk"

    def answer(self, plan: CompletionPlan, finished: Sequence[TextFinished]) -> Json:
        """Return a "chat.completion" object."""
        choices: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": result.text, "refusal": None, "annotations": []},
                "logprobs": self._logprobs(plan, result.tokens, result.finish_reason),
                "finish_reason": result.finish_reason,
            }
            for index, result in _numbered_results(finished)
        ]
        return _answer(plan, "chat.completion", choices, finished)

    def opening(self, plan: CompletionPlan, first_index: int, num_texts: int) -> Iterator[Json]:
        """Yield a chunk with the role for each text."""
        for index in range(first_index, first_index + num_texts):
            yield self._chunk(plan, index, {"role": "assistant", "content": "", "refusal": None}, None, None)

    def delta(self, plan: CompletionPlan, first_index: int, delta: TextDelta) -> Iterator[Json]:
        """Yield new text, if any; the end of a text is a separate chunk."""
        index = first_index + delta.text_index
        logprobs = self._logprobs(plan, delta.tokens, delta.finish_reason)
        if delta.text or (logprobs and logprobs["content"]):
            yield self._chunk(plan, index, {"content": delta.text}, logprobs, None)
        if delta.finish_reason is not None:
            yield self._chunk(plan, index, {}, None, delta.finish_reason)

    @staticmethod
    def _chunk(
        plan: CompletionPlan, index: int, delta: Json, logprobs: Json | None, reason: FinishReason | None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return chunk(plan, ChatAnswers.chunk_kind, [choice])

    @staticmethod
    def _logprobs(plan: CompletionPlan, tokens: Sequence[TokenInfo], reason: FinishReason | None) -> Json | None:
        if plan.requests[0].params.logprobs is None:
            return None
        content = [
            {
                **token_fields(token.text, token.logprob),
                "top_logprobs": [token_fields(text, logprob) for text, _, logprob in token.top],
            }
            for token in spoken(plan, tokens, reason)
        ]
        return {"content": content, "refusal": None}


class CompletionAnswers:
    """Format of ``/v1/completions``; offsets continue where the last chunk ended."""

    chunk_kind = "text_completion"

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def answer(self, plan: CompletionPlan, finished: Sequence[TextFinished]) -> Json:
        """Return a "text_completion" object."""
        choices = [
            self._choice(plan, index, result.text, result.tokens, result.finish_reason)
            for index, result in _numbered_results(finished)
        ]
        return _answer(plan, "text_completion", choices, finished)

    def opening(self, plan: CompletionPlan, first_index: int, num_texts: int) -> Iterator[Json]:
        """Yield nothing; completions have no opening chunk."""
        return iter(())

    def delta(self, plan: CompletionPlan, first_index: int, delta: TextDelta) -> Iterator[Json]:
        """Yield new text, with the finish reason in the last chunk."""
        choice = self._choice(plan, first_index + delta.text_index, delta.text, delta.tokens, delta.finish_reason)
        if delta.text or delta.finish_reason is not None or (choice["logprobs"] and choice["logprobs"]["tokens"]):
            yield chunk(plan, self.chunk_kind, [choice])

    def _choice(
        self, plan: CompletionPlan, index: int, text: str, tokens: Sequence[TokenInfo], reason: FinishReason | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(plan, index, tokens, reason),
            "finish_reason": reason,
        }

    def _logprobs(
        self, plan: CompletionPlan, index: int, tokens: Sequence[TokenInfo], reason: FinishReason | None
    ) -> Json | None:
        if plan.requests[0].params.logprobs is None:
            return None
        shown = spoken(plan, tokens, reason)
        offsets, offset = [], self._offsets.get(index, 0)
        for token in shown:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[index] = offset
        return {
            "tokens": [token.text for token in shown],
            "token_logprobs": [bounded(token.logprob) for token in shown],
            "top_logprobs": [{text: bounded(logprob) for text, _, logprob in token.top} for token in shown],
            "text_offset": offsets,
        }


Dialect = ChatAnswers | CompletionAnswers
"""Format of the answers of a text endpoint."""


def chunk(plan: CompletionPlan, kind: str, choices: list[Json], usage: Json | None = None) -> Json:
    """Return one chunk of a stream; ``usage`` is null before the last chunk if it was requested, else left out."""
    fields = {"usage": usage} if plan.has_usage_chunk else {}
    return {**_head(plan, kind), "choices": choices, **fields}


def usage(plan: RequestPlan, used: Sequence[TextUsage]) -> Json:
    """Return token counts in OpenAI's format and device seconds, summed over the prompts of a request."""
    prompt_tokens = sum(item.prompt_tokens for item in used)
    output_tokens = sum(item.output_tokens for item in used)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(item.cached_tokens for item in used)},
        **plan.spent(sum(item.device_s for item in used)),
    }


def spoken(plan: CompletionPlan, tokens: Sequence[TokenInfo], reason: FinishReason | None) -> Sequence[TokenInfo]:
    """Return ``tokens`` without the token that only ended the text."""
    ends = reason == "stop" and bool(tokens) and tokens[-1].token_id in plan.end_ids
    return tokens[:-1] if ends else tokens


def _answer(plan: CompletionPlan, kind: str, choices: list[Json], finished: Sequence[TextFinished]) -> Json:
    return {
        **_head(plan, kind),
        "choices": choices,
        "usage": usage(plan, [item.usage for item in finished]),
        "timings": timings_of(finished),
        "warnings": list(plan.warnings),
    }


def _head(plan: CompletionPlan, kind: str) -> Json:
    fields = {"id": plan.answer_id, "object": kind, "created": plan.created, "model": plan.model}
    return fields | {"system_fingerprint": plan.fingerprint}


def timings_of(finished: Sequence[TextFinished]) -> Json:
    """Return the timings of the slowest prompt in seconds."""
    slowest = max((item.timings for item in finished), key=lambda timings: timings.total_s)
    return {name: round(getattr(slowest, name), 6) for name in slowest.__struct_fields__}


def _numbered_results(finished: Sequence[TextFinished]) -> Iterator[tuple[int, TextResult]]:
    yield from enumerate(result for item in finished for result in item.results)


def bounded(logprob: float) -> float:
    """Return a log-probability with minus infinity replaced by -9999, as in OpenAI's API."""
    return max(logprob, IMPOSSIBLE)


def token_fields(text: str, logprob: float, part_bytes: list[int] | None = None) -> Json:
    """Describe a token; ``part_bytes`` are the ``bytes`` of one that is part of a character."""
    is_complete = "\N{REPLACEMENT CHARACTER}" not in text
    return {"token": text, "logprob": bounded(logprob), "bytes": list(text.encode()) if is_complete else part_bytes}


SamplingT = TypeVar("SamplingT", bound=SamplingBody)
EventQueue = asyncio.Queue[tuple[int, TextEvent | Exception]]
Plan = Callable[[SamplingT, LanguageModelInfo, ServeConfig, str], CompletionPlan]


class Completions(Endpoint[SamplingT, CompletionPlan]):
    """Base class of text endpoints: how the body is planned and how results are formatted."""

    plan: Plan[SamplingT]
    dialect: type[Dialect]

    async def _plan(self, body: SamplingT, request: Request, client: str) -> CompletionPlan:
        info = check_language_model(body.model, self._engine.text_info, self._engine.models)
        plan = await ANSWERS.run(self.plan, body, info, self._config, request.state.request_id)
        share = share_of(request)
        requests = tuple(msgspec.structs.replace(item, client=client, share=share) for item in plan.requests)
        return msgspec.structs.replace(plan, requests=requests)

    def _admit(self, plan: CompletionPlan, client: str) -> AbstractContextManager[Ticket]:
        work, num = sum(item.num_texts for item in plan.requests), len(plan.requests)
        return self._backlog.entered(client, work, num, num, priority=plan.requests[0].priority)

    async def _answer(self, plan: CompletionPlan, ticket: Ticket) -> Response:
        finished: dict[int, TextFinished] = {}
        async for index, event_of_prompt in self._collect_events(plan, ticket):
            if isinstance(event_of_prompt, TextFinished):
                finished[index] = event_of_prompt
        in_order = [finished[index] for index in range(len(plan.requests))]
        return json_response(msgspec.json.encode(self.dialect().answer(plan, in_order)), plan.warnings)

    async def _events(self, plan: CompletionPlan, ticket: Ticket) -> Events:
        dialect, used = self.dialect(), list[TextUsage]()
        async for index, event_of_prompt in self._collect_events(plan, ticket):
            first_index = index * plan.requests[0].num_texts
            match event_of_prompt:
                case TextAccepted():
                    for item in dialect.opening(plan, first_index, event_of_prompt.num_texts):
                        yield event(item)
                case TextDelta():
                    for item in dialect.delta(plan, first_index, event_of_prompt):
                        yield event(item)
                case TextFinished():
                    used.append(event_of_prompt.usage)
        if plan.has_usage_chunk:
            yield event(chunk(plan, dialect.chunk_kind, [], usage(plan, used)))

    async def _collect_events(
        self, plan: CompletionPlan, ticket: Ticket
    ) -> AsyncGenerator[tuple[int, TextEvent], None]:
        """Yield the events of all prompts with the prompt's index; raises if one fails."""
        queue: EventQueue = asyncio.Queue()

        async def listen(index: int, request: TextRequest) -> None:
            try:
                watch, is_whole = partial(ticket.watch_texts, index), not plan.is_stream
                async with self._engine.submit(request, watch, is_whole=is_whole) as job:
                    async for event_of_prompt in job:
                        queue.put_nowait((index, event_of_prompt))
            except Exception as error:
                queue.put_nowait((index, error))

        listening = [asyncio.create_task(listen(index, request)) for index, request in enumerate(plan.requests)]
        try:
            num_left = len(listening)
            while num_left:
                index, event_of_prompt = await queue.get()
                if isinstance(event_of_prompt, Exception):
                    raise event_of_prompt
                yield index, event_of_prompt
                num_left -= isinstance(event_of_prompt, TextFinished)
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)


class ChatCompletions(Completions[ChatBody]):
    """Chat endpoint; ``painter`` answers bodies for which ``wants_picture`` is true."""

    asks = "chat"
    body, plan, dialect = ChatBody, staticmethod(plan_chat), ChatAnswers

    def __init__(
        self,
        context: ServiceContext,
        *,
        painter: Callable[[Request], Awaitable[Response]],
        wants_picture: Callable[[bytes], bool],
    ) -> None:
        super().__init__(context)
        self._painter = painter
        self._wants_picture = wants_picture

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        if self._wants_picture(await read_json(request)):
            return await self._painter(request)
        return await super().__call__(request)

    async def _read(self, request: Request) -> ChatBody:
        if (
            len(await request.body()) > TEXT_BODY_BYTES
        ):  # the outer limit is higher, because image bodies have the same path
            raise too_long(TEXT_BODY_BYTES)
        return await super()._read(request)


class TextCompletions(Completions[CompletionBody]):
    """Endpoint of text completions."""

    asks = "text"
    body, plan, dialect = CompletionBody, staticmethod(plan_completion), CompletionAnswers

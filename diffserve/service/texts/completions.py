"""``POST /v1/chat/completions`` and ``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.text_types import (
    LanguageModelInfo,
    TextAccepted,
    TextDelta,
    TextEvent,
    TextFinished,
    TextRequest,
    TextUsage,
)
from diffserve.service.admission import Ticket, share_of
from diffserve.service.endpoint import Endpoint, ServiceContext
from diffserve.service.http.middleware import TEXT_BODY_BYTES, too_long
from diffserve.service.http.streams import Events, event
from diffserve.service.lifecycle import json_response, read_json
from diffserve.service.models import check_language_model
from diffserve.service.texts.answers import ChatAnswers, CompletionAnswers, Dialect, chunk, usage
from diffserve.service.texts.schemas import ChatBody, CompletionBody, SamplingBody
from diffserve.service.texts.texts import CheckedTexts, plan_chat, plan_completion
from diffserve.service.threads import ANSWERS
from diffserve.settings.config import ServeConfig

SamplingT = TypeVar("SamplingT", bound=SamplingBody)
EventQueue = asyncio.Queue[tuple[int, TextEvent | Exception]]
Plan = Callable[[SamplingT, LanguageModelInfo, ServeConfig, str], CheckedTexts]


class Completions(Endpoint[SamplingT, CheckedTexts]):
    """Base class of text endpoints: how the body is planned and how results are formatted."""

    plan: Plan[SamplingT]
    dialect: type[Dialect]

    async def _plan(self, body: SamplingT, request: Request, client: str) -> CheckedTexts:
        info = check_language_model(body.model, self._engine.text_info, self._engine.models)
        plan = await ANSWERS.run(self.plan, body, info, self._config, request.state.request_id)
        share = share_of(request)
        requests = tuple(msgspec.structs.replace(item, client=client, share=share) for item in plan.requests)
        return msgspec.structs.replace(plan, requests=requests)

    def _admit(self, plan: CheckedTexts, client: str) -> AbstractContextManager[Ticket]:
        work, num = sum(item.num_texts for item in plan.requests), len(plan.requests)
        return self._backlog.entered(client, work, num, num, priority=plan.requests[0].priority)

    async def _answer(self, plan: CheckedTexts, ticket: Ticket) -> Response:
        finished: dict[int, TextFinished] = {}
        async for index, event_of_prompt in self._collect_events(plan, ticket):
            if isinstance(event_of_prompt, TextFinished):
                finished[index] = event_of_prompt
        in_order = [finished[index] for index in range(len(plan.requests))]
        return json_response(msgspec.json.encode(self.dialect().answer(plan, in_order)), plan.warnings)

    async def _events(self, plan: CheckedTexts, ticket: Ticket) -> Events:
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

    async def _collect_events(self, plan: CheckedTexts, ticket: Ticket) -> AsyncGenerator[tuple[int, TextEvent], None]:
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

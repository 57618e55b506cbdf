"""``POST /v1/chat/completions`` and ``POST /v1/completions``: read, check, ask the language model, deliver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from functools import partial
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.config import ServeConfig
from diffserve.errors import EngineUnavailable
from diffserve.service.admission import Admission, Ticket
from diffserve.service.drain import Gate
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.errors import error_of
from diffserve.service.http.streams import DONE, Events, EventStreamResponse, event
from diffserve.service.lifecycle import PATIENCE_S, interruption, read_body, warning_headers, work_until
from diffserve.service.models import check_language_model
from diffserve.service.texts.answers import ChatAnswers, CompletionAnswers, Dialect, chunk, usage
from diffserve.service.texts.schemas import ChatBody, CompletionBody, SamplingBody
from diffserve.service.texts.texts import CheckedTexts, plan_chat, plan_completion
from diffserve.text_types import LanguageModelInfo, TextAccepted, TextDelta, TextFinished, TextRequest, TextUsage
from diffserve.types import Cancelled, Failed

SamplingT = TypeVar("SamplingT", bound=SamplingBody)
Told = TextAccepted | TextDelta | TextFinished
Said = asyncio.Queue[tuple[int, Told | Exception]]
Plan = Callable[[SamplingT, LanguageModelInfo, ServeConfig, str], CheckedTexts]


class Completions(Generic[SamplingT]):
    """An endpoint of texts: the body it takes, how that is understood, and the dialect it answers in."""

    def __init__(
        self,
        engine: EngineClient,
        config: ServeConfig,
        gate: Gate,
        admission: Admission,
        *,
        kind: type[SamplingT],
        plan: Plan[SamplingT],
        dialect: Callable[[], Dialect],
    ) -> None:
        self.kind = kind
        self._engine = engine
        self._config = config
        self._gate = gate
        self._admission = admission
        self._plan = plan
        self._dialect = dialect

    async def __call__(self, request: Request) -> Response:
        """Answer one request; every error is a DiffserveError."""
        with ExitStack() as stack:
            stack.enter_context(self._gate.inside())
            client = stack.enter_context(self._admission.clients.known(request))
            self._admission.texts.check(client)
            body = await read_body(request, self.kind)
            info = check_language_model(body.model, self._engine.text_info, self._engine.info)
            plan = await asyncio.to_thread(self._plan, body, info, self._config, request.state.request_id)
            num_texts = sum(one.num_texts for one in plan.requests)
            num = len(plan.requests)
            ticket = stack.enter_context(self._admission.texts.entered(client, num_texts, num, num))
            interrupted = stack.enter_context(interruption(request))
            limit_s = self._config.request_timeout_s + PATIENCE_S
            headers = warning_headers(list(plan.warnings))
            if plan.is_stream:
                events = self._events(plan, self._dialect(), ticket)
                return await EventStreamResponse(
                    events, interrupted, stack.pop_all(), limit_s=limit_s, ending=DONE, headers=headers
                ).opened()
            answer = await work_until(interrupted, self._answer(plan, self._dialect(), ticket), limit_s=limit_s)
            return Response(answer, headers=headers, media_type="application/json")

    async def _answer(self, plan: CheckedTexts, dialect: Dialect, ticket: Ticket) -> bytes:
        finished: dict[int, TextFinished] = {}
        async for index, told in self._told(plan, ticket):
            if isinstance(told, TextFinished):
                finished[index] = told
        in_order = [finished[index] for index in range(len(plan.requests))]
        return msgspec.json.encode(dialect.answer(plan, in_order))

    async def _events(self, plan: CheckedTexts, dialect: Dialect, ticket: Ticket) -> Events:
        used: list[TextUsage] = []
        async for index, told in self._told(plan, ticket):
            first_index = index * plan.requests[0].num_texts
            match told:
                case TextAccepted():
                    for one in dialect.opening(plan, first_index, told.num_texts):
                        yield event(one)
                case TextDelta():
                    for one in dialect.delta(plan, first_index, told):
                        yield event(one)
                case TextFinished():
                    used.append(told.usage)
        if plan.has_usage_chunk:
            yield event(chunk(plan, dialect.chunk_kind, [], usage(used)))

    async def _told(self, plan: CheckedTexts, ticket: Ticket) -> AsyncGenerator[tuple[int, Told], None]:
        """What is said to every prompt, as it comes, each with the prompt's number; raises where one fails."""
        said: Said = asyncio.Queue()
        listening = [
            asyncio.create_task(self._listen(index, request, said, partial(ticket.watch_texts, index)))
            for index, request in enumerate(plan.requests)
        ]
        try:
            num_left = len(listening)
            while num_left:
                index, told = await said.get()
                if isinstance(told, Exception):
                    raise told
                yield index, told
                num_left -= isinstance(told, TextFinished)
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    async def _listen(
        self,
        index: int,
        request: TextRequest,
        said: asyncio.Queue[tuple[int, Told | Exception]],
        watch: Callable[[object], None],
    ) -> None:
        try:
            async with self._engine.submit(request).watched(watch) as job:
                async for told in job:
                    match told:
                        case Failed():
                            raise error_of(told)
                        case Cancelled():
                            raise EngineUnavailable("the request was cancelled by the server.")
                        case _:
                            said.put_nowait((index, told))
        except Exception as error:
            said.put_nowait((index, error))


def chat_completions(
    engine: EngineClient, config: ServeConfig, gate: Gate, admission: Admission
) -> Completions[ChatBody]:
    """The endpoint of conversations."""
    return Completions(engine, config, gate, admission, kind=ChatBody, plan=plan_chat, dialect=ChatAnswers)


def text_completions(
    engine: EngineClient, config: ServeConfig, gate: Gate, admission: Admission
) -> Completions[CompletionBody]:
    """The endpoint of plain texts."""
    return Completions(
        engine, config, gate, admission, kind=CompletionBody, plan=plan_completion, dialect=CompletionAnswers
    )

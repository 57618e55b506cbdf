"""What every endpoint that asks the engine for work does: let in, read, check, count, answer while anybody waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack
from typing import ClassVar, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.config import ServeConfig
from diffserve.service.admission import Admission, Backlog, Ticket
from diffserve.service.engine.client import EngineClient
from diffserve.service.http.bodies import BodyT
from diffserve.service.http.streams import DONE, Events, EventStreamResponse
from diffserve.service.lifecycle import PATIENCE_S, Gate, InFlight, interruption, read_body, warning_headers, work_until


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body: what the caller should know, and whether the answer is told piece by piece."""

    warnings: tuple[str, ...]
    is_stream: bool = False


CheckedT = TypeVar("CheckedT", bound=Checked)
Place = AbstractContextManager[Ticket]


class Endpoint(ABC, Generic[BodyT, CheckedT]):
    """An endpoint with what it stands on. ``body``: what it takes; ``ending``: what follows a stream's last event."""

    body: type[BodyT]
    ending: ClassVar[bytes] = DONE

    def __init__(self, engine: EngineClient, config: ServeConfig, gate: Gate, admission: Admission) -> None:
        self._engine = engine
        self._config = config
        self._gate = gate
        self._admission = admission
        self._in_flight = InFlight()

    async def __call__(self, request: Request) -> Response:
        """Answer one request; every error is a DiffserveError."""
        with ExitStack() as stack:
            stack.enter_context(self._gate.inside())
            client = stack.enter_context(self._admission.clients.known(request))
            self._backlog.check(client)
            checked, place = await self._check(await read_body(request, self.body), request, client)
            ticket = stack.enter_context(place)
            interrupted = stack.enter_context(interruption(request))
            stack.enter_context(self._in_flight.listed(request.state.request_id, interrupted))
            limit_s = self._config.request_timeout_s + PATIENCE_S
            if not checked.is_stream:
                return await work_until(interrupted, self._answer(checked, ticket), limit_s=limit_s)
            events, headers = self._events(checked, ticket), warning_headers(checked.warnings)
            return await EventStreamResponse(
                events, interrupted, stack.pop_all(), limit_s=limit_s, ending=self.ending, headers=headers
            ).opened()

    @property
    def _backlog(self) -> Backlog:
        return self._admission.texts

    @abstractmethod
    async def _check(self, body: BodyT, request: Request, client: str) -> tuple[CheckedT, Place]:
        """What ``body`` asks for, and its place in the backlog, to be entered. Raises what is wrong with it."""

    @abstractmethod
    async def _answer(self, checked: CheckedT, ticket: Ticket) -> Response:
        """The whole answer."""

    @abstractmethod
    def _events(self, checked: CheckedT, ticket: Ticket) -> Events:
        """The answer piece by piece."""

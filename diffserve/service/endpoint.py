"""What every endpoint that asks the engine for work does: let in, read, check, count, answer while anybody waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.service.admission import Admission, Backlog, Ticket
from diffserve.service.engine.engines import Engines
from diffserve.service.http.bodies import BodyT, WorkBody
from diffserve.service.http.streams import DONE, Events, EventStreamResponse
from diffserve.service.lifecycle import (
    PATIENCE_S,
    Gate,
    InFlight,
    interruption,
    owner_of,
    read_body,
    warning_headers,
    work_until,
)
from diffserve.settings.config import HourlyPrice, ServeConfig


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body: what the caller should know, whether the answer is told piece by piece, and what it costs."""

    warnings: tuple[str, ...]
    is_stream: bool = False
    price: HourlyPrice | None = None

    def spent(self, device_s: float) -> dict[str, Any]:
        """So many seconds of the device, as ``usage`` tells them: with the money where there is a price."""
        told: dict[str, Any] = {"device_s": round(device_s, 6)}
        if self.price is not None:
            amount = round(device_s / 3600 * self.price.per_hour, 9)
            told["cost"] = {"amount": amount, "currency": self.price.currency}
        return told

    @property
    def headers(self) -> dict[str, str]:
        """What its answer says beside."""
        return {}


Asks = Literal["image", "text", "chat"]
CheckedT = TypeVar("CheckedT", bound=Checked)
Place = AbstractContextManager[Ticket]


class Endpoint(ABC, Generic[BodyT, CheckedT]):
    """An endpoint with what it stands on.

    body    what it takes
    asks    which models answer it: those that paint, that continue texts, or of these those with a chat template
    ending  what follows a stream's last event
    """

    body: type[BodyT]
    asks: ClassVar[Asks] = "image"
    ending: ClassVar[bytes] = DONE

    def __init__(self, engine: Engines, config: ServeConfig, gate: Gate, admission: Admission) -> None:
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
            self._refuse_if_full(client)
            body = await self._read(request)
            if isinstance(body, WorkBody) and body.priority is None:
                body.priority = getattr(request.state, "priority", None)  # of a batch's line, where it says none
            checked, place = await self._check(body, request, client)
            ticket = stack.enter_context(place)
            begun = await self._begin(checked, ticket, request, stack)
            if begun is not None:
                return begun
            interrupted = stack.enter_context(interruption(request))
            stack.enter_context(self._in_flight.listed(request.state.request_id, interrupted, owner_of(request)))
            limit_s = self._limit_s
            if not checked.is_stream:
                response = await work_until(interrupted, self._answer(checked, ticket), limit_s=limit_s)
                response.headers.update(checked.headers)
                return response
            stack.enter_context(self._engine.metrics.reading())
            events, headers = self._events(checked, ticket), warning_headers(checked.warnings) | checked.headers
            return await EventStreamResponse(
                events, interrupted, stack.pop_all(), limit_s=limit_s, ending=self.ending, headers=headers
            ).opened()

    @property
    def _limit_s(self) -> float:
        """So long an answer is waited for at most."""
        return self._config.request_timeout_s + PATIENCE_S

    async def _begin(self, checked: CheckedT, ticket: Ticket, request: Request, stack: ExitStack) -> Response | None:
        """An answer at once where nobody waits for the work, which takes what ``stack`` holds along; else ``None``."""
        return None

    @property
    def _backlog(self) -> Backlog:
        return self._admission.texts

    def _refuse_if_full(self, client: str) -> None:
        """QueueFull, before the body is read, where nothing of ``client`` would be let in."""
        self._backlog.check(client)

    async def _read(self, request: Request) -> BodyT:
        """The checked body. Raises what is wrong with it."""
        return await read_body(request, self.body)

    @abstractmethod
    async def _check(self, body: BodyT, request: Request, client: str) -> tuple[CheckedT, Place]:
        """What ``body`` asks for, and its place in the backlog, to be entered. Raises what is wrong with it."""

    @abstractmethod
    async def _answer(self, checked: CheckedT, ticket: Ticket) -> Response:
        """The whole answer."""

    @abstractmethod
    def _events(self, checked: CheckedT, ticket: Ticket) -> Events:
        """The answer piece by piece."""

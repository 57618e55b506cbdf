"""Base class of the endpoints that submit work to an engine: admission, reading, planning, answering."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from diffserve.service.admission import Admission, Backlog, Ticket
from diffserve.service.engine.engines import Engines
from diffserve.service.http.bodies import BodyT, WorkBody
from diffserve.service.http.streams import DONE, Events, EventStreamResponse
from diffserve.service.lifecycle import (
    EXTRA_TIMEOUT_S,
    Gate,
    InFlight,
    interruption,
    owner_of,
    read_body,
    warning_headers,
    work_until,
)
from diffserve.settings.config import HourlyPrice, ServeConfig


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request.

    Attributes:
        warnings: Sentences for the client.
        is_stream: Whether the answer is an event stream.
        price: Price of device time; None: not configured.
    """

    warnings: tuple[str, ...]
    is_stream: bool = False
    price: HourlyPrice | None = None

    def spent(self, device_s: float) -> dict[str, Any]:
        """Return the fields of ``usage`` for device time in seconds, with its cost if there is a price."""
        fields: dict[str, Any] = {"device_s": round(device_s, 6)}
        if self.price is not None:
            amount = round(device_s / 3600 * self.price.per_hour, 9)
            fields["cost"] = {"amount": amount, "currency": self.price.currency}
        return fields

    @property
    def num_images(self) -> int:
        """Number of images that the request makes, for the quota of its key."""
        return 0

    @property
    def headers(self) -> dict[str, str]:
        """Additional headers of the answer."""
        return {}


Capability = Literal["image", "text", "chat"]
"""What a model must do to answer an endpoint: generate images, continue texts, or apply a chat template."""

PlanT = TypeVar("PlanT", bound=RequestPlan)


class ServiceContext(NamedTuple):
    """Objects of a server that its endpoints share.

    Attributes:
        engine: The engines that do the work.
        config: Server settings.
        gate: Counts requests for a graceful shutdown.
        admission: Limits on queued work.
        in_flight: Cancellable requests; shared by endpoints whose requests one address cancels.
    """

    engine: Engines
    config: ServeConfig
    gate: Gate
    admission: Admission
    in_flight: InFlight


class Endpoint(ABC, Generic[BodyT, PlanT]):
    """An endpoint that submits work to an engine.

    Subclasses plan a body and answer a plan; this class admits requests and stops work when the client disconnects.

    Attributes:
        body: Class of the request body.
        asks: Which models answer it.
        ending: Bytes after the last event of a stream.
    """

    body: type[BodyT]
    asks: ClassVar[Capability] = "image"
    ending: ClassVar[bytes] = DONE

    def __init__(self, context: ServiceContext) -> None:
        self._engine, self._config, self._gate, self._admission, self._in_flight = context

    async def __call__(self, request: Request) -> Response:
        """Answer one request; all errors are instances of DiffserveError."""
        with ExitStack() as stack:
            stack.enter_context(self._gate.inside())
            client = stack.enter_context(self._admission.clients.name_of(request))
            self._refuse_if_full(client)
            body = await self._read(request)
            if isinstance(body, WorkBody) and body.priority is None:
                body.priority = getattr(request.state, "priority", None)  # set for lines of a batch
            plan = await self._plan(body, request, client)
            await self._admission.check_quota(client, plan.num_images)
            ticket = request.state.ticket = stack.enter_context(self._admit(plan, client))
            ticket.num_images = plan.num_images
            early_response = await self._begin(plan, ticket, request, stack)
            if early_response is not None:
                return early_response
            interrupted = stack.enter_context(interruption(request))
            stack.enter_context(self._in_flight.listed(request.state.request_id, interrupted, owner_of(request)))
            limit_s = self._limit_s
            if not plan.is_stream:
                response = await work_until(interrupted, self._answer(plan, ticket), limit_s=limit_s)
                response.headers.update(plan.headers)
                return response
            stack.enter_context(self._engine.metrics.reading())
            events, headers = self._events(plan, ticket), warning_headers(plan.warnings) | plan.headers
            return await EventStreamResponse(
                events, interrupted, stack.pop_all(), limit_s=limit_s, ending=self.ending, headers=headers
            ).opened()

    @property
    def _limit_s(self) -> float:
        """Seconds after which an answer is given up."""
        return self._config.request_timeout_s + EXTRA_TIMEOUT_S

    async def _begin(self, plan: PlanT, ticket: Ticket, request: Request, stack: ExitStack) -> Response | None:
        """Return an immediate response if the work goes on in the background, else None.

        A background request takes over the contents of ``stack``.
        """
        return None

    @property
    def _backlog(self) -> Backlog:
        return self._admission.texts

    def _refuse_if_full(self, client: str) -> None:
        """Refuse a client without a free slot before its body is read.

        Raises:
            QueueFull: No request of ``client`` is admitted now.
        """
        self._backlog.check(client)

    async def _read(self, request: Request) -> BodyT:
        """Read and validate the body."""
        return await read_body(request, self.body)

    @abstractmethod
    async def _plan(self, body: BodyT, request: Request, client: str) -> PlanT:
        """Return the plan of a request.

        Raises:
            DiffserveError: The request cannot be answered.
        """

    @abstractmethod
    def _admit(self, plan: PlanT, client: str) -> AbstractContextManager[Ticket]:
        """Return the slot of a plan in the backlog; entering it raises QueueFull."""

    @abstractmethod
    async def _answer(self, plan: PlanT, ticket: Ticket) -> Response:
        """Return the complete answer."""

    @abstractmethod
    def _events(self, plan: PlanT, ticket: Ticket) -> Events:
        """Return the events of a streamed answer."""

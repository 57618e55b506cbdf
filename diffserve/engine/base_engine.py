r"""Base classes of engines: delivery of events, request intake, and the tick loop (cancel, expire, plan, run, apply).

::

    submit --> (subclass) --> deliver --> mailbox of a followed request -----------> stream, generate
                                 \--> outbox ----------------------------------> tick
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import torch

from diffserve.api.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    DiffserveError,
    InsufficientMemory,
    InvalidRequest,
    ModelLoadError,
    NumericalError,
    QueueFull,
)
from diffserve.api.types import Cancelled, Failed
from diffserve.engine.records import NO_LIMIT, FailureReason, Live, Scheduler, TickBudget
from diffserve.runtime.device_health import raise_if_sticky

logger = logging.getLogger(__name__)

ERROR_OF_CODE: dict[str, type[DiffserveError]] = {
    "deadline_exceeded": DeadlineExceeded,
    "deadline_unreachable": DeadlineUnreachable,
    "numerical_error": NumericalError,
    "model_load_error": ModelLoadError,
    "insufficient_memory": InsufficientMemory,
}


class RequestEvent(Protocol):
    """Protocol of an event that belongs to one request."""

    @property
    def request_id(self) -> str:
        """Return the id of the request."""


Order = TypeVar("Order")
L = TypeVar("L", bound=Live)
E = TypeVar("E", bound=RequestEvent)

TRACE_TICKS: Final = 256
"""Number of latest ticks that an engine remembers for inspection; benchmarks ask for more."""


class TickLoop(ABC, Generic[Order, E]):
    """Base class of engines: accepts requests, runs ticks and delivers each event exactly once.

    Thread-safe; nothing runs until a caller ticks. A server calls ``submit``, ``cancel`` and, in a loop, ``tick``;
    ``generate`` and ``stream`` tick in the calling thread. An event goes to the mailbox of its request's follower,
    otherwise it is returned by the next ``tick``.

    ``terminal``: types of the events that end a request.
    """

    terminal: ClassVar[tuple[type, ...]]

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the mailboxes and shared fields of subclasses
        self._outbox: deque[E] = deque()
        self._mailboxes: dict[str, deque[E]] = {}  # by followed request
        self._ticking = threading.Lock()  # one tick at a time

    def submit(self, order: Order) -> str:
        """Queue ``order`` and return the id of its request.

        Raises: InvalidRequest or QueueFull; nothing stays queued then.
        """
        return self._enter(order, is_followed=False)

    @abstractmethod
    def _enter(self, order: Order, *, is_followed: bool) -> str:
        """Accept ``order`` and return its request id; create a mailbox if ``is_followed``."""

    @abstractmethod
    def _tick_once(self) -> None:
        """Run one iteration and post its events; the tick lock is held."""

    @abstractmethod
    def cancel(self, request_id: str) -> bool:
        """Cancel a request and free its resources before the next step; return False if it is not live."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something."""

    def tick(self) -> list[E]:
        """Run one iteration and return what happened; cheap when there is nothing to do."""
        self._advance()
        return self._take_mail()

    def events(self) -> Iterator[E]:
        """Tick while there is work and yield the events."""
        while self.has_work:
            yield from self.tick()

    def _deliver(self, events: Iterable[E]) -> None:
        """Put events into the mailbox of their request, or into the outbox if it has no follower."""
        with self._lock:
            for event in events:
                self._mailboxes.get(event.request_id, self._outbox).append(event)

    def _take_mail(self) -> list[E]:
        """Return and clear the events of requests without a follower."""
        with self._lock:
            events = list(self._outbox)
            self._outbox.clear()
            return events

    def _answer(self, orders: Iterable[Order]) -> list[list[E]]:
        """Submit all orders, wait, and return the events of each; raise the error of the first one that failed.

        Excess orders wait for room in the queue.
        """
        entered: list[str] = []
        try:
            for order in orders:
                entered.append(self._enter_in_turn(order))
            histories = [list(self._follow(request_id)) for request_id in entered]
        finally:
            self._abandon(entered)
        for history in histories:
            raise_if_failed(history[-1])
        return histories

    def _watch(self, order: Order) -> Generator[E]:
        """Submit ``order`` and yield its events; closing the iterator cancels the request."""
        request_id = self._enter(order, is_followed=True)
        try:
            yield from self._follow(request_id)
        finally:
            self._abandon([request_id])

    def _enter_in_turn(self, order: Order) -> str:
        while True:
            try:
                return self._enter(order, is_followed=True)
            except QueueFull:
                self._advance()

    def _follow(self, request_id: str) -> Iterator[E]:
        """Yield the events of one request, running ticks while its mailbox is empty."""
        mailbox = self._mailboxes[request_id]
        while True:
            if not mailbox:
                with self._ticking:
                    if not mailbox:  # another thread's tick may have brought news meanwhile
                        self._tick_once()
                        continue
            event = mailbox.popleft()
            yield event
            if isinstance(event, self.terminal):
                return

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """Cancel the requests that are still live and drop their mailboxes."""
        for request_id in request_ids:
            if self.cancel(request_id):
                self._advance()
            self._mailboxes.pop(request_id, None)

    def _advance(self) -> None:
        with self._ticking:
            self._tick_once()


class BaseEngine(TickLoop[Order, E], Generic[Order, L, E]):
    """Base class of the image and text engines: request intake and the tick loop (plan, run, apply).

    At most ``max_waiting`` requests wait. ``doing`` names the work in error messages; ``outcome`` builds the result
    of a tick that failed as a whole.
    """

    doing: ClassVar[str]
    outcome: ClassVar[Callable[..., Any]]
    scheduler: Scheduler[L, E]
    runners: Any

    def __init__(self, max_waiting: int, clock: Callable[[], float], trace_ticks: int = TRACE_TICKS) -> None:
        super().__init__()
        self.clock = clock
        self._max_waiting = max_waiting
        self._trace: deque[Any] = deque(maxlen=trace_ticks)
        self._busy_s = 0.0
        self._owed_s = 0.0  # part of it not charged to requests yet
        self._inbox: dict[str, L] = {}  # both guarded by the lock of the mail
        self._cancelled: dict[str, None] = {}

    @abstractmethod
    def admit(self, order: Order) -> L:
        """Validate and resolve ``order``; raise InvalidRequest if it is not acceptable."""

    @abstractmethod
    def _accepted(self, live: L, num_ahead: int) -> E:
        """Build the first event of ``live``; ``num_ahead`` requests wait before it."""

    @abstractmethod
    def _plan(self, budget: TickBudget) -> Any: ...

    @abstractmethod
    def _apply(self, plan: Any, outcome: Any, started_s: float) -> list[E]: ...

    def _check_deadline(self, live: L) -> None:  # optional hook
        """Raise DeadlineUnreachable if the forecast exceeds the deadline; the default accepts all."""

    def _seconds_left(self) -> float:
        """Return the expected seconds of all accepted work, at least one; the default without a forecast is one."""
        return 1.0

    @property
    def trace(self) -> tuple[Any, ...]:
        """Records of the latest ticks, at most ``trace_ticks`` of them."""
        return tuple(self._trace)

    @property
    def last_tick(self) -> Any:
        """Record of the latest tick; ``None`` if it computed nothing."""
        return self._trace[-1] if self._trace and self._trace[-1].tick == self.scheduler.num_ticks else None

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something."""
        with self._lock:
            queued = bool(self._inbox or self._cancelled or self._outbox)
        return queued or self.scheduler.has_work

    @property
    def num_live(self) -> int:
        """Requests accepted and not yet over."""
        with self._lock:
            return len(self._inbox) + len(self.scheduler.live)

    def holds(self, request_id: str) -> bool:
        """Whether a request was accepted and is not yet over."""
        with self._lock:
            return request_id in self._inbox or request_id in self.scheduler.live

    def check(self, order: Order, *, num_ahead: int = 0) -> None:
        """Raise the errors of submitting ``order``, without queuing it."""
        live = self.admit(order)
        with self._lock:
            self._refuse_if_full(live.request_id, num_ahead)
            self._check_deadline(live)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request and free its resources before the next step; return False if it is not live."""
        with self._lock:
            if self._inbox.pop(request_id, None) is not None:
                event: Any = Cancelled(request_id=request_id)
                self._deliver([event])
                return True
            if request_id not in self.scheduler.live or request_id in self._cancelled:
                return False
            self._cancelled[request_id] = None
            return True

    def tick(self, budget: TickBudget = NO_LIMIT) -> list[E]:
        """Run one iteration and return what happened; cheap when there is nothing to do."""
        with self._ticking:
            self._tick_once(budget)
        return self._take_mail()

    def fail_all(self, failure: FailureReason) -> None:
        """Fail all requests after a tick that raised; the next tick delivers the events."""
        with self._ticking, self._lock:
            for live in self._inbox.values():
                self.scheduler.add(live)
            self._inbox = {}
            for live in tuple(self.scheduler.live.values()):
                self._deliver(self.scheduler.give_up(live, failure))

    def check_integrity(self) -> None:
        """Raise AssertionError or PoolIntegrityError if a page or request is lost."""
        with self._ticking:
            self.scheduler.check_integrity()

    # Below the counter --------------------------------------------------------------------------------------------

    def _enter(self, order: Order, *, is_followed: bool) -> str:
        live = self.admit(order)
        request_id = live.request_id
        with self._lock:
            num_ahead = self._refuse_if_full(request_id)
            self._check_deadline(live)
            if is_followed:
                self._mailboxes[request_id] = deque()
            self._inbox[request_id] = live
            self._deliver([self._accepted(live, num_ahead)])
        return request_id

    def _refuse_if_full(self, request_id: str, num_ahead: int = 0) -> int:
        """Return the number of waiting requests; raise if one more does not fit. The lock is held."""
        running = dict(self.scheduler.live)
        if request_id in running or request_id in self._inbox:
            raise InvalidRequest(f"request_id {request_id!r} is already in use.", param="request_id")
        waiting = [live for live in running.values() if not live.has_started and live.request_id not in self._cancelled]
        num_waiting = len(self._inbox) + len(waiting) + num_ahead
        if num_waiting >= self._max_waiting:
            raise QueueFull(
                f"{num_waiting} requests are waiting, which is the limit of this engine; try again later.",
                retry_after_s=self._seconds_left(),
            )
        return num_waiting

    def _tick_once(self, budget: TickBudget = NO_LIMIT) -> None:
        self._take_inbox()
        started_s = self.clock()
        events = self._apply_cancellations() + self.scheduler.expire(started_s)
        plan = self._plan(budget)
        try:
            outcome = self.runners.run(plan)
        except Exception as error:  # cannot be blamed on one: all of this tick fail, and the engine lives on
            logger.error("a tick failed as a whole")
            outcome = self.outcome(failures=dict.fromkeys(plan.tasks, failure_of(error, self.doing)))
        events += self._apply_cancellations()  # also what was cancelled while it ran
        self._deliver(events + self._apply(plan, outcome, started_s))

    def _is_ready(self, live: L) -> bool:
        """Return whether the inputs of ``live`` are loaded; otherwise it is checked again before the next tick."""
        return True

    def _take_inbox(self) -> None:
        with self._lock:  # a request is always in one of the two places
            entering = {name: live for name, live in self._inbox.items() if self._is_ready(live)}
            for live in entering.values():
                self.scheduler.add(live)
            self._inbox = {name: live for name, live in self._inbox.items() if name not in entering}

    def _apply_cancellations(self) -> list[E]:
        with self._lock:
            request_ids, self._cancelled = self._cancelled, {}
        cancelled: list[Any] = [event for request_id in request_ids for event in self.scheduler.cancel(request_id)]
        return cancelled


def failure_of(error: Exception, doing: str) -> FailureReason:
    """Convert an exception to a failure reason; unexpected types are logged with their traceback.

    Raises: DeviceLost if the device is no longer usable.
    """
    raise_if_sticky(error)
    if isinstance(error, DiffserveError):
        return FailureReason(error.code, error.message, error.param)
    if not isinstance(error, torch.OutOfMemoryError):
        logger.error("%s failed", doing, exc_info=error)
    return FailureReason(DiffserveError.default_code, f"{doing} raised {type(error).__name__}: {error}")


def raise_if_failed(event: RequestEvent) -> None:
    """Raise the error of a ``Failed`` or ``Cancelled`` event."""
    if isinstance(event, Cancelled):
        raise DiffserveError(f"request {event.request_id} was cancelled.", code="cancelled")
    if isinstance(event, Failed):
        blamed = InvalidRequest if event.param is not None else DiffserveError
        raise ERROR_OF_CODE.get(event.code, blamed)(event.message, param=event.param, code=event.code)

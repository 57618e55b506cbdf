r"""Base class of everything that takes requests and emits events; delivers each event exactly once.

::

    submit --> (subclass) --> deliver --> mailbox of a followed request -----------> stream, generate
                                 \--> outbox ----------------------------------> tick
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from diffserve.api.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    DiffserveError,
    EngineUnavailable,
    InsufficientMemory,
    InvalidRequest,
    ModelLoadError,
    NumericalError,
    QueueFull,
)
from diffserve.api.types import Cancelled, Failed

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


E = TypeVar("E", bound=RequestEvent)
Order = TypeVar("Order")


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
        self._is_draining = False

    def submit(self, order: Order) -> str:
        """Queue ``order`` and return the id of its request.

        Raises: InvalidRequest, QueueFull or EngineUnavailable (draining); nothing stays queued then.
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

    def drain(self) -> list[E]:
        """Take no more requests, finish those accepted, return the remaining events."""
        self._is_draining = True
        return list(self.events())

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

    def _refuse_if_draining(self) -> None:
        if self._is_draining:
            raise EngineUnavailable("the engine is finishing its work and takes no more requests.")

    def _answer(self, orders: Iterable[Order]) -> list[list[E]]:
        """Submit all orders, wait, and return the events of each; excess orders wait for room in the queue."""
        entered: list[str] = []
        try:
            for order in orders:
                entered.append(self._enter_in_turn(order))
            return [list(self._follow(request_id)) for request_id in entered]
        finally:
            self._abandon(entered)

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


def raise_if_failed(event: RequestEvent) -> None:
    """Raise the error of a ``Failed`` or ``Cancelled`` event."""
    if isinstance(event, Cancelled):
        raise DiffserveError(f"request {event.request_id} was cancelled.", code="cancelled")
    if isinstance(event, Failed):
        blamed = InvalidRequest if event.param is not None else DiffserveError
        raise ERROR_OF_CODE.get(event.code, blamed)(event.message, param=event.param, code=event.code)

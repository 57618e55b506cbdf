"""What the image engine and the text engine have in common: a core behind a counter."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from diffserve.engine.core import Core
from diffserve.engine.delivery import AboutRequest, Shell
from diffserve.engine.records import NO_LIMIT, FailureReason, Live, TickBudget
from diffserve.errors import InvalidRequest, QueueFull
from diffserve.types import Cancelled

Order = TypeVar("Order")
L = TypeVar("L", bound=Live)
E = TypeVar("E", bound=AboutRequest)


class CoreEngine(Shell[Order, E], Generic[Order, L, E]):
    """``core`` behind the shell. At most ``max_waiting`` requests wait."""

    core: Core[L, Any, Any, E]

    def __init__(self, max_waiting: int) -> None:
        super().__init__()
        self._max_waiting = max_waiting
        self._inbox: dict[str, L] = {}  # both guarded by the lock of the mail
        self._cancelled: dict[str, None] = {}

    @abstractmethod
    def _admit(self, order: Order) -> L:
        """Check and resolve. Raises InvalidRequest."""

    @abstractmethod
    def _accepted(self, live: L, num_ahead: int) -> E:
        """The first event of ``live``, before which ``num_ahead`` others wait."""

    @property
    def trace(self) -> tuple[Any, ...]:
        """What the last ``config.trace_ticks`` ticks ran."""
        return tuple(self.core.trace)

    @property
    def last_tick(self) -> Any:
        """What the latest tick ran; ``None`` when it had nothing to compute."""
        trace = self.core.trace
        return trace[-1] if trace and trace[-1].tick == self.core.scheduler.num_ticks else None

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something."""
        with self._mail.lock:
            queued = bool(self._inbox or self._cancelled or self._mail)
        return queued or self.core.scheduler.has_work

    @property
    def num_live(self) -> int:
        """Requests accepted and not yet over."""
        with self._mail.lock:
            return len(self._inbox) + len(self.core.scheduler.live)

    def check(self, order: Order, *, num_ahead: int = 0) -> None:
        """Raise what submitting would raise, and queue nothing. ``num_ahead``: others that will come first."""
        live = self._admit(order)
        with self._mail.lock:
            self._refuse_if_full(live.request_id, num_ahead)

    def cancel(self, request_id: str) -> bool:
        """Give a request up; what it holds is free before the next step runs. False when it is not (any more) live."""
        with self._mail.lock:
            if self._inbox.pop(request_id, None) is not None:
                self._post_cancelled(request_id)
                return True
            if request_id not in self.core.scheduler.live or request_id in self._cancelled:
                return False
            self._cancelled[request_id] = None
            return True

    def tick(self, budget: TickBudget = NO_LIMIT) -> list[E]:
        """Run one iteration and return what happened; cheap when there is nothing to do."""
        with self._ticking:
            self._tick_once(budget)
        return self._mail.take()

    def fail_all(self, failure: FailureReason) -> None:
        """Give up everything, after a tick that raised; the next tick tells. Raises when not even that can be done."""
        with self._ticking:
            self._take_inbox()
            for live in tuple(self.core.scheduler.live.values()):
                self._mail.post(self.core.scheduler.give_up(live, failure))

    def check_integrity(self) -> None:
        """Nothing and nobody is lost; AssertionError or PoolIntegrityError says what is wrong."""
        with self._ticking:
            self.core.check_integrity()

    # Below the counter --------------------------------------------------------------------------------------------

    def _enter(self, order: Order, *, is_followed: bool) -> str:
        live = self._admit(order)
        request_id = live.request_id
        with self._mail.lock:
            num_ahead = self._refuse_if_full(request_id)
            if is_followed:
                self._mail.open_mailbox(request_id)
            self._inbox[request_id] = live
            self._mail.post([self._accepted(live, num_ahead)])
        return request_id

    def _refuse_if_full(self, request_id: str, num_ahead: int = 0) -> int:
        """Requests that wait before this one; raises when it cannot join them. The lock is held."""
        self._refuse_if_draining()
        running = dict(self.core.scheduler.live)
        if request_id in running or request_id in self._inbox:
            raise InvalidRequest(f"request_id {request_id!r} is already in use.", param="request_id")
        waiting = [live for live in running.values() if not live.has_started and live.request_id not in self._cancelled]
        num_waiting = len(self._inbox) + len(waiting) + num_ahead
        if num_waiting >= self._max_waiting:
            raise QueueFull(
                f"{num_waiting} requests are waiting, which is all this engine holds; try again later.",
                retry_after_s=self.core.seconds_left(),
            )
        return num_waiting

    def _tick_once(self, budget: TickBudget = NO_LIMIT) -> None:
        self._take_inbox()
        self._mail.post(self.core.tick(self._take_cancelled, budget))

    def _take_inbox(self) -> None:
        with self._mail.lock:  # a request is always in one of the two places
            for live in self._inbox.values():
                self.core.scheduler.add(live)
            self._inbox = {}

    def _take_cancelled(self) -> list[str]:
        with self._mail.lock:
            taken, self._cancelled = list(self._cancelled), {}
            return taken

    def _post_cancelled(self, request_id: str) -> None:
        event: Any = Cancelled(request_id=request_id)
        self._mail.post([event])

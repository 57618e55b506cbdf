"""The engine on a postcard, for pictures and for texts: cancel, expire, plan, run, apply."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from diffserve.engine.records import NO_LIMIT, FailureReason, Live, Scheduler, TickBudget
from diffserve.errors import DiffserveError
from diffserve.runtime.device_health import raise_if_sticky

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Live)
E = TypeVar("E")
Plan = TypeVar("Plan")
Outcome = TypeVar("Outcome")


class Core(ABC, Generic[L, Plan, Outcome, E]):
    """Scheduler and runner of one side, driven by one thread at a time.

    trace  what the last ticks ran
    doing  what it does, in words
    """

    doing: ClassVar[str]
    scheduler: Scheduler[L, E]

    def __init__(self, clock: Callable[[], float], trace_ticks: int) -> None:
        self.clock = clock
        self.trace: deque[Any] = deque(maxlen=trace_ticks)
        self._busy_s = 0.0

    def tick(self, take_cancelled: Callable[[], list[str]] = list, budget: TickBudget = NO_LIMIT) -> list[E]:
        """One iteration. Cancellations are taken before the plan and before its result."""
        started_s = self.clock()
        events = self._cancel(take_cancelled()) + self.scheduler.expire(started_s)
        plan = self._plan(budget)
        try:
            outcome = self._run(plan)
        except Exception as error:  # cannot be blamed on one: all of this tick fail, and the engine lives on
            logger.error("a tick failed as a whole")
            outcome = self._all_failed(plan, failure_of(error, self.doing))
        events += self._cancel(take_cancelled())
        return events + self._apply(plan, outcome, started_s)

    def seconds_left(self) -> float:
        """Seconds that everything accepted will take, at least one; one where nobody knows."""
        return 1.0

    def check_integrity(self) -> None:
        """Raises AssertionError or PoolIntegrityError when something or somebody has been lost."""
        self.scheduler.check_integrity()

    @abstractmethod
    def _plan(self, budget: TickBudget) -> Plan: ...

    @abstractmethod
    def _run(self, plan: Plan) -> Outcome: ...

    @abstractmethod
    def _all_failed(self, plan: Plan, failure: FailureReason) -> Outcome: ...

    @abstractmethod
    def _apply(self, plan: Plan, outcome: Outcome, started_s: float) -> list[E]: ...

    def _cancel(self, request_ids: list[str]) -> list[E]:
        cancelled: list[Any] = [event for request_id in request_ids for event in self.scheduler.cancel(request_id)]
        return cancelled


def failure_of(error: Exception, doing: str) -> FailureReason:
    """An exception as a reason to fail; what is not ours is named by its type, and logged with its trace.

    doing: "painting this image". Raises DeviceLost where it is the end of everybody.
    """
    raise_if_sticky(error)
    if isinstance(error, DiffserveError):
        return FailureReason(error.code, error.message, error.param)
    if not isinstance(error, torch.OutOfMemoryError):
        logger.error("%s failed", doing, exc_info=error)
    return FailureReason(DiffserveError.default_code, f"{doing} raised {type(error).__name__}: {error}")

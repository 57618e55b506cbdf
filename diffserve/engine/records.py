"""Records of image and text engines: failure reasons, stages, live requests, tick limits. No torch."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from diffserve.api.types import Cancelled, Failed


class FailureReason(NamedTuple):
    """Cause of a failure: a stable ``code``, a message, and the request field at fault, if any."""

    code: str
    message: str
    param: str | None = None

    def of(self, request_id: str) -> Failed:
        """Return the failure event for ``request_id``."""
        return Failed(request_id=request_id, code=self.code, message=self.message, param=self.param)


class Stage(enum.Enum):
    """Stage of an image or a text; every stage may change to ``DONE``.

    ::

        image  WAITING -> DENOISING -> DECODING -> DONE, or FOLLOWING -> DONE; of a best-of SCORING -> DONE at the end;
               with hires fix DECODING -> ENLARGING -> DENOISING once
        text   WAITING (or FOLLOWING) -> RUNNING -> DONE, and back to WAITING when it is preempted

    WAITING    has no slot, or no pages
    FOLLOWING  waits for the first text of its request, which computes the shared prompt, or for an equal image
    ENLARGING  has a slot, and the image of its first pass, from which the second will start
    SCORING    is finished, holds no memory, and waits for the scorer
    """

    WAITING = "waiting"
    FOLLOWING = "following"
    RUNNING = "running"
    DENOISING = "denoising"
    DECODING = "decoding"
    ENLARGING = "enlarging"
    SCORING = "scoring"
    DONE = "done"


class Live:
    """Request from submission to its terminal event; ``submitted_s`` is a reading of the engine's clock."""

    __slots__ = ()

    request: Any
    submitted_s: float
    tasks: Sequence[Any]

    @property
    def request_id(self) -> str:
        """Return the request id that the caller uses."""
        name: str = self.request.request_id
        return name

    @property
    def is_over(self) -> bool:
        """Return whether all tasks are finished, failed or cancelled."""
        return all(task.stage is Stage.DONE for task in self.tasks)

    @property
    def has_started(self) -> bool:
        """Return whether the request has left the waiting queue."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TickBudget:
    """Limits of one tick; None means only the engine's own limits apply.

    Attributes:
        max_tokens: Number of tokens in the call of the network.
        time_s: Estimated seconds of the call; see ``TextEngine.max_tokens``.
        admits: Whether texts without pages may get some; false while other requests have waited longer for pages.
    """

    max_tokens: int | None = None
    time_s: float | None = None
    admits: bool = True


T = TypeVar("T")
L = TypeVar("L", bound=Live)
E = TypeVar("E")

NO_LIMIT: Final = TickBudget()


def shares(seconds: float, weights: Mapping[T, float]) -> dict[T, float]:
    """Divide ``seconds`` in proportion to ``weights``, equally if all are 0."""
    total = sum(weights.values())
    if total <= 0.0:
        return dict.fromkeys(weights, seconds / max(1, len(weights)))
    return {key: seconds * weight / total for key, weight in weights.items()}


class Scheduler(ABC, Generic[L, E]):
    """Base class of the request schedulers; single-threaded, called by the tick.

    Attributes:
        live: Accepted requests that are not over, by id.
        num_ticks: Number of plans made.
        product: Name of the results, for messages.
    """

    product: ClassVar[str]

    def __init__(self) -> None:
        self.live: dict[str, L] = {}
        self.num_ticks = 0

    @property
    def has_work(self) -> bool:
        """Return whether a tick would do something."""
        return bool(self.live)

    @abstractmethod
    def add(self, live: L) -> None:
        """Queue a validated request."""

    @abstractmethod
    def give_up(self, live: L, failure: FailureReason) -> list[E]:
        """Fail one request; others continue."""

    @abstractmethod
    def _drop(self, live: L) -> None:
        """Remove a request and free its resources."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError or PoolIntegrityError if a page or request is lost."""

    def cancel(self, request_id: str) -> list[E | Cancelled]:
        """Remove a request and free its resources at once; return an empty list if it is not live."""
        live = self.live.get(request_id)
        if live is None:
            return []
        self._drop(live)
        return [Cancelled(request_id=request_id)]

    def expire(self, now_s: float) -> list[E]:
        """Fail the requests whose deadline has passed."""
        events: list[E] = []
        for live in list(self.live.values()):
            deadline_s = live.request.deadline_s
            if deadline_s is None or live.submitted_s + deadline_s >= now_s:
                continue
            message = f"the deadline of {deadline_s:g} s passed before the {self.product} was finished."
            events += self.give_up(live, FailureReason("deadline_exceeded", message, "deadline_s"))
        return events

"""What both sides keep: why something fails, where it stands, who is live, what a tick may take. No torch."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from diffserve.api.types import Cancelled, Failed


class FailureReason(NamedTuple):
    """Why something was given up: a stable ``code``, a sentence, and the request field to blame, if one is."""

    code: str
    message: str
    param: str | None = None

    def of(self, request_id: str) -> Failed:
        """The terminal event that says so."""
        return Failed(request_id=request_id, code=self.code, message=self.message, param=self.param)


class Stage(enum.Enum):
    """Where an image or a text stands; every stage may jump to ``DONE``.

    ::

        image  WAITING -> DENOISING -> DECODING -> DONE, or FOLLOWING -> DONE; of a best-of SCORING -> DONE at the end
        text   WAITING (or FOLLOWING) -> RUNNING -> DONE, and back to WAITING when it gives its pages away

    WAITING    has no lane, or no pages
    FOLLOWING  waits for the first text of its request to compute the prompt that they share; for the image that
               paints the same picture
    SCORING    is painted, holds nothing, and waits for what the scorer says
    """

    WAITING = "waiting"
    FOLLOWING = "following"
    RUNNING = "running"
    DENOISING = "denoising"
    DECODING = "decoding"
    SCORING = "scoring"
    DONE = "done"


class Live:
    """A request from submit to its terminal event. ``submitted_s`` is a reading of the engine's clock."""

    __slots__ = ()

    request: Any
    submitted_s: float
    tasks: Sequence[Any]

    @property
    def request_id(self) -> str:
        """The id the caller knows it by."""
        name: str = self.request.request_id
        return name

    @property
    def is_over(self) -> bool:
        """Whether all that it asks for is finished, failed or cancelled."""
        return all(task.stage is Stage.DONE for task in self.tasks)

    @property
    def has_started(self) -> bool:
        """Whether it waits no more."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TickBudget:
    """What one tick may take; None: no limit beside the engine's own.

    max_tokens  tokens in the call of the network
    time_s      seconds that the call should take, by what earlier calls took; see ``TextEngine.max_tokens``
    admits      whether texts that have no pages may be given some; not while others wait for pages longer already
    """

    max_tokens: int | None = None
    time_s: float | None = None
    admits: bool = True


T = TypeVar("T")
L = TypeVar("L", bound=Live)
E = TypeVar("E")

NO_LIMIT: Final = TickBudget()


def shares(seconds: float, weights: Mapping[T, float]) -> dict[T, float]:
    """``seconds`` shared out by ``weights``, equally where these are all 0; they add up."""
    total = sum(weights.values())
    if total <= 0.0:
        return dict.fromkeys(weights, seconds / max(1, len(weights)))
    return {key: seconds * weight / total for key, weight in weights.items()}


class Scheduler(ABC, Generic[L, E]):
    """Who runs next. Single-threaded: the tick calls it.

    live       requests accepted and not yet over, by id
    num_ticks  plans made
    product    what is waited for, in words
    """

    product: ClassVar[str]

    def __init__(self) -> None:
        self.live: dict[str, L] = {}
        self.num_ticks = 0

    @property
    def has_work(self) -> bool:
        """Whether a tick would do something."""
        return bool(self.live)

    @abstractmethod
    def add(self, live: L) -> None:
        """Let a checked request wait."""

    @abstractmethod
    def give_up(self, live: L, failure: FailureReason) -> list[E]:
        """A request has failed; its neighbours go on."""

    @abstractmethod
    def _drop(self, live: L) -> None:
        """Forget a request, and free what it holds."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError or PoolIntegrityError when something or somebody has been lost."""

    def cancel(self, request_id: str) -> list[E | Cancelled]:
        """Forget a request at once; what it held is free when this returns. Empty when it is not live."""
        live = self.live.get(request_id)
        if live is None:
            return []
        self._drop(live)
        return [Cancelled(request_id=request_id)]

    def expire(self, now_s: float) -> list[E]:
        """Give up the requests whose deadline has passed."""
        events: list[E] = []
        for live in list(self.live.values()):
            deadline_s = live.request.deadline_s
            if deadline_s is None or live.submitted_s + deadline_s >= now_s:
                continue
            message = f"the deadline of {deadline_s:g} s passed before the {self.product} was finished."
            events += self.give_up(live, FailureReason("deadline_exceeded", message, "deadline_s"))
        return events

"""One replica as the front knows it: held or let go, and given requests in between.

Each replica is a Ray Serve deployment of its own with 0 or 1 replicas, so that a handle is the address of a certain
one. Of what Ray 2.60 offers for that, ``multiplexed_model_id`` is beta and a wish only (after a while a request goes
elsewhere), a request router of one's own, ``handle.broadcast`` and application-wide autoscaling policies are alpha;
deployments, their handles, streams of answers and AutoscalingConfig are stable, and need nothing else. A replica is
there while somebody reads its stream ``live``: Ray Serve's autoscaling counts that as the one ongoing request that
asks for one replica, starts it where it has room, and starts it anew where it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol, cast

import msgspec

from diffserve.api import ipc
from diffserve.api.engine_stats import EngineStats
from diffserve.api.errors import DiffserveError, EngineUnavailable, ModelLoadError
from diffserve.api.text_types import LanguageModelInfo
from diffserve.api.types import ServedModel
from diffserve.service.engine.connection import refusal_in
from diffserve.service.engine.engines import LAST, Job
from diffserve.service.engine.router import MemberQueue
from diffserve.service.metrics import Metrics
from diffserve.store.unet_paths import UNetPathFile

SILENT_AFTER_S: Final = 10.0
AGAIN_AFTER_S: Final = 0.5
LOSSES: Final = 5
USUAL_START_S: Final = 20.0

log = logging.getLogger("diffserve.cluster")


class Calls(Protocol):
    """How a replica is called: bytes in, bytes out. Whatever goes wrong on the way is an Exception."""

    def stream(self, method: str, *arguments: bytes) -> AsyncGenerator[bytes, None]:
        """The parts of an answer as they come; closing it leaves the call."""

    async def ask(self, question: bytes) -> bytes:
        """An answer that comes at once."""


class Seat:
    """A replica that may be there.

    name         of its deployment
    ready        what it loaded, while its engine is up
    is_held      whether it is to be there
    is_leaving   whether it is given no more to do
    is_changing  whether it is being given other settings: it is neither held nor let go for the work's sake then
    jobs         what it was given and is not over, with what each costs
    num_inside   requests in its engine, by its own books as of a second ago
    start_s      seconds from when it was held to its engine's first picture, as last measured
    """

    def __init__(self, name: str, calls: Calls, metrics: Metrics, paths: UNetPathFile) -> None:
        self.name = name
        self.ready: ipc.Ready | None = None
        self.is_held = False
        self.is_leaving = False
        self.is_changing = False
        self.jobs: dict[str, float] = {}
        self.num_inside = 0
        self.start_s = USUAL_START_S
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        self._calls = calls
        self._paths = paths
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._heard_s = 0.0
        self._held_s = 0.0
        self._num_losses = 0
        self._num_engines = self._asked_engine = 0
        self._holding: asyncio.Task[None] | None = None
        self._working: dict[str, asyncio.Task[None]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a request handed over now would be painted."""
        return self.ready is not None and not self.is_leaving and self._now() - self._heard_s < SILENT_AFTER_S

    @property
    def num_engines(self) -> int:
        """Engines that it has had so far, one after the other."""
        return self._num_engines

    @property
    def cost(self) -> float:
        """What is to be done here, in UNet rows of the native size."""
        return sum(self.jobs.values())

    @property
    def queue(self) -> MemberQueue:
        """How it stands, for the router."""
        return MemberQueue(self.cost, frozenset(one.name for one in self.models if one.is_loaded))

    def is_new(self) -> bool:
        """Whether its engine is another than when this was last asked."""
        before, self._asked_engine = self._asked_engine, self._num_engines
        return before != self._num_engines

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Those that requests may name here; none while there is no engine."""
        return () if self.ready is None else self.ready.models

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """The language model, where there is one."""
        return None if self.ready is None else self.ready.language

    @property
    def retry_after_s(self) -> float:
        """While it is not ready: seconds until it should be, 1 at least."""
        since_s = self._now() - self._held_s if self.is_held else 0.0
        return max(1.0, self.start_s - since_s)

    def hold(self) -> None:
        """Have it there."""
        self.is_leaving = False
        if not self.is_held:
            self.is_held, self._held_s = True, self._now()
            self._holding = asyncio.create_task(self._hold(), name=f"replica {self.name}")

    def leave(self) -> None:
        """Give it no more to do; it is let go when what it has is done."""
        self.is_leaving = True

    async def let_go(self) -> None:
        """Need it no more; what it still has to do ends in EngineUnavailable."""
        self.is_held = self.is_leaving = False
        self.ready, self.num_inside = None, 0
        tasks = [*self._working.values(), *([self._holding] if self._holding else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forgive(self) -> None:
        """Forget for what reason it was given up: it has other settings now."""
        if self.failed.done():
            self.failed = asyncio.get_running_loop().create_future()
        self._num_losses = 0

    def take(self, job: Job[Any], cost: float) -> None:
        """Have the request of ``job`` done, and feed it. InvalidRequest where no frame can hold it."""
        data = ipc.frame(ipc.Submit(request=cast(ipc.AnyRequest, job.request)))
        self.jobs[job.request_id] = cost
        task = asyncio.create_task(self._work(job, data), name=f"{job.kind} {job.request_id}")
        self._working[job.request_id] = task
        task.add_done_callback(lambda task: self._ended(job, task))

    def cancel(self, request_id: str) -> None:
        """Give a request up, if it is not over: its call is left, and its place free at the engine's next step."""
        task = self._working.pop(request_id, None)
        self.jobs.pop(request_id, None)
        if task is not None:
            self._metrics.ended(task.get_name().partition(" ")[0], "cancelled")
            task.cancel()

    def look_again(self, name: str) -> None:
        """Have the files of a model looked at again."""
        self.send(ipc.LookAgain(name=name))

    def send(self, command: ipc.LookAgain | ipc.Interrupt) -> None:
        """Send a command to the replica that it does not answer."""
        asking = asyncio.create_task(self._calls.ask(ipc.frame(command)))
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def num_requests(self) -> int:
        """How many requests are in its engine, by its own books. EngineUnavailable where nobody answers."""
        answer = await self._ask(ipc.Ping(number=next(self._numbers)))
        return answer.num_requests if isinstance(answer, ipc.Pong) else 0

    async def stats(self) -> EngineStats | None:
        """The engine's numbers. EngineUnavailable where nobody answers."""
        answer = await self._ask(ipc.ReadStats(number=next(self._numbers)))
        return answer.stats if isinstance(answer, ipc.Stats) else None

    async def trace(self) -> list[list[str]]:
        """Per recent UNet call, the request id of every row. EngineUnavailable where nobody answers."""
        answer = await self._ask(ipc.ReadTrace(number=next(self._numbers)))
        return answer.unet_calls if isinstance(answer, ipc.Trace) else []

    async def _ask(self, question: ipc.Command) -> ipc.Report:
        try:
            async with asyncio.timeout(SILENT_AFTER_S):
                (body,) = ipc.bodies(await self._calls.ask(ipc.frame(question)))
        except Exception as error:  # of many kinds, by what became of the replica
            raise self._gone() from error
        return ipc.decode_report(body)

    async def _hold(self) -> None:
        """Read ``live`` for as long as it is held."""
        while not self.failed.done():
            try:
                paths = msgspec.json.encode(self._paths.known())
                async with contextlib.aclosing(self._calls.stream("live", paths)) as frames:
                    async for frame in frames:
                        self._hear(frame)
                reason = "it ended"
            except Exception as error:
                reason = type(error).__name__
            was_up, self.ready, self.num_inside = self.ready is not None, None, 0
            self._num_losses = 1 if was_up else self._num_losses + 1
            log.warning("replica lost", extra={"replica": self.name, "reason": reason})
            for task in self._working.values():  # Ray takes seconds to say so of a call that it was about to make
                task.cancel()
            if self._num_losses >= LOSSES and not self.failed.done():
                said = f"the replica {self.name} was lost {LOSSES} times before it was ready; giving up."
                self.failed.set_result(EngineUnavailable(said))
            self._held_s = self._now()
            await asyncio.sleep(AGAIN_AFTER_S)

    def _hear(self, frames: bytes) -> None:
        self._heard_s = self._now()
        for body in ipc.bodies(frames):
            match ipc.decode_report(body):
                case ipc.Ready() as ready:
                    if self.ready is None:
                        self._num_engines += 1
                        self.start_s = self._now() - self._held_s
                        log.info("replica ready", extra={"replica": self.name, "load_s": round(self.start_s, 1)})
                    self.ready = ready
                    self._paths.remember(ready.models)
                case ipc.Lost(reason=reason):
                    log.warning("replica has no engine", extra={"replica": self.name, "reason": reason})
                    self.ready, self.num_inside, self._held_s = None, 0, self._now()
                case ipc.Pong(num_requests=num_requests):
                    self.num_inside = num_requests
                case ipc.LoadFailed(code=code, message=message) if not self.failed.done():
                    is_gone = code == EngineUnavailable.default_code
                    error = EngineUnavailable(message) if is_gone else ModelLoadError(message, code=code)
                    self.failed.set_result(error)

    async def _work(self, job: Job[Any], data: bytes) -> None:
        """Read what becomes of ``job``."""
        try:
            async with contextlib.aclosing(self._calls.stream("work", data)) as parts:
                async for part in parts:
                    for body in ipc.bodies(part):
                        report = ipc.decode_report(body)
                        self._feed(job, refusal_in(report) if isinstance(report, ipc.Rejected) else report)
        except Exception as error:
            log.warning("a call was lost", extra={"replica": self.name, "reason": type(error).__name__})

    def _ended(self, job: Job[Any], task: asyncio.Task[None]) -> None:
        """Nobody reads of ``job`` any more: its call is lost, or the seat let go, where it was not over or given up."""
        if self._working.get(job.request_id) is task:
            self._feed(job, self._gone())

    def _feed(self, job: Job[Any], event: Any) -> None:
        if isinstance(event, (*LAST, DiffserveError)):
            if self.jobs.pop(job.request_id, None) is None:
                return
            self._working.pop(job.request_id, None)
        if isinstance(event, DiffserveError):
            self._metrics.ended(job.kind, "lost" if isinstance(event, EngineUnavailable) else "rejected")
        else:
            self._metrics.observe(job.kind, event)
            if (waited_s := job.waited_for_preview_s(event)) is not None:
                self._metrics.observe_first_preview(waited_s)
        job.feed(event)

    def _gone(self) -> EngineUnavailable:
        return EngineUnavailable("the replica stopped before this was finished; please try again.")

    @staticmethod
    def _now() -> float:
        return time.monotonic()  # asked by threads, too, which have no loop

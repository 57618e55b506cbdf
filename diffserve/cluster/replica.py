"""One engine replica on Ray, as the pool of the front process sees it.

Each replica is a Ray Serve deployment with zero or one replica, so that its handle addresses one certain process. A
replica runs while the front reads its stream ``live``: Ray Serve's autoscaling counts that stream as the one ongoing
request that needs a replica, starts it where there is room, and restarts it if it dies.
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
from diffserve.service.engine.engines import END_OF_JOB, Job
from diffserve.service.metrics import Metrics
from diffserve.store.unet_paths import UNetPathFile

SILENT_AFTER_S: Final = 10.0
RESTART_DELAY_S: Final = 0.5
MAX_FAILED_STARTS: Final = 5
USUAL_START_S: Final = 20.0

log = logging.getLogger("diffserve.cluster")


class Calls(Protocol):
    """Calls to a replica: bytes in, bytes out. Every failure on the way is an Exception."""

    def stream(self, method: str, *arguments: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the parts of an answer as they arrive; closing the generator cancels the call."""

    async def ask(self, question: bytes) -> bytes:
        """Return an answer that is available at once."""


class RayReplica:
    """A replica that can be started and stopped: see ``Replica``.

    Attributes:
        name: Name of its deployment.
        ready: Description of what its engine loaded; ``None`` while there is no engine.
        is_started: Whether it should run.
        is_draining: Whether it gets no new requests, and stops after the current ones.
        is_redeploying: Whether it gets other settings; scaling ignores it meanwhile.
        reported_requests: Number of requests in its engine, as reported within the last second.
        start_s: Last measured seconds from start to ready.
        num_engines: Number of engines that it has had.
    """

    def __init__(self, name: str, calls: Calls, metrics: Metrics, paths: UNetPathFile) -> None:
        """Create a stopped replica that ``calls`` lead to."""
        self.name = name
        self.ready: ipc.Ready | None = None
        self.is_started = False
        self.is_draining = False
        self.is_redeploying = False
        self.reported_requests = 0
        self.start_s = USUAL_START_S
        self.num_engines = 0
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        self._calls = calls
        self._paths = paths
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._last_report_s = 0.0
        self._started_s = 0.0
        self._num_failed_starts = 0
        self._live: asyncio.Task[None] | None = None
        self._jobs: dict[str, tuple[Job[Any], asyncio.Task[None]]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether the engine would start a request now."""
        is_silent = self._now() - self._last_report_s >= SILENT_AFTER_S
        return self.ready is not None and not self.is_draining and not is_silent

    @property
    def is_expected(self) -> bool:
        """Whether the replica is started and its failure counts as one of the pool."""
        return self.is_started and not self.is_redeploying

    @property
    def is_busy(self) -> bool:
        """Whether it has unfinished requests."""
        return bool(self._jobs)

    @property
    def engine_id(self) -> int:
        """Number of the current engine."""
        return self.num_engines

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Image models that requests may name; empty while there is no engine."""
        return () if self.ready is None else self.ready.models

    @property
    def text_info(self) -> LanguageModelInfo | None:
        """Description of the language model, if there is one."""
        return None if self.ready is None else self.ready.language

    @property
    def retry_after_s(self) -> float:
        """Expected seconds until the replica is ready, at least 1."""
        waited_s = self._now() - self._started_s if self.is_started else 0.0
        return max(1.0, self.start_s - waited_s)

    def start(self) -> None:
        """Start the replica, or keep it if it is draining."""
        self.is_draining = False
        if not self.is_started:
            self.is_started, self._started_s = True, self._now()
            self._live = asyncio.create_task(self._keep_alive(), name=f"replica {self.name}")

    def drain(self) -> None:
        """Send it no more requests; the pool stops it when the current ones are done."""
        self.is_draining = True

    async def stop(self) -> None:
        """Stop the replica; its unfinished jobs end in EngineUnavailable."""
        self.is_started = self.is_draining = False
        self.ready, self.reported_requests = None, 0
        tasks = [*(task for _, task in self._jobs.values()), *([self._live] if self._live else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reset_failure(self) -> None:
        """Forget earlier failures, after the replica got other settings."""
        if self.failed.done():
            self.failed = asyncio.get_running_loop().create_future()
        self._num_failed_starts = 0

    def take(self, job: Job[Any]) -> None:
        """Start the request of ``job`` and feed it its events; raise InvalidRequest if it does not fit in a frame."""
        data = ipc.frame(cast(ipc.AnyRequest, job.request))
        task = asyncio.create_task(self._work(job, data), name=f"{job.kind} {job.request_id}")
        self._jobs[job.request_id] = job, task
        task.add_done_callback(lambda _: self._feed(job, self._lost_error()))

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its slot is free at the engine's next step. Ignored if it has ended."""
        if request_id in self._jobs:
            job, task = self._jobs.pop(request_id)
            job.record_cancel(self._metrics)
            task.cancel()

    def interrupt(self, request_id: str) -> None:
        """End an image request early; ignored if it has ended."""
        self._send(ipc.Interrupt(request_id=request_id))

    def retry_load(self, name: str) -> None:
        """Read the files of a model that failed to load again."""
        self._send(ipc.LookAgain(name=name))

    def _send(self, command: ipc.LookAgain | ipc.Interrupt) -> None:
        """Send a command that has no answer."""
        asking = asyncio.create_task(self._calls.ask(ipc.frame(command)))
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def num_requests(self) -> int:
        """Return the number of requests that the engine counts; raise EngineUnavailable without an answer."""
        answer = await self._ask(ipc.Ping(number=next(self._numbers)))
        return answer.num_requests if isinstance(answer, ipc.Pong) else 0

    async def stats(self) -> EngineStats | None:
        """Return the engine's statistics; raise EngineUnavailable without an answer."""
        answer = await self._ask(ipc.ReadStats(number=next(self._numbers)))
        return answer.stats if isinstance(answer, ipc.Stats) else None

    async def trace(self) -> list[list[str]]:
        """Return the request id of every row of the recent UNet calls; raise EngineUnavailable without an answer."""
        answer = await self._ask(ipc.ReadTrace(number=next(self._numbers)))
        return answer.unet_calls if isinstance(answer, ipc.Trace) else []

    async def _ask(self, question: ipc.Command) -> ipc.Report:
        try:
            async with asyncio.timeout(SILENT_AFTER_S):
                (body,) = ipc.bodies(await self._calls.ask(ipc.frame(question)))
        except Exception as error:  # the type depends on what happened to the replica
            raise self._lost_error() from error
        return ipc.decode_report(body)

    async def _keep_alive(self) -> None:
        """Read ``live`` until the task is cancelled or the replica is given up."""
        while not self.failed.done():
            try:
                paths = msgspec.json.encode(self._paths.paths())
                async with contextlib.aclosing(self._calls.stream("live", paths)) as frames:
                    async for frame in frames:
                        self._on_report(frame)
                reason = "the stream ended"
            except Exception as error:
                reason = type(error).__name__
            was_up, self.ready, self.reported_requests = self.ready is not None, None, 0
            self._num_failed_starts = 1 if was_up else self._num_failed_starts + 1
            log.warning("replica lost", extra={"replica": self.name, "reason": reason})
            for _, task in self._jobs.values():  # Ray reports the loss of a call that had not begun only after seconds
                task.cancel()
            if self._num_failed_starts >= MAX_FAILED_STARTS and not self.failed.done():
                message = f"the replica {self.name} was lost {MAX_FAILED_STARTS} times before it was ready; giving up."
                self.failed.set_result(EngineUnavailable(message))
            self._started_s = self._now()
            await asyncio.sleep(RESTART_DELAY_S)

    def _on_report(self, frames: bytes) -> None:
        self._last_report_s = self._now()
        for body in ipc.bodies(frames):
            match ipc.decode_report(body):
                case ipc.Ready() as ready:
                    if self.ready is None:
                        self.num_engines += 1
                        self.start_s = self._now() - self._started_s
                        log.info("replica ready", extra={"replica": self.name, "load_s": round(self.start_s, 1)})
                    self.ready = ready
                    self._paths.remember(ready.models)
                case ipc.Lost(reason=reason):
                    log.warning("replica has no engine", extra={"replica": self.name, "reason": reason})
                    self.ready, self.reported_requests, self._started_s = None, 0, self._now()
                case ipc.Pong(num_requests=num_requests):
                    self.reported_requests = num_requests
                case ipc.LoadFailed(code=code, message=message) if not self.failed.done():
                    is_gone = code == EngineUnavailable.default_code
                    error = EngineUnavailable(message) if is_gone else ModelLoadError(message, code=code)
                    self.failed.set_result(error)

    async def _work(self, job: Job[Any], data: bytes) -> None:
        """Feed ``job`` the events of its call; a call that ends without a final event has lost its replica."""
        try:
            async with contextlib.aclosing(self._calls.stream("work", data)) as parts:
                async for part in parts:
                    for body in ipc.bodies(part):
                        report = ipc.decode_report(body)
                        self._feed(job, refusal_in(report) if isinstance(report, ipc.Rejected) else report)
        except Exception as error:
            log.warning("call to replica failed", extra={"replica": self.name, "reason": type(error).__name__})

    def _feed(self, job: Job[Any], event: Any) -> None:
        """Feed ``job`` an event or error; ignored after its end."""
        if self._jobs.get(job.request_id, (None,))[0] is not job:
            return
        if isinstance(event, END_OF_JOB):
            del self._jobs[job.request_id]
        job.record(event, self._metrics)
        job.feed(event)

    @staticmethod
    def _lost_error() -> EngineUnavailable:
        return EngineUnavailable("the replica stopped before this was finished; please try again.")

    @staticmethod
    def _now() -> float:
        return time.monotonic()  # not the loop's time: threads without a loop call this, too

"""Job runner: leases queued jobs and sends them through the normal endpoints, on behalf of their keys.

Several servers with one database run jobs side by side. Each holds the lock of a file in the data folder, which the
system releases when the process ends; the jobs of a process without a lock return to the queue at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.requests import Request

from diffserve.api.errors import DiffserveError, EngineUnavailable
from diffserve.service.admission import Admission, Ticket
from diffserve.service.engine.capture_files import CaptureFiles
from diffserve.service.http.errors import log_failure
from diffserve.service.stored.background import (
    LOOK_EVERY_S,
    MAX_RETRY_S,
    Answered,
    error_answer,
    request_of,
    run_to_end,
    until_served,
    yield_to_interactive,
)
from diffserve.service.stored.batch_runner import Answer
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import FILES, LISTINGS
from diffserve.store.errors import StoreError
from diffserve.store.jobs import CAPTURE, Job, Jobs

JOBS_AT_ONCE: Final = 8
JOBS_AT_ONCE_ON_GPU: Final = 32
SWEEP_EVERY_S: Final = 30.0
NUM_MEASURED: Final = 32
"""Number of finished jobs whose mean work is the expected work of a queued one."""

log = logging.getLogger("diffserve.jobs")


class Outlook(NamedTuple):
    """Queue position, progress and expected end of an unfinished job.

    Attributes:
        position: Position among all queued jobs, 1 starts next; None if it is not queued.
        progress: Share of the work that is done, from 0 to 1; None if this server does not run it.
        estimated_seconds: Seconds until its end at the recent pace; None while unknown.
    """

    position: int | None = None
    progress: float | None = None
    estimated_seconds: float | None = None


UNKNOWN: Final = Outlook()


class _RunningJob:
    """Task of a leased job, and its latest request, if it has begun; no other job begins while one ``is_alone``."""

    def __init__(self, task: asyncio.Task[None], owner: str, *, is_alone: bool) -> None:
        self.task = task
        self.owner = owner
        self.is_alone = is_alone
        self.request: Request | None = None

    def stop(self) -> None:
        """Cancel the task, once: a second cancellation would interrupt how it ends."""
        if not self.task.cancelling():
            self.task.cancel()

    @property
    def ticket(self) -> Ticket | None:
        """Admitted work of the job; None until it is admitted."""
        return None if self.request is None else getattr(self.request.state, "ticket", None)


class JobRunner:
    """Runs ``jobs``; ``endpoints`` maps paths to their handlers."""

    def __init__(
        self, app: FastAPI, jobs: Jobs, owners: Owners, admission: Admission, endpoints: Mapping[str, Answer]
    ) -> None:
        self._app = app
        self._jobs = jobs
        self._owners = owners
        self._admission = admission
        self._endpoints = endpoints
        self._holder = secrets.token_hex(8)
        self._wakeup = asyncio.Event()
        self._running: dict[tuple[int, int], _RunningJob] = {}  # by number and token of the job
        self._seconds_of_finished: deque[float] = deque(maxlen=NUM_MEASURED)
        self.changed = asyncio.Event()
        self.is_stopping = False

    def wake(self) -> None:
        """Look for new jobs now, and tell waiting readers that something may have changed."""
        self._wakeup.set()
        self.changed.set()
        self.changed = asyncio.Event()

    def stop(self, job: Job) -> None:
        """Stop the work of a job that was cancelled or paused."""
        running = self._running.get((job.number, job.token))
        if running is not None:
            running.stop()
        self.wake()

    async def outlooks(self, jobs: Collection[Job]) -> dict[int, Outlook]:
        """Return position, progress and expected end of ``jobs``, by number."""
        queued = [job.number for job in jobs if job.status == "queued"]
        positions = await LISTINGS.run(self._jobs.positions, queued) if queued else {}
        return {job.number: self._outlook(job, positions.get(job.number)) for job in jobs}

    def _seconds_until_done(self, position: int) -> float | None:
        """Estimate the seconds until the end of a queued job, as if those before it were like the latest ones."""
        running_s, left_s = [], 0.0
        for running in self._running.values():
            ticket = running.ticket
            total_s = None if ticket is None else ticket.total_s
            if ticket is not None and total_s is not None:
                running_s.append(total_s)
                left_s += total_s * (1.0 - ticket.progress)
        known_s = [*self._seconds_of_finished, *running_s]
        return round(left_s + position * sum(known_s) / len(known_s), 1) if known_s else None

    def _outlook(self, job: Job, position: int | None) -> Outlook:
        if position is not None:
            return Outlook(position, None, self._seconds_until_done(position))
        running = self._running.get((job.number, job.token))
        if job.status != "running" or running is None:
            return UNKNOWN
        if running.ticket is None:
            return Outlook(None, 0.0)
        left_s = running.ticket.left_s
        return Outlook(None, round(running.ticket.progress, 4), None if left_s is None else round(left_s, 1))

    async def run_for_ever(self) -> None:
        """Run queued jobs until cancelled; unfinished ones then return to the queue."""
        try:
            async with _holding(self._jobs.folder, self._holder):
                await self._run_all()
        finally:
            self.is_stopping = True
            self.wake()

    async def _run_all(self) -> None:
        swept_s = looked_s = -SWEEP_EVERY_S
        try:
            while True:
                self._wakeup.clear()
                try:
                    if time.monotonic() - swept_s >= SWEEP_EVERY_S:
                        swept_s = time.monotonic()
                        await FILES.run(self._jobs.sweep)
                    if time.monotonic() - looked_s >= LOOK_EVERY_S:  # it reads the folder, which may be long
                        looked_s = time.monotonic()
                        await self._reclaim()
                    await self._stop_changed()
                    await self._claim()
                except (OSError, StoreError) as error:
                    log_failure(log, "jobs cannot be read", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._wakeup.wait()
        finally:
            all_running = list(self._running.values())
            for running in all_running:
                running.stop()
            await asyncio.gather(*(running.task for running in all_running), return_exceptions=True)
            with suppress(OSError, StoreError):
                await run_to_end(self._jobs.drain_all, self._holder)

    async def _reclaim(self) -> None:
        for name in await LISTINGS.run(self._jobs.reclaim, lambda: {*_holders(self._jobs.folder), self._holder}):
            log.warning("the server that ran a job has ended; it runs again", extra={"job": name})

    async def _stop_changed(self) -> None:
        """Stop the work of jobs that were cancelled or paused through another server, and of revoked keys.

        A job of a revoked key returns to the queue, and fails when it is claimed again.
        """
        numbers = [number for number, _ in self._running]
        states = await LISTINGS.run(self._jobs.states, numbers) if numbers else {}
        for (number, token), running in list(self._running.items()):
            is_changed = states.get(number, ("running", token)) != ("running", token)
            if is_changed or not await self._owners.is_good(running.owner):
                running.stop()

    async def _claim(self) -> None:
        info = self._app.state.engine.info
        is_on_cpu = info is None or info.device == "cpu"
        at_once = (JOBS_AT_ONCE if is_on_cpu else JOBS_AT_ONCE_ON_GPU) * self._admission.images.num_engines
        while len(self._running) < 2 * at_once and not any(running.is_alone for running in self._running.values()):
            # a second half of the places is for keys without running jobs, so that none waits for long jobs of others
            facts = {"is_idle": not self._running, "is_full": len(self._running) >= at_once}
            job = await run_to_end(self._jobs.claim, self._holder, **facts)
            if job is None:
                return
            task = asyncio.create_task(self._run(job), name=f"job {job.number}")
            self._running[job.number, job.token] = _RunningJob(task, job.owner, is_alone=job.losses > 0)
            task.add_done_callback(partial(self._forget, job))
            self.wake()

    def _forget(self, job: Job, _: asyncio.Task[None]) -> None:
        ticket = self._running.pop((job.number, job.token)).ticket
        total_s = None if ticket is None else ticket.total_s
        if total_s is not None:
            self._seconds_of_finished.append(total_s)
        self.wake()

    async def _run(self, job: Job) -> None:
        """Run a leased job; when the server drains, it returns to the queue."""
        facts = {"job": job.id, "endpoint": job.endpoint}
        try:
            await yield_to_interactive(self._admission)
            await self._finish(job)
            log.info("job finished", extra=facts)
        except EngineUnavailable as error:
            log.error("a job lost its engine", extra=facts | {"reason": error.code})
            await self._store(job, self._jobs.release, job, is_engine_lost=True)
        except asyncio.CancelledError:
            with suppress(OSError, StoreError):
                is_drained = await run_to_end(self._jobs.drain, job)
                if not is_drained:  # the client has cancelled or paused it
                    await run_to_end(self._jobs.remove_unneeded_of, job)
            raise
        except (OSError, StoreError) as error:
            log_failure(log, "a job waits", error, **facts)
            await asyncio.sleep(MAX_RETRY_S)
            await self._store(job, self._jobs.drain, job)
        except Exception:
            log.exception("a job failed", extra=facts)
            reason = "internal_error: internal server error."
            await self._store(job, self._jobs.finish, job, "failed", None, reason)

    async def _store(self, job: Job, change: Callable[..., bool], *arguments: Any, **keywords: Any) -> bool:
        """Call ``change``, again after errors of disk or database, so that a finished job is not run again."""
        while True:
            try:
                return await run_to_end(change, *arguments, **keywords)
            except (OSError, StoreError) as error:
                log_failure(log, "a job waits until it can be stored", error, job=job.id)
                await asyncio.sleep(MAX_RETRY_S)

    def _captures_of(self, job: Job) -> CaptureFiles:
        return CaptureFiles(self._jobs.folder, f"{job.number}-{CAPTURE}")

    async def _finish(self, job: Job) -> None:
        if not await self._owners.is_good(job.owner):
            error = "invalid_key: its API key is not valid any more."
            await self._store(job, self._jobs.finish, job, "failed", None, error)
            return
        if job.endpoint not in self._endpoints:
            error = f"unknown_endpoint: {job.endpoint} is not supported any more."
            await self._store(job, self._jobs.finish, job, "failed", None, error)
            return
        answer, captures = await self._answer(job)
        status, error = ("succeeded", "") if answer.status < 400 else ("failed", _error_of(answer))
        if await self._store(job, self._jobs.finish, job, status, (answer.status, answer.body), error):
            await captures.remove()

    async def _answer(self, job: Job) -> tuple[Answered, CaptureFiles]:
        """Return the response to a job, whose images continue from their captured states; full queues are retried.

        The captured states are needed until the response is stored.

        Raises:
            EngineUnavailable: The engine was lost during the work.
        """
        request_id = ""
        captures = self._captures_of(job)
        body = (await LISTINGS.run(self._jobs.body, job)).encode()

        async def work() -> Answered:
            nonlocal request_id, captures
            base_url = job.output.get("base_url", "")
            request = request_of(self._app, job.endpoint, body, job.owner, base_url)
            self._running[job.number, job.token].request = request
            request_id = request.state.request_id
            request.state.captures = captures = self._captures_of(job)
            answer = await self._endpoints[job.endpoint](request)
            return Answered(answer.status_code, request_id, bytes(answer.body))

        try:
            answer = await until_served(self._app.state.engine, work, max_losses=1)
        except (EngineUnavailable, asyncio.CancelledError):
            await captures.settle()
            raise
        except Exception as error:
            if not isinstance(error, DiffserveError):
                log_failure(log, "a job failed", error, request_id=request_id)
            answer = error_answer(error, request_id)
        return answer, captures


@asynccontextmanager
async def _holding(folder: Path, holder: str) -> AsyncIterator[None]:
    """Hold the lock file of the process ``holder`` for the block; while it is locked, no process reclaims the jobs."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    new, path = folder / f"{holder}.new", folder / f"{holder}.lock"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(path)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _holders(folder: Path) -> set[str]:
    """Return the names of the processes that hold a lock, and remove the lock files of ended processes."""
    alive = set()
    for path in folder.glob("*.lock"):
        with suppress(FileNotFoundError), path.open("r+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                alive.add(path.stem)
    return alive


class _ErrorObject(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorObject = msgspec.field(default_factory=_ErrorObject)


def _error_of(answer: Answered) -> str:
    """Return code and message of an error response."""
    try:
        error = msgspec.json.decode(answer.body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        error = _ErrorObject()
    return f"{error.code or 'error'}: {error.message or f'the answer has the status {answer.status}.'}"

"""One engine process, from its birth to its death, seen from asyncio.

The process inherits one end of a socket pair: nothing is bound in the file system or on the network, and whoever dies
first is noticed by the other as the end of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import psutil

from diffserve.api import ipc
from diffserve.api.engine_stats import EngineStats
from diffserve.api.errors import (
    DeadlineUnreachable,
    DiffserveError,
    EngineUnavailable,
    InvalidRequest,
    ModelLoadError,
    QueueFull,
)
from diffserve.api.types import Progress, ServedModel
from diffserve.processes.wait_policy import bound_spinning
from diffserve.service.engine.engines import END_OF_JOB, Job
from diffserve.service.engine.output import EngineOutput
from diffserve.service.http.errors import ABOUT_SERVER, OUR_MISTAKE
from diffserve.service.metrics import Metrics

ENGINE_MODULE = "diffserve.engine.process"
READ_BYTES = 1 << 18
LEAST_WORK_S = 0.1
MALLOC_ARENAS = "2"
"""Heaps of glibc in an engine; it would make eight for every core, and none gives the others what it has free."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DIFFUSERS_DISABLE_REMOTE_CODE": "1"}
Answer = ipc.Pong | ipc.Trace | ipc.Stats


class ProcessWork(NamedTuple):
    """What a process has done so far."""

    computed_s: float = 0.0
    read_bytes: int = 0

    def goes_on_since(self, before: ProcessWork) -> bool:
        """Whether it has done more by now than threads do that wait for one another."""
        return self.computed_s - before.computed_s >= LEAST_WORK_S or self.read_bytes > before.read_bytes


class Loss(NamedTuple):
    """Why an engine is gone: ``kind`` is one of device, hang, silence and crash, ``reason`` is for the log."""

    kind: str
    reason: str


class EngineConnection:
    """A running engine process.

    ready    what it loaded, once it can paint, or a ModelLoadError
    closed   set once the process is gone; every job has ended by then
    lost     resolves to why nothing that it holds will be finished, as soon as that is known; its process may linger
    metrics  told of every event, and of every request that the engine refuses
    load_s   seconds from when it was told what to load to ready, 0 before
    on_models    called with the models of every report that names them
    on_building  called when the engine compiles before it is ready, with the most seconds that this may take
    has_built    whether it did; its load time says little about the next one then

    A process that nobody told what to load waits, its libraries imported: a spare.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        metrics: Metrics,
        output: EngineOutput,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[ipc.Ready] = loop.create_future()
        self.ready.add_done_callback(asyncio.Future.exception)  # no complaint when nobody asks any more
        self.closed = asyncio.Event()
        self.lost: asyncio.Future[Loss] = loop.create_future()
        self.load_s = 0.0
        self._told_s = 0.0
        self.on_building: Callable[[float], None] = lambda _: None
        self.has_built = False
        self.on_models: Callable[[tuple[ServedModel, ...]], None] = lambda _: None
        self._is_leaving = False
        self._metrics = metrics
        self._output = output
        self._process = process
        self._reader = reader
        self._writer = writer
        self.models: tuple[ServedModel, ...] = ()
        self._jobs: dict[str, Job[Any]] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count()
        self._reading = asyncio.create_task(self._read(), name="engine reports")

    @classmethod
    async def start(cls, metrics: Metrics) -> EngineConnection:
        """Start a process. OSError where there is none to be had."""
        environment = os.environ | _OFFLINE
        bound_spinning(environment)
        environment.setdefault("MALLOC_ARENA_MAX", MALLOC_ARENAS)
        ours, theirs = socket.socketpair()
        with theirs, EngineOutput() as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", ENGINE_MODULE, "--fd", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.end,  # whatever a library prints belongs into the log
                stderr=output.end,
                env=environment,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer, metrics, output)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code once it has ended; minus the signal's number when a signal ended it."""
        return self._process.returncode

    def load(self, load: ipc.Load) -> None:
        """Tell it, once, what to load; ``ready`` tells the rest."""
        self._told_s = asyncio.get_running_loop().time()
        self._send(load)

    def take(self, job: Job[Any]) -> None:
        """Hand the request of ``job`` over, and feed it. EngineUnavailable where the process is gone."""
        if self.lost.done():
            raise self._gone()
        request = cast(ipc.AnyRequest, job.request)
        data = ipc.frame(ipc.Submit(request=request))  # before it is in the books: may be refused
        self._jobs[job.request_id] = job
        self._write(data)

    def cancel(self, request_id: str) -> None:
        """Give a request up, if it is not over; its place is free at the engine's next step."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.record_cancel(self._metrics)
            self._send(ipc.Cancel(request_id=request_id))

    def interrupt(self, request_id: str) -> None:
        """End a request for images early, if it is not over, with the unfinished pictures."""
        if request_id in self._jobs:
            self._jobs[request_id].was_interrupted = True
            self._send(ipc.Interrupt(request_id=request_id))

    def retry_load(self, name: str) -> None:
        """Have the engine look at the files of a model that it could not read."""
        self._send(ipc.LookAgain(name=name))

    def work(self) -> ProcessWork:
        """What its process has done so far, as far as the system says."""
        computed_s, read_bytes = 0.0, 0
        with contextlib.suppress(psutil.Error, OSError, AttributeError):  # the last: nobody counts reads here
            process = psutil.Process(self.pid)
            spent = process.cpu_times()
            computed_s = spent.user + spent.system
            read_bytes = process.io_counters().read_bytes
        return ProcessWork(computed_s, read_bytes)

    async def ping(self) -> ipc.Pong:
        """How the engine gets on. EngineUnavailable where it is gone; waits for ever while it is silent."""
        answer = await self._ask(ipc.Ping)
        assert isinstance(answer, ipc.Pong)
        return answer

    async def trace(self) -> list[list[str]]:
        """Per recent UNet call, the request id of every row."""
        answer = await self._ask(ipc.ReadTrace)
        return answer.unet_calls if isinstance(answer, ipc.Trace) else []

    async def stats(self) -> EngineStats | None:
        """The engine's numbers as of a moment ago; None before its first tick."""
        answer = await self._ask(ipc.ReadStats)
        return answer.stats if isinstance(answer, ipc.Stats) else None

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the process: close the socket, which it obeys, and kill it where it does not within ``grace_s``."""
        self._is_leaving = True
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        await self.closed.wait()

    def abandon(self, loss: Loss) -> None:
        """End every job now, then the process, which may take its time: one that hangs in a driver cannot be killed."""
        self._lose(loss)
        self.kill()

    def kill(self) -> None:
        """End the process at once.

        By its number: ``Process.kill`` would look whether it has ended, and what it had ended with would be lost.
        """
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGKILL)

    def _send(self, command: ipc.Command) -> None:
        self._write(ipc.frame(command))

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _ask(self, kind: type[ipc.Ping | ipc.ReadTrace | ipc.ReadStats]) -> Answer:
        if self.lost.done():
            raise self._gone()
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(kind(number=number))
            return await answer
        finally:
            self._answers.pop(number, None)

    async def _read(self) -> None:
        """Give every report to whom it concerns, until the stream ends; then end everything that still waits."""
        try:
            frames = ipc.FrameReader()
            while data := await self._reader.read(READ_BYTES):
                for body in frames.feed(data):
                    self._dispatch(ipc.decode_report(body))
        except ConnectionError:
            pass
        finally:
            await self._finish()

    def _dispatch(self, report: ipc.Report) -> None:
        match report:
            case Progress(request_id=request_id):  # first, being most of them, and no end of anything
                job = self._jobs.get(request_id)
                if job is not None:
                    self._metrics.observe(job.kind, report)
                    job.wasted_steps(report)  # counts the step; none is wasted yet
                    job.feed(report)
            case ipc.Ready():
                self.load_s = asyncio.get_running_loop().time() - self._told_s
                self.models = report.models
                self.on_models(report.models)
                self.ready.set_result(report)
            case ipc.NewModels():
                self.models = report.models
                self.on_models(report.models)
            case ipc.Building():
                self.has_built = True
                self.on_building(report.timeout_s)
            case ipc.Lost():
                self._lose(Loss("device", report.reason))
            case ipc.LoadFailed():
                self.ready.set_exception(ModelLoadError(report.message, code=report.code))
            case ipc.Pong() | ipc.Trace() | ipc.Stats():
                answer = self._answers.get(report.number)
                if answer is not None and not answer.done():
                    answer.set_result(report)
            case ipc.Rejected():
                self._feed(report.request_id, refusal_in(report))
            case _:
                self._feed(report.request_id, report)

    def _feed(self, request_id: str, event: ipc.AnyEvent | DiffserveError) -> None:
        is_last = isinstance(event, END_OF_JOB)
        job = self._jobs.pop(request_id, None) if is_last else self._jobs.get(request_id)
        if job is not None:  # else it was cancelled here and nobody reads it
            job.record(event, self._metrics)
            job.feed(event)

    def _lose(self, loss: Loss) -> None:
        """Nothing comes of what is inside: tell everybody at once."""
        if self.lost.done():
            return
        self.lost.set_result(loss)
        for request_id in list(self._jobs):
            self._feed(request_id, self._gone())
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._gone())

    def _gone(self) -> EngineUnavailable:
        if self._is_leaving:
            return EngineUnavailable("the server stopped before this was finished; please try again in a moment.")
        return EngineUnavailable(
            "the engine stopped before this was finished; it is being restarted, please try again.",
            retry_after_s=self.load_s or None,
        )

    async def _finish(self) -> None:
        self._lose(Loss("crash", "the process ended"))
        self.kill()
        await self._process.wait()
        await self._output.wait_until_read()
        self._writer.close()
        if not self.ready.done():
            how = f"ended with exit code {self.exit_code}"
            if self.lost.result().kind == "silence":
                how = f"was ended, after {self.lost.result().reason},"
            self.ready.set_exception(ModelLoadError(f"the engine process {how} while it loaded the model."))
        self.closed.set()


def refusal_in(report: ipc.Rejected) -> DiffserveError:
    """The error that ``report`` stands for."""
    if report.code == DeadlineUnreachable.default_code:
        predicted_s, retry_after_s = report.predicted_s, report.retry_after_s
        return DeadlineUnreachable(report.message, predicted_s=predicted_s, retry_after_s=retry_after_s)
    if report.retry_after_s is not None:
        return QueueFull(report.message, retry_after_s=report.retry_after_s)
    known = ABOUT_SERVER.get(report.code)
    if known is not None:
        return known(report.message)
    if report.code == DiffserveError.default_code:
        return DiffserveError(OUR_MISTAKE)
    return InvalidRequest(report.message, param=report.param, code=report.code)

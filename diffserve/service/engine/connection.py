"""Connection to one engine process over a socket pair.

The process inherits one end of the pair: nothing is bound in the file system or on the network, and each side notices
the end of the other as the end of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self, TypeVar, cast

import msgspec
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
from diffserve.logs import Lines, pass_on
from diffserve.processes import bound_spinning, limit_arenas
from diffserve.service.engine.engines import END_OF_JOB, Job
from diffserve.service.http.errors import ABOUT_SERVER, OUR_MISTAKE
from diffserve.service.metrics import Metrics

ENGINE_MODULE = "diffserve.engine.process"
READ_BYTES = 1 << 18
LEAST_WORK_S = 0.1
"""Heaps of glibc in an engine: the default is eight per core, and free memory of one is not used by the others."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DIFFUSERS_DISABLE_REMOTE_CODE": "1"}
A = TypeVar("A", ipc.Pong, ipc.Trace, ipc.Stats)


class ProcessWork(NamedTuple):
    """CPU time and bytes read of a process."""

    computed_s: float = 0.0
    read_bytes: int = 0

    def goes_on_since(self, before: ProcessWork) -> bool:
        """Return whether it has worked since ``before``, more than waiting threads do."""
        return self.computed_s - before.computed_s >= LEAST_WORK_S or self.read_bytes > before.read_bytes


class Loss(NamedTuple):
    """Reason of a loss: ``kind`` is device, hang, silence or crash; ``reason`` is for the log."""

    kind: str
    reason: str


class EngineConnection:
    """A running engine process; one without a ``load`` command waits with imported libraries, as a spare.

    Attributes:
        ready: Future with what the engine loaded, or a ModelLoadError.
        closed: Set when the process has ended; every job has ended by then.
        lost: Future with the reason why the jobs are lost; the process may end later.
        load_s: Seconds from the load command until ready, 0 before.
        on_models: Called with the models of every report that lists them.
        on_building: Called when the engine compiles before it is ready, with the maximum seconds that this may take.
        has_built: Whether it compiled, so that its load time does not predict the next one.
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
        self.ready.add_done_callback(asyncio.Future.exception)  # marks an exception as retrieved
        self.closed = asyncio.Event()
        self.lost: asyncio.Future[Loss] = loop.create_future()
        self.load_s = 0.0
        self._load_sent_s = 0.0
        self.on_building: Callable[[float], None] = lambda _: None
        self.has_built = False
        self.on_models: Callable[[tuple[ServedModel, ...]], None] = lambda _: None
        self._is_stopping = False
        self._metrics = metrics
        self._output = output
        self._process = process
        self._reader = reader
        self._writer = writer
        self.models: tuple[ServedModel, ...] = ()
        self._jobs: dict[str, Job[Any]] = {}
        self._answers: dict[int, asyncio.Future[ipc.Pong | ipc.Trace | ipc.Stats]] = {}
        self._numbers = itertools.count()
        self._reading = asyncio.create_task(self._read(), name="engine reports")

    @classmethod
    async def start(cls, metrics: Metrics) -> EngineConnection:
        """Start a process; raise OSError if that is impossible."""
        environment = os.environ | _OFFLINE
        bound_spinning(environment)
        limit_arenas(environment)
        server_end, engine_end = socket.socketpair()
        with engine_end, EngineOutput() as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", ENGINE_MODULE, "--fd", str(engine_end.fileno())),
                pass_fds=(engine_end.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.end,  # output of libraries belongs in the log
                stderr=output.end,
                env=environment,
            )
        reader, writer = await asyncio.open_unix_connection(sock=server_end)
        return cls(process, reader, writer, metrics, output)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code after the end, negative for a signal."""
        return self._process.returncode

    def load(self, load: ipc.Load) -> None:
        """Send the load command, once; ``ready`` has the result."""
        self._load_sent_s = asyncio.get_running_loop().time()
        self._send(load)

    def take(self, job: Job[Any]) -> None:
        """Start the request of ``job`` and feed it its events; raise EngineUnavailable if the process is lost."""
        if self.lost.done():
            raise self._unavailable_error()
        data = ipc.frame(cast(ipc.AnyRequest, job.request))  # may raise, so before the job is stored
        self._jobs[job.request_id] = job
        self._write(data)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its slot is free at the engine's next step. Ignored if it has ended."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.record_cancel(self._metrics)
            self._send(ipc.Cancel(request_id=request_id))

    def interrupt(self, request_id: str) -> None:
        """End an image request early with its unfinished images; ignored if it has ended."""
        if request_id in self._jobs:
            self._jobs[request_id].was_interrupted = True
            self._send(ipc.Interrupt(request_id=request_id))

    def retry_load(self, name: str) -> None:
        """Read the files of a model that failed to load again."""
        self._send(ipc.LookAgain(name=name))

    def work(self) -> ProcessWork:
        """Return the work of the process so far, as far as the system reports it."""
        computed_s, read_bytes = 0.0, 0
        with contextlib.suppress(psutil.Error, OSError, AttributeError):  # AttributeError: no read counts
            process = psutil.Process(self.pid)
            spent = process.cpu_times()
            computed_s = spent.user + spent.system
            read_bytes = process.io_counters().read_bytes
        return ProcessWork(computed_s, read_bytes)

    async def ping(self) -> ipc.Pong:
        """Return the engine's progress; wait while it is silent, raise EngineUnavailable if it is lost."""
        return await self._ask(ipc.Ping, ipc.Pong)

    async def trace(self) -> list[list[str]]:
        """Return the request id of every row of the recent UNet calls."""
        return (await self._ask(ipc.ReadTrace, ipc.Trace)).unet_calls

    async def stats(self) -> EngineStats | None:
        """Return the engine's statistics; ``None`` before its first tick."""
        return (await self._ask(ipc.ReadStats, ipc.Stats)).stats

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the process by closing the socket; kill it if it has not ended after ``grace_s``."""
        self._is_stopping = True
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        await self.closed.wait()

    def abandon(self, loss: Loss) -> None:
        """End every job now and kill the process, which may not end if it hangs in a driver."""
        self._lose(loss)
        self.kill()

    def kill(self) -> None:
        """Kill the process.

        By its id: ``Process.kill`` would poll the process, and its exit code would be lost.
        """
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGKILL)

    def _send(self, command: ipc.Command) -> None:
        self._write(ipc.frame(command))

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _ask(self, kind: type[ipc.Ping | ipc.ReadTrace | ipc.ReadStats], answer_type: type[A]) -> A:
        if self.lost.done():
            raise self._unavailable_error()
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(kind(number=number))
            answer = await future
            assert isinstance(answer, answer_type)
            return answer
        finally:
            self._answers.pop(number, None)

    async def _read(self) -> None:
        """Dispatch reports until the stream ends, then end all jobs and questions."""
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
            case Progress(request_id=request_id):  # first: most reports are of this type
                job = self._jobs.get(request_id)
                if job is not None:
                    self._metrics.observe(job.kind, report)
                    job.wasted_steps(report)  # counts the step; none is wasted yet
                    job.feed(report)
            case ipc.Ready():
                self.load_s = asyncio.get_running_loop().time() - self._load_sent_s
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
        if job is not None:  # else it was cancelled here
            job.record(event, self._metrics)
            job.feed(event)

    def _lose(self, loss: Loss) -> None:
        """End all jobs and questions with EngineUnavailable."""
        if self.lost.done():
            return
        self.lost.set_result(loss)
        for request_id in list(self._jobs):
            self._feed(request_id, self._unavailable_error())
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._unavailable_error())

    def _unavailable_error(self) -> EngineUnavailable:
        if self._is_stopping:
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
    """Return the error that ``report`` describes."""
    if report.code == DeadlineUnreachable.default_code:
        predicted_s, retry_after_s = report.predicted_s, report.retry_after_s
        return DeadlineUnreachable(report.message, predicted_s=predicted_s, retry_after_s=retry_after_s)
    if report.retry_after_s is not None:
        return QueueFull(report.message, retry_after_s=report.retry_after_s)
    error_type = ABOUT_SERVER.get(report.code)
    if error_type is not None:
        return error_type(report.message)
    if report.code == DiffserveError.default_code:
        return DiffserveError(OUR_MISTAKE)
    return InvalidRequest(report.message, param=report.param, code=report.code)


MAX_LINE_BYTES: Final = 256 * 1024

log = logging.getLogger("engine")


class EngineOutput:
    """A pipe whose ``end`` is the process's standard output and standard error.

    Log records, which are JSON lines, pass unchanged; other output (of C libraries, of a crash) is logged line by line.
    """

    def __init__(self) -> None:
        self._read_end, self.end = os.pipe()
        self._lines = Lines(sys.stderr, log)
        self._reading = asyncio.create_task(self._read(), name="engine output")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close this process's copy of ``end``."""
        os.close(self.end)

    async def wait_until_read(self, patience_s: float = 1.0) -> None:
        """Wait until the output of an ended process is read; a grandchild may keep the pipe open for longer."""
        await asyncio.wait({self._reading}, timeout=patience_s)
        self._reading.cancel()

    async def _read(self) -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._read_end, "rb", buffering=0)
        )
        try:
            while True:
                try:
                    line = await reader.readuntil(b"\n")
                except asyncio.IncompleteReadError as error:
                    self._log_line(error.partial)
                    return
                except asyncio.LimitOverrunError as overrun:
                    line = await reader.readexactly(overrun.consumed)
                self._log_line(line)
        finally:
            transport.close()

    def _log_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r\n")
        if _is_record(line):
            pass_on(text, log)
        elif text.strip():
            self._lines.write(f"{text}\n")


def _is_record(line: bytes) -> bool:
    """Return whether ``line`` is a record that ``logs`` wrote."""
    if not line.startswith(b'{"ts":'):
        return False
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except msgspec.MsgspecError:
        return False

"""Experiment runner: a process for each running experiment, whose images have the lowest priority.

One process per data folder runs experiments, selected by a file lock. The process of an experiment measures and stores
its images; see ``diffserve.experiments.served``. An experiment that was interrupted by the end of the server is
continued by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import msgspec

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.types import Failed, GenerationRequest, ImageFailed, ImageFinished, ImageResult
from diffserve.experiments.plan import SweepPlan
from diffserve.experiments.served.messages import (
    Advanced,
    Begin,
    CellDone,
    FromProcess,
    NotPainted,
    Over,
    Paint,
    Painted,
    ToProcess,
)
from diffserve.logs import reason_of
from diffserve.processes import HEADER, frame_of
from diffserve.service.admission import BATCH, work_of
from diffserve.service.endpoint import ServiceContext
from diffserve.service.engine.connection import EngineOutput
from diffserve.service.http.errors import error_of, log_failure, reply_to
from diffserve.service.models import find_model
from diffserve.service.safety import Safety
from diffserve.service.stored.background import (
    LOOK_EVERY_S,
    MAX_RETRY_S,
    folder_lock,
    run_to_end,
    until_served,
    yield_to_interactive,
)
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import ANSWERS, FILES, LISTINGS
from diffserve.store.errors import StoreError
from diffserve.store.experiments import Experiment, Experiments

MODULE: Final = "diffserve.experiments.served.process"
RUNNING_AT_ONCE: Final = 2
"""Experiments that run at a time, at most one of each key."""

IMAGES_AT_ONCE: Final = 16
"""Images of an experiment that are generated at a time: enough to fill a batch."""

SWEEP_EVERY_S: Final = 3600.0
MAX_CRASHES: Final = 3
"""Number of crashes of its process after which an experiment fails."""

CELLS_FILE: Final = "finished-cells.json"
"""Finished cells of an experiment that was cancelled or failed."""

log = logging.getLogger("diffserve.experiments")


class CrashError(Exception):
    """The process of an experiment ended without a result."""


class LiveExperiment:
    """State of a running experiment, for the API.

    Attributes:
        progress: The latest progress, None before the first.
        begun_s: When its process was started, by the monotonic clock.
        cells: The finished cells by name, in the order of completion.
        version: A counter that grows with every change.
    """

    def __init__(self) -> None:
        self.progress: Advanced | None = None
        self.begun_s = time.monotonic()
        self.cells: dict[str, CellDone] = {}
        self.version = 0

    def take(self, message: Advanced | CellDone) -> None:
        """Record a message of the process."""
        if isinstance(message, CellDone):
            self.cells.pop(message.cell.cell.slug, None)
            self.cells[message.cell.cell.slug] = message
        else:
            self.progress = message
        self.version += 1

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the progress so far; None too early."""
        progress = self.progress
        if progress is None or progress.rows_done < 0.1 * progress.num_rows:
            return None
        elapsed_s = time.monotonic() - self.begun_s
        return elapsed_s * (progress.num_rows / progress.rows_done - 1)


class ExperimentRunner:
    """Runs ``experiments``; ``safety`` judges their images, if there is a filter."""

    def __init__(
        self, context: ServiceContext, experiments: Experiments, owners: Owners, safety: Safety | None
    ) -> None:
        self._engine, self._admission = context.engine, context.admission
        self._experiments = experiments
        self._owners = owners
        self._safety = safety
        self._wakeup = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._keys: dict[str, str] = {}  # owner, by the ID of a running experiment
        self._crashes: dict[str, int] = {}
        self.live: dict[str, LiveExperiment] = {}
        self.is_stopping = False

    def wake(self) -> None:
        """Look for new experiments now."""
        self._wakeup.set()

    def stop(self, name: str) -> None:
        """End the process of the experiment with ID ``name``."""
        if name in self._tasks:
            self._tasks[name].cancel()
        self.wake()

    async def run_for_ever(self) -> None:
        """Run unfinished and new experiments until cancelled."""
        try:
            async with folder_lock(self._experiments.folder.parent / "experiments.lock", "experiments", log):
                await self._run_all()
        finally:
            self.is_stopping = True

    async def _run_all(self) -> None:
        swept_s = -SWEEP_EVERY_S
        try:
            while True:
                self._wakeup.clear()
                try:
                    if time.monotonic() - swept_s >= SWEEP_EVERY_S:
                        swept_s = time.monotonic()
                        await FILES.run(self._experiments.sweep)
                    for experiment in await LISTINGS.run(self._experiments.unfinished):
                        self._start(experiment)
                except (OSError, StoreError) as error:
                    log_failure(log, "experiments cannot be read", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._wakeup.wait()
        finally:
            running = list(self._tasks.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _start(self, experiment: Experiment) -> None:
        """Start an experiment if it is its turn; one that is to be cancelled needs none."""
        name, owner = experiment.id, experiment.owner
        has_turn = len(self._tasks) < RUNNING_AT_ONCE and owner not in self._keys.values()
        if name not in self._tasks and (has_turn or experiment.status == "cancelling"):
            task = self._tasks[name] = asyncio.create_task(self._run(experiment))
            self._keys[name] = owner
            task.add_done_callback(partial(self._forget, name))

    def _forget(self, name: str, _: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        self._keys.pop(name, None)
        self.wake()

    async def _run(self, experiment: Experiment) -> None:
        """Run an experiment to its end; after errors of disk or database it is resumed later."""
        facts = {"experiment": experiment.id, "num_images": experiment.num_images}
        try:
            result = await self._advance(experiment)
            if result is not None:
                await self._finish(experiment, *result)
                log.info("experiment finished", extra=facts | {"status": result[0]})
        except (OSError, StoreError, CrashError) as error:
            log.error("an experiment waits", extra=facts | {"reason": reason_of(str(error) or type(error).__name__)})
            await asyncio.sleep(MAX_RETRY_S)
        except Exception:
            log.exception("an experiment failed", extra=facts)
            await self._finish(experiment, "failed", "internal_error: internal server error.")

    async def _finish(self, experiment: Experiment, status: str, error: str) -> None:
        live = self.live.get(experiment.id)
        if live is not None and status != "completed":
            await run_to_end(self._keep_cells, experiment, live)
        await run_to_end(self._experiments.move, experiment.id, status, error=error)
        self.live.pop(experiment.id, None)
        self._crashes.pop(experiment.id, None)

    def _keep_cells(self, experiment: Experiment, live: LiveExperiment) -> None:
        """Store the finished cells of an experiment that has no report."""
        with suppress(OSError):
            file = self._experiments.path(experiment.id) / CELLS_FILE
            file.write_bytes(msgspec.json.encode(list(live.cells.values())))

    async def _advance(self, experiment: Experiment) -> tuple[str, str] | None:
        """Run the process; return the final status and the reason if it failed, or None if the experiment has ended."""
        if experiment.status == "cancelling":
            return "cancelled", ""
        if not await self._owners.is_good(experiment.owner):
            return "failed", "invalid_key: its API key is not valid any more."
        while not self._engine.is_ready:
            await asyncio.sleep(LOOK_EVERY_S)
        try:
            begin = self._begin(experiment)
        except DiffserveError as error:  # the server has another model now
            return "failed", f"{error.code}: {error.message}"
        moved = await run_to_end(self._experiments.move, experiment.id, "in_progress", of=("validating",))
        if moved is None or moved.status not in ("in_progress", "finalizing"):
            return None
        live = self.live[experiment.id] = LiveExperiment()
        painting: set[asyncio.Task[None]] = set()
        async with ExperimentProcess.running(begin) as process:
            try:
                async for message in process:
                    if isinstance(message, Paint):
                        task = asyncio.create_task(self._paint(experiment, process, message.request))
                        painting.add(task)
                        task.add_done_callback(painting.discard)
                    elif isinstance(message, Over):
                        if not message.code:
                            return "completed", ""
                        log.error("an experiment ended", extra={"experiment": experiment.id, "reason": message.trace})
                        return "failed", f"{message.code}: {message.message}"
                    else:
                        if isinstance(message, Advanced) and message.phase == "reporting":
                            await run_to_end(self._experiments.move, experiment.id, "finalizing", of=("in_progress",))
                        live.take(message)
            finally:
                for task in painting:
                    task.cancel()
                await asyncio.gather(*painting, return_exceptions=True)
        self._crashes[experiment.id] = self._crashes.get(experiment.id, 0) + 1
        if self._crashes[experiment.id] >= MAX_CRASHES:
            return "failed", f"process_lost: its process ended {MAX_CRASHES} times; see the server's log."
        raise CrashError(f"its process ended with {process.exit_code}")

    def _begin(self, experiment: Experiment) -> Begin:
        """Return the first message to the process. Raises DiffserveError if the model is missing."""
        settings = self._engine.settings
        info = find_model(experiment.model, self._engine.models)
        profile = next((each for each in settings.models if each.model_id == info.model_id), settings.model)
        deterministic = settings.engine.deterministic
        return Begin(
            plan=msgspec.convert(experiment.plan, SweepPlan),
            folder=str(self._experiments.path(experiment.id)),
            info=info,
            profile=profile,
            is_deterministic=info.device.startswith("cpu") if deterministic == "auto" else deterministic,
            max_in_flight=IMAGES_AT_ONCE,
        )

    async def _paint(self, experiment: Experiment, process: ExperimentProcess, request: GenerationRequest) -> None:
        """Generate an image for the process and send it, or the error."""
        client, model = f"{BATCH}{experiment.owner}", experiment.model
        request = msgspec.structs.replace(request, priority="batch", client=client, model=model)
        try:
            process.send(Painted(result=await until_served(self._engine, partial(self._image, experiment, request))))
        except Exception as error:
            if not isinstance(error, DiffserveError):
                log_failure(log, "an image of an experiment failed", error, request_id=request.request_id)
            answer = msgspec.json.decode(reply_to(error).body)["error"]
            process.send(
                NotPainted(
                    request_id=request.request_id,
                    code=answer["code"] or answer["type"],
                    message=answer["message"],
                    param=answer["param"],
                )
            )

    async def _image(self, experiment: Experiment, request: GenerationRequest) -> ImageResult:
        """Return the image of ``request``, generated with the priority batch.

        Raises:
            DiffserveError: It cannot be generated, or the safety filter blocks it.
        """
        if not await self._owners.is_good(experiment.owner):
            raise InvalidRequest("the API key of the experiment is not valid any more.", code="invalid_key")
        await yield_to_interactive(self._admission)
        info = find_model(request.model, self._engine.models)
        cost = work_of(request, info, self._engine.info)
        result: ImageResult | None = None
        await self._admission.check_quota(request.client, request.num_images)
        with self._admission.images.entered(request.client, cost, priority="batch") as ticket:
            ticket.num_images = request.num_images
            async with self._engine.submit(request, ticket.watch, is_whole=True) as job:
                async for event in job:
                    if isinstance(event, ImageFailed):
                        raise error_of(Failed(request_id=event.request_id, code=event.code, message=event.message))
                    if isinstance(event, ImageFinished):
                        result = event.result
        if result is None:
            raise DiffserveError("the engine finished without an image.")
        if self._safety is not None:
            await ANSWERS.run(self._safety.check, result)
        return result


class ExperimentProcess:
    """A process that runs an experiment: an asynchronous iterator of its messages."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)

    @classmethod
    @asynccontextmanager
    async def running(cls, begin: Begin) -> AsyncIterator[ExperimentProcess]:
        """Start a process with its first message; it is killed at the end of the block. Raises OSError."""
        our_end, their_end = socket.socketpair()
        environment: dict[str, str] = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with their_end, EngineOutput() as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", MODULE, "--fd", str(their_end.fileno())),
                pass_fds=(their_end.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.end,
                stderr=output.end,
                env=environment,
            )
        reader, writer = await asyncio.open_unix_connection(sock=our_end)
        running = cls(process, reader, writer)
        try:
            running.send(begin)
            yield running
        finally:
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                if process.returncode is None:
                    os.kill(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())

    @property
    def exit_code(self) -> int | None:
        """Exit code after the end, negative for a signal."""
        return self._process.returncode

    def send(self, message: ToProcess) -> None:
        """Send a message; ignored after the end of the process."""
        if not self._writer.is_closing():
            self._writer.write(frame_of(msgspec.msgpack.encode(message)))

    async def __aiter__(self) -> AsyncIterator[FromProcess]:
        while True:
            try:
                head = await self._reader.readexactly(HEADER.size)
                body = await self._reader.readexactly(HEADER.unpack(head)[0])
            except (asyncio.IncompleteReadError, OSError):
                return
            yield self._decoder.decode(body)

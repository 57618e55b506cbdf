"""Client of one engine process, which is supervised and restarted when it is lost.

    starting --ready--> up --lost--> waiting (0 s, 0.5 s, 1 s, 2 s, ...) --> starting

After a load error at the first start, or ``MAX_LOSSES`` losses within ``LOSS_WINDOW_S``, it is not restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from diffserve.api import ipc
from diffserve.api.engine_stats import EngineStats
from diffserve.api.errors import DiffserveError, EngineUnavailable, ModelLoadError
from diffserve.api.text_types import LanguageModelInfo
from diffserve.api.types import Asks, ModelInfo, ServedModel
from diffserve.disk_cache import DiskCache
from diffserve.service.engine.connection import EngineConnection, Loss
from diffserve.service.engine.engines import Job, OnCapture, Watch, capturing, refuse_unready
from diffserve.service.metrics import Metrics
from diffserve.service.threads import LISTINGS
from diffserve.settings.config import Settings
from diffserve.store.unet_paths import UNetPathFile

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MAX_LOSSES = 5
LOSS_WINDOW_S = 300.0
HEALTHY_S = 60.0  # the count of losses restarts after so long without a loss
LONGEST_OVERDUE_S = 30.0
PING_EVERY_S = 2.0
SILENT_AFTER_S = 10.0  # not ready after so long without a pong
SPARE_AFTER_S = 10.0  # delay before a spare starts, so that the engine starts undisturbed
LOADING_ANSWERS_S = 30.0  # least patience with an engine that loads: libraries block it for seconds
SPARE_ANSWERS_S = 2.0  # a spare that does not answer in this time is stuck
SPARE_STARTS_S = 15.0  # a younger spare still imports its libraries and may take longer
LINGER_S = 5.0  # wait for a killed process, at most: one that hangs in a driver never ends
USUAL_LOAD_S = 10.0  # default without a measurement
LOAD_TIMES = "load-seconds"

E = TypeVar("E")

log = logging.getLogger("diffserve.engine")


class EngineClient:
    """Supervises an engine process and hands requests to it: see ``Engines`` and ``Replica``.

    An engine is lost when its process ends or reports its device as lost, when a tick takes too long, or when it is
    silent for ``[serve] hang_after_s``; while it loads, silence counts only if the process neither computes nor reads.
    With ``[serve] spare_engine`` a second process with imported libraries is ready to take its place.

    Attributes:
        paths: Store of the UNet paths that every engine gets.
        silent_s: Seconds without an answer, counted while this process listens: a blocked event loop proves nothing.
    """

    def __init__(self, settings: Settings, *, metrics: Metrics | None = None, name: str = "") -> None:
        """Create a client; in a pool, ``metrics`` are shared and ``name`` identifies the engine."""
        self.settings = settings
        self.name = name
        self._of = {"member": name} if name else {}  # for the log
        self.info: ModelInfo | None = None
        self.text_info: LanguageModelInfo | None = None
        self._known_models: tuple[ServedModel, ...] = ()
        self.metrics = metrics or Metrics()
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        self._hang_after_s = settings.serve.hang_after_s
        self._load = ipc.Load(
            model=settings.model,
            engine=settings.engine,
            text=settings.text,
            hang_after_s=self._hang_after_s,
            models=settings.models,
            unload_after_s=settings.serve.unload_after_s,
        )
        self.paths = UNetPathFile(Path(settings.serve.data_dir).expanduser())
        self._load_times = LoadTimes(settings)
        self._ready_at_s = 0.0  # when it should be
        self._startup_timeout_s = settings.serve.startup_timeout_s
        self._connection: EngineConnection | None = None
        self._spare: EngineConnection | None = None
        self._spare_since_s = 0.0
        self._has_spare = settings.serve.spare_engine
        self._is_up = False
        self.silent_s = 0.0
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._supervising: asyncio.Task[None] | None = None
        if metrics is None:
            watch_engines(self.metrics, [self])

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Image models that requests may name, the default one first; empty until the first engine is ready."""
        return self._known_models if self._connection is None else self._connection.models or self._known_models

    @property
    def engine_id(self) -> int | None:
        """Process id of the engine, also while it loads or after it was lost; ``None`` before the first."""
        return None if self._connection is None else self._connection.pid

    @property
    def load_s(self) -> float | None:
        """Seconds that the engine took to load, 0 while it loads; ``None`` before the first."""
        return None if self._connection is None else self._connection.load_s

    @property
    def is_expected(self) -> bool:
        """Whether its failure counts as one of its pool, which is always so."""
        return True

    @property
    def is_ready(self) -> bool:
        """Whether the engine would start a request now."""
        connection = self._connection
        is_up = self._is_up and connection is not None and not connection.lost.done()
        return is_up and self.silent_s < SILENT_AFTER_S

    @property
    def num_ready(self) -> int:
        """Number of engines that are ready, 1 or 0."""
        return int(self.is_ready)

    @property
    def retry_after_s(self) -> float:
        """Expected seconds until the engine is ready, at least 1, based on the last load time.

        An engine that is overdue is expected to need the overdue time once more, up to ``LONGEST_OVERDUE_S``.
        """
        left_s = self._ready_at_s - self._now()
        return max(1.0, left_s, min(-left_s, LONGEST_OVERDUE_S))

    def require_ready(self) -> None:
        """Raise EngineUnavailable, with the time for a retry, if the engine is not ready."""
        refuse_unready(self)

    def start(self) -> None:
        """Start the first engine and supervise it."""
        self._ready_at_s = self._now() + self._load_times.expected_s(spare=self._has_live_spare)
        self._supervising = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def stop(self) -> None:
        """Stop the engine; unfinished requests end in EngineUnavailable."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if self._spare is not None:
            await self._spare.stop(grace_s=0.0)
        if self._connection is not None:
            await self._connection.stop(**({} if self._is_up else {"grace_s": 0.0}))
        self._is_up = False

    def submit(
        self,
        request: Asks[E],
        watch: Watch | None = None,
        *,
        is_whole: bool = False,
        on_capture: OnCapture | None = None,
    ) -> Job[E]:
        """Hand ``request`` to the engine; see ``Engines``. There is no other engine that could restart it.

        Raises:
            EngineUnavailable: The engine is not ready.
        """
        if on_capture is not None:
            request = capturing(request, self.settings)
        job = Job(request, self.cancel, watch, is_whole=is_whole, on_capture=on_capture)
        self.take(job)
        return job

    def take(self, job: Job[Any]) -> None:
        """Start the request of ``job`` and feed it its events; raise EngineUnavailable if the engine is not ready."""
        self._ready_connection().take(job)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its slot is free at the engine's next step. Ignored if it has ended."""
        if self._connection is not None:
            self._connection.cancel(request_id)

    def interrupt(self, request_id: str) -> None:
        """End an image request early with its unfinished images; ignored if it has ended."""
        if self._connection is not None:
            self._connection.interrupt(request_id)

    def retry_load(self, name: str) -> None:
        """Read the files of a model that failed to load again; raise EngineUnavailable if the engine is not ready."""
        self._ready_connection().retry_load(name)

    async def num_requests(self) -> int:
        """Return the number of requests that the engine counts; raise EngineUnavailable if it is not ready."""
        return (await self._ready_connection().ping()).num_requests

    async def trace(self) -> list[list[str]]:
        """Return the request id of every row of the recent UNet calls; raise EngineUnavailable if it is not ready."""
        return await self._ready_connection().trace()

    async def stats(self) -> EngineStats | None:
        """Return the engine's statistics; ``None`` before its first tick.

        Raises:
            EngineUnavailable: The engine is not ready.
        """
        return await self._ready_connection().stats()

    def _ready_connection(self) -> EngineConnection:
        """Return the connection to the engine; raise EngineUnavailable if it is not ready."""
        self.require_ready()
        assert self._connection is not None
        return self._connection

    async def _supervise(self) -> None:
        while not self.failed.done():
            try:
                await self._run_once()
            except OSError as error:  # no process or no socket: the same as a loss
                log.error("engine did not start", extra={"reason": str(error)})
            if self.failed.done():
                return
            self._losses.append(self._now())
            if len(self._losses) == MAX_LOSSES and self._losses[-1] - self._losses[0] < LOSS_WINDOW_S:
                often = f"{MAX_LOSSES} times within {LOSS_WINDOW_S:g} s"
                log.error("the engine is not restarted again", extra={"reason": f"lost {often}", **self._of})
                self._give_up(
                    EngineUnavailable(f"the engine failed {often} and is not restarted; see the server's log.")
                )
                return
            recent = sum(self._now() - lost_at_s < LOSS_WINDOW_S for lost_at_s in self._losses)
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (recent - 2)) if recent > 1 else 0.0
            self._ready_at_s = self._now() + pause_s + self._load_times.expected_s(spare=self._has_live_spare)
            log.warning("engine restarts", extra={"pause_s": pause_s, **self._of})
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> None:
        """Start an engine and supervise it until it is lost."""
        was_spare = self._has_live_spare
        connection = self._connection = await self._next_engine()
        connection.on_models = self.paths.remember
        engine = replace(self._load.engine, served_paths=self.paths.paths())
        connection.load(replace(self._load, engine=engine))
        try:
            patience_s = self._startup_timeout_s
            async with asyncio.timeout(patience_s) as limit:
                connection.on_building = lambda build_s: limit.reschedule(self._now() + build_s + patience_s)
                await self._watch(connection, until=connection.ready)
                ready = await asyncio.shield(connection.ready)
        except TimeoutError:
            await connection.stop(grace_s=0.0)
            await asyncio.gather(connection.ready, return_exceptions=True)
            self._load_failed(ModelLoadError(f"loading the model took longer than {self._startup_timeout_s:g} s."))
        except ModelLoadError as error:
            await connection.stop()
            self._load_failed(error)
        else:
            self.info, self.text_info, self._known_models = ready.info, ready.language, ready.models
            self._is_up = True
            seconds = {"load_s": round(connection.load_s, 1)}
            extra = {"model": ready.info.model_id, "engine_pid": connection.pid, **seconds, **self._of}
            log.info("engine ready", extra=extra)
            if not connection.has_built:
                await LISTINGS.run(self._load_times.learn, connection.load_s, spare=was_spare)
            up_since_s = self._now()
            preparing = asyncio.create_task(self._keep_spare())
            try:
                await self._watch(connection, until=connection.lost)
            finally:
                preparing.cancel()
                await asyncio.gather(preparing, return_exceptions=True)
            self._is_up = False
            if self._now() - up_since_s >= HEALTHY_S:
                self._losses.clear()
            self._ready_at_s = self._now() + self._load_times.expected_s(spare=self._has_live_spare)
            await self._log_exit(connection)

    @property
    def _has_live_spare(self) -> bool:
        """Whether there is a spare process that has not ended."""
        return self._spare is not None and not self._spare.lost.done()

    async def _next_engine(self) -> EngineConnection:
        """Return the spare if it answers, else a new process."""
        is_live = self._has_live_spare
        spare, self._spare = self._spare, None
        if spare is not None and is_live:
            patience_s = max(SPARE_ANSWERS_S, self._spare_since_s + SPARE_STARTS_S - self._now())
            try:
                async with asyncio.timeout(patience_s):
                    await spare.ping()
                return spare
            except (TimeoutError, EngineUnavailable):
                log.warning("the spare engine does not answer", extra={"engine_pid": spare.pid})
                spare.abandon(Loss("silence", f"no response for {patience_s:.0f} s"))
        return await EngineConnection.start(self.metrics)

    async def _keep_spare(self) -> None:
        """Start a spare, and another one when it is lost."""
        while self._has_spare:
            await asyncio.sleep(SPARE_AFTER_S)
            if self._has_live_spare:
                continue
            if self._spare is not None:
                log.warning("the spare engine exited", extra={"engine_pid": self._spare.pid})
                self._spare = None
            try:
                self._spare = await EngineConnection.start(self.metrics)
                self._spare_since_s = self._now()
            except OSError as error:
                log.warning("the spare engine did not start", extra={"reason": str(error)})

    async def _watch(self, connection: EngineConnection, *, until: asyncio.Future[Any]) -> None:
        """Ping the engine until ``until`` is done or it is lost; abandon it if it hangs or is silent."""
        pong: asyncio.Task[ipc.Pong] | None = None
        self.silent_s = idle_s = 0.0
        work = connection.work()
        patience_s = self._hang_after_s if self._is_up else max(self._hang_after_s, LOADING_ANSWERS_S)
        ends: set[asyncio.Future[Any]] = {connection.lost, until}
        try:
            while not any(end.done() for end in ends):
                pong = pong or asyncio.create_task(connection.ping())
                await asyncio.wait({*ends, pong}, timeout=PING_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if any(end.done() for end in ends):
                    return
                if pong.done():
                    self.silent_s = idle_s = 0.0
                    answer, pong = pong.result(), None
                    if answer.hangs:
                        connection.abandon(Loss("hang", f"tick {answer.num_ticks + 1} has taken {answer.tick_s:.0f} s"))
                    await asyncio.wait(ends, timeout=PING_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                    continue
                self.silent_s += PING_EVERY_S
                before, work = work, connection.work()
                idle_s = 0.0 if not self._is_up and work.goes_on_since(before) else idle_s + PING_EVERY_S
                if idle_s > patience_s:
                    connection.abandon(Loss("silence", f"no response for {self.silent_s:.0f} s"))
        finally:
            if pong is not None:
                pong.cancel()
                await asyncio.gather(pong, return_exceptions=True)

    async def _log_exit(self, connection: EngineConnection) -> None:
        """Log why the engine was lost, after its process has ended or ``LINGER_S`` have passed."""
        closing = asyncio.create_task(connection.closed.wait())
        await asyncio.wait({closing}, timeout=LINGER_S)
        closing.cancel()
        loss = connection.lost.result()
        self.metrics.lost_engine(loss.kind)
        extra = {"engine_pid": connection.pid, "exit_code": connection.exit_code, "reason": loss.reason, **self._of}
        log.error("engine lost", extra=extra)

    def _load_failed(self, error: DiffserveError) -> None:
        if self.info is None:
            self._give_up(error)
        else:
            log.error("engine did not come back", extra={"reason": error.message, **self._of})

    def _give_up(self, error: DiffserveError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def watch_engines(metrics: Metrics, engines: Sequence[EngineClient]) -> None:
    """Show in ``metrics`` the longest silence and load time of ``engines``, and their models."""

    def infos() -> dict[tuple[str, ...], float]:
        served = ((model.name, model.info) for engine in engines for model in engine.models)
        return {(name, info.digest, info.dtype): 1.0 for name, info in served if info is not None}

    def loads() -> dict[tuple[str, ...], float]:
        times = [engine.load_s for engine in engines if engine.load_s is not None]
        return {(): max(times)} if times else {}

    text = "Seconds since the last message from the engine, also while it loads its model."
    metrics.watch("engine_heartbeat_age_seconds", text, lambda: {(): max(engine.silent_s for engine in engines)})
    metrics.watch("model_load_seconds", "Seconds from the load command to the engine's first tick.", loads)
    metrics.watch(
        "model_info", "Loaded models, with digest and dtype as labels; always 1.", infos, "model", "digest", "dtype"
    )


class LoadTimes:
    """Load times of the model on this machine, in a spare and in a new process; stored on disk."""

    def __init__(self, settings: Settings) -> None:
        model = settings.model
        self._cache = DiskCache.at(settings.engine.cache_dir)
        self._key = f"{model.path} {model.device} {model.dtype} {settings.text.model}"
        self._times = {spare: self._read(spare) for spare in (False, True)}

    def expected_s(self, *, spare: bool) -> float:
        """Return the expected seconds of the next load."""
        return self._times[spare] or self._times[False] or USUAL_LOAD_S

    def learn(self, load_s: float, *, spare: bool) -> None:
        """Store the last load time: a file that is in the page cache now will probably be there the next time."""
        self._times[spare] = load_s
        self._cache.write(LOAD_TIMES, self._key_of(spare), round(load_s, 3))

    def _read(self, spare: bool) -> float | None:
        load_s = self._cache.read(LOAD_TIMES, self._key_of(spare))
        return float(load_s) if isinstance(load_s, (int, float)) and 0.0 < load_s < 3600.0 else None

    def _key_of(self, spare: bool) -> str:
        return f"{self._key} spare" if spare else self._key

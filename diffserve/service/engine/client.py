"""The engine as the front door knows it: one process at a time, watched, and restarted when it is lost.

starting --ready--> up --lost--> waiting (0 s, 0.5 s, 1 s, 2 s, ...) --> starting
a load error at the first start, or five losses within five minutes, none of an engine that had been up for a minute:
``failed`` resolves and nothing is restarted

It is lost when its process ends, when it says that its device is, and when it does not get on: a tick that takes longer
than any should, or no word at all for ``[serve] hang_after_s``; while it loads, in which its process did not compute
or read either, since on a busy machine libraries keep it from words for minutes. Then it is killed. Those inside are
told at once.

With ``[serve] spare_engine`` a second process stands by, its libraries imported and nothing loaded, to take its place
if it still answers then; one that ends meanwhile is replaced.
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
from diffserve.service.engine.engines import Job, Watch, refuse_unready
from diffserve.service.metrics import Metrics
from diffserve.service.threads import LISTINGS
from diffserve.settings.config import Settings
from diffserve.store.unet_paths import UNetPathFile

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MAX_LOSSES = 5
LOSS_WINDOW_S = 300.0
HEALTHY_S = 60.0  # an engine that was up for so long begins the count of losses anew
LONGEST_OVERDUE_S = 30.0
PING_EVERY_S = 2.0
SILENT_AFTER_S = 10.0  # without a pong for so long it is not ready
SPARE_AFTER_S = 10.0  # so long an engine has the machine for itself before a spare is made ready
LOADING_ANSWERS_S = 30.0  # at least so long one that loads is given to answer: libraries keep it from that for seconds
SPARE_ANSWERS_S = 2.0  # a spare that does not within this time is stuck itself
SPARE_STARTS_S = 15.0  # unless it is as young as this: it imports its libraries, and nothing else comes sooner
LINGER_S = 5.0  # so long a process that was killed is waited for: one that hangs in a driver never ends
USUAL_LOAD_S = 10.0  # where none was measured
LOAD_TIMES = "load-seconds"

E = TypeVar("E")

log = logging.getLogger("diffserve.engine")


class EngineClient:
    """Keeps an engine process alive and hands requests to it.

    settings   what it was started with
    info       the first model, ``None`` until the first engine is up
    text_info  the language model beside it; ``None`` until then, and where there is none
    metrics    what the answers showed, over all engines
    failed     resolves to the error for which no further engine is started
    paths      how UNet calls are made, stored in the data folder and given to every engine
    silent_s   seconds for which the engine has said nothing, counted while we listen: a loop that stood still heard
               nothing, and proves nothing
    """

    def __init__(self, settings: Settings, *, metrics: Metrics | None = None, name: str = "") -> None:
        """``metrics``: of all engines, where this is one of several, the ``name``; ``None``: its own."""
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
        """Every image model that requests may name, the first one first; none until the first engine is up."""
        return self._known_models if self._connection is None else self._connection.models or self._known_models

    @property
    def engine_id(self) -> int | None:
        """The process id of the engine, also of one that loads or was lost; ``None`` before the first."""
        return None if self._connection is None else self._connection.pid

    @property
    def load_s(self) -> float | None:
        """Seconds that the engine took to load, 0 while it does; ``None`` before the first began."""
        return None if self._connection is None else self._connection.load_s

    @property
    def is_expected(self) -> bool:
        """Whether its failure counts as one of its pool: always."""
        return True

    @property
    def is_ready(self) -> bool:
        """Whether a request handed over now would be painted."""
        connection = self._connection
        is_up = self._is_up and connection is not None and not connection.lost.done()
        return is_up and self.silent_s < SILENT_AFTER_S

    @property
    def num_ready(self) -> int:
        """Whether there is one that works: 1 or 0."""
        return int(self.is_ready)

    @property
    def retry_after_s(self) -> float:
        """While there is no engine: seconds until there should be one, as long as the last took to load; 1 at least.

        One that is overdue may take as long again as it is late.
        """
        left_s = self._ready_at_s - self._now()
        return max(1.0, left_s, min(-left_s, LONGEST_OVERDUE_S))

    def require_ready(self) -> None:
        """EngineUnavailable, with when to come back, unless a request handed over now would be painted."""
        refuse_unready(self)

    def start(self) -> None:
        """Start the first engine and watch over it."""
        self._ready_at_s = self._now() + self._load_times.expected_s(spare=self._stands_by)
        self._supervising = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def stop(self) -> None:
        """End the engine; whatever it still holds ends in EngineUnavailable."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if self._spare is not None:
            await self._spare.stop(grace_s=0.0)
        if self._connection is not None:
            await self._connection.stop(**({} if self._is_up else {"grace_s": 0.0}))
        self._is_up = False

    def submit(self, request: Asks[E], watch: Watch | None = None, *, is_whole: bool = False) -> Job[E]:
        """Hand ``request`` to the engine. EngineUnavailable while there is none; ``is_whole``: see ``Engines``, there
        is no other that could begin it anew.

        Its job raises InvalidRequest where nothing is loaded that could do it.
        """
        job = Job(request, self.cancel, watch, is_whole=is_whole)
        self.take(job)
        return job

    def take(self, job: Job[Any]) -> None:
        """Have the engine do the request of ``job``, and feed it. EngineUnavailable while there is none."""
        self._up().take(job)

    def cancel(self, request_id: str) -> None:
        """Give a request up, if it is not over; its place is free at the engine's next step."""
        if self._connection is not None:
            self._connection.cancel(request_id)

    def interrupt(self, request_id: str) -> None:
        """End a request for images early, if it is not over, with the unfinished pictures."""
        if self._connection is not None:
            self._connection.interrupt(request_id)

    def retry_load(self, name: str) -> None:
        """Have the engine look at the files of a model that it could not read. EngineUnavailable without one."""
        self._up().retry_load(name)

    async def num_requests(self) -> int:
        """How many requests are in the engine, by its own books. EngineUnavailable while there is none."""
        return (await self._up().ping()).num_requests

    async def trace(self) -> list[list[str]]:
        """Per recent UNet call, the request id of every row. EngineUnavailable while there is none."""
        return await self._up().trace()

    async def stats(self) -> EngineStats | None:
        """The engine's numbers as of a moment ago; ``None`` before its first tick. EngineUnavailable while there is
        none.
        """
        return await self._up().stats()

    def _up(self) -> EngineConnection:
        """The engine. EngineUnavailable while there is none."""
        self.require_ready()
        assert self._connection is not None
        return self._connection

    async def _supervise(self) -> None:
        while not self.failed.done():
            try:
                await self._one_life()
            except OSError as error:  # no process or no socket to be had: as good as lost
                log.error("engine did not start", extra={"reason": error.strerror})
            if self.failed.done():
                return
            self._losses.append(self._now())
            if len(self._losses) == MAX_LOSSES and self._losses[-1] - self._losses[0] < LOSS_WINDOW_S:
                often = f"{MAX_LOSSES} times within {LOSS_WINDOW_S:g} s"
                log.error("no further engine is started", extra={"reason": f"lost {often}", **self._of})
                self._give_up(EngineUnavailable(f"the engine was lost {often}; giving up."))
                return
            recent = sum(self._now() - lost_at_s < LOSS_WINDOW_S for lost_at_s in self._losses)
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (recent - 2)) if recent > 1 else 0.0
            self._ready_at_s = self._now() + pause_s + self._load_times.expected_s(spare=self._stands_by)
            log.warning("engine restarts", extra={"pause_s": pause_s, **self._of})
            await asyncio.sleep(pause_s)

    async def _one_life(self) -> None:
        """Start an engine and stay with it until it is gone."""
        was_spare = self._stands_by
        connection = self._connection = await self._next_engine()
        connection.on_models = self.paths.remember
        engine = replace(self._load.engine, served_paths=self.paths.known())
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
            self._load_failed(ModelLoadError(f"the model took longer than {self._startup_timeout_s:g} s to load."))
        except ModelLoadError as error:
            await connection.stop()
            self._load_failed(error)
        else:
            self.info, self.text_info, self._known_models = ready.info, ready.language, ready.models
            self._is_up = True
            seconds = {"load_s": round(connection.load_s, 1)}
            told = {"model": ready.info.model_id, "engine_pid": connection.pid, **seconds, **self._of}
            log.info("engine ready", extra=told)
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
            self._ready_at_s = self._now() + self._load_times.expected_s(spare=self._stands_by)
            await self._bury(connection)

    @property
    def _stands_by(self) -> bool:
        """Whether there is a spare, alive."""
        return self._spare is not None and not self._spare.lost.done()

    async def _next_engine(self) -> EngineConnection:
        """The spare where there is one that answers, else a process that has everything before it."""
        stands_by = self._stands_by
        spare, self._spare = self._spare, None
        if spare is not None and stands_by:
            patience_s = max(SPARE_ANSWERS_S, self._spare_since_s + SPARE_STARTS_S - self._now())
            try:
                async with asyncio.timeout(patience_s):
                    await spare.ping()
                return spare
            except (TimeoutError, EngineUnavailable):
                log.warning("the spare engine does not answer", extra={"engine_pid": spare.pid})
                spare.abandon(Loss("silence", f"no word for {patience_s:.0f} s"))
        return await EngineConnection.start(self.metrics)

    async def _keep_spare(self) -> None:
        """Have a spare ready, and another when that one is lost."""
        while self._has_spare:
            await asyncio.sleep(SPARE_AFTER_S)
            if self._stands_by:
                continue
            if self._spare is not None:
                log.warning("the spare engine is gone", extra={"engine_pid": self._spare.pid})
                self._spare = None
            try:
                self._spare = await EngineConnection.start(self.metrics)
                self._spare_since_s = self._now()
            except OSError as error:
                log.warning("no spare engine", extra={"reason": str(error)})

    async def _watch(self, connection: EngineConnection, *, until: asyncio.Future[Any]) -> None:
        """Ask how it gets on ``until`` that is done, or it is lost; give it up when it does not get on."""
        pong: asyncio.Task[ipc.Pong] | None = None
        self.silent_s = idle_s = 0.0
        work = connection.work()
        patience_s = self._hang_after_s if self._is_up else max(self._hang_after_s, LOADING_ANSWERS_S)
        overs: set[asyncio.Future[Any]] = {connection.lost, until}
        try:
            while not any(over.done() for over in overs):
                pong = pong or asyncio.create_task(connection.ping())
                await asyncio.wait({*overs, pong}, timeout=PING_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if any(over.done() for over in overs):
                    return
                if pong.done():
                    self.silent_s = idle_s = 0.0
                    told, pong = pong.result(), None
                    if told.hangs:
                        connection.abandon(Loss("hang", f"tick {told.num_ticks + 1} has taken {told.tick_s:.0f} s"))
                    await asyncio.wait(overs, timeout=PING_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                    continue
                self.silent_s += PING_EVERY_S
                before, work = work, connection.work()
                idle_s = 0.0 if not self._is_up and work.goes_on_since(before) else idle_s + PING_EVERY_S
                if idle_s > patience_s:
                    connection.abandon(Loss("silence", f"no word for {self.silent_s:.0f} s"))
        finally:
            if pong is not None:
                pong.cancel()
                await asyncio.gather(pong, return_exceptions=True)

    async def _bury(self, connection: EngineConnection) -> None:
        """Say why it is gone, once it is; one that lingers is left behind."""
        closing = asyncio.create_task(connection.closed.wait())
        await asyncio.wait({closing}, timeout=LINGER_S)
        closing.cancel()
        loss = connection.lost.result()
        self.metrics.lost_engine(loss.kind)
        said = {"engine_pid": connection.pid, "exit_code": connection.exit_code, "reason": loss.reason, **self._of}
        log.error("engine lost", extra=said)

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
    """Tell of ``engines`` at each scrape: of the one that has been silent for longest, and took longest to load."""

    def infos() -> dict[tuple[str, ...], float]:
        served = ((one.name, one.info) for engine in engines for one in engine.models)
        return {(name, info.digest, info.dtype): 1.0 for name, info in served if info is not None}

    def loads() -> dict[tuple[str, ...], float]:
        known = [engine.load_s for engine in engines if engine.load_s is not None]
        return {(): max(known)} if known else {}

    said = "Seconds for which the engine has said nothing, also while it loads."
    metrics.watch("engine_heartbeat_age_seconds", said, lambda: {(): max(engine.silent_s for engine in engines)})
    metrics.watch("model_load_seconds", "Seconds from telling the engine what to load to its first tick.", loads)
    metrics.watch("model_info", "The models that are served; always 1.", infos, "model", "digest", "dtype")


class LoadTimes:
    """How long this model takes to load on this machine, by a spare process and by a new one; kept on disk."""

    def __init__(self, settings: Settings) -> None:
        model = settings.model
        self._cache = DiskCache.at(settings.engine.cache_dir)
        self._key = f"{model.path} {model.device} {model.dtype} {settings.text.model}"
        self._known = {spare: self._read(spare) for spare in (False, True)}

    def expected_s(self, *, spare: bool) -> float:
        """Seconds that the next load should take."""
        return self._known[spare] or self._known[False] or USUAL_LOAD_S

    def learn(self, load_s: float, *, spare: bool) -> None:
        """The last one counts: a file that is in memory now is there the next time, too."""
        self._known[spare] = load_s
        self._cache.write(LOAD_TIMES, self._named(spare), round(load_s, 3))

    def _read(self, spare: bool) -> float | None:
        kept = self._cache.read(LOAD_TIMES, self._named(spare))
        return float(kept) if isinstance(kept, (int, float)) and 0.0 < kept < 3600.0 else None

    def _named(self, spare: bool) -> str:
        return f"{self._key} spare" if spare else self._key

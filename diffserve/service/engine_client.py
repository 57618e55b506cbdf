"""The engine as the front door knows it: one process at a time, watched, and restarted when it is lost.

starting --ready--> up --lost--> waiting (0.5 s, 1 s, 2 s, ...) --> starting
a load error at the first start, or five losses within five minutes: ``failed`` resolves and nothing is restarted
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from diffserve import ipc
from diffserve.config import Settings
from diffserve.engine_stats import EngineStats
from diffserve.errors import DiffserveError, EngineUnavailable, ModelLoadError
from diffserve.rewrite_types import RewriteRequest
from diffserve.service.engine_connection import EngineConnection, Job, RewriteJob, TextJob
from diffserve.service.metrics import Metrics
from diffserve.text_types import LanguageModelInfo, TextRequest
from diffserve.types import GenerationRequest, ModelInfo

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MAX_LOSSES = 5
LOSS_WINDOW_S = 300.0
PING_EVERY_S = 2.0
SILENT_AFTER_S = 10.0  # without a pong for so long it is not ready
HUNG_AFTER_S = 60.0  # and for so long it is killed

log = logging.getLogger("diffserve.engine")


class EngineClient:
    """Keeps an engine process alive and hands requests to it.

    info       the loaded model, ``None`` until the first engine is up
    text_info  the language model beside it; ``None`` until then, and where there is none
    metrics    what the answers showed, over all engines
    failed     resolves to the error for which no further engine is started
    """

    def __init__(self, settings: Settings) -> None:
        self.info: ModelInfo | None = None
        self.text_info: LanguageModelInfo | None = None
        self.metrics = Metrics()
        self.failed: asyncio.Future[DiffserveError] = asyncio.get_running_loop().create_future()
        self._load = ipc.Load(model=settings.model, engine=settings.engine, text=settings.text)
        self._startup_timeout_s = settings.serve.startup_timeout_s
        self._connection: EngineConnection | None = None
        self._is_up = False
        self._heard_at_s = 0.0
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._supervising: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request handed over now would be painted."""
        return self._is_up and self._now() - self._heard_at_s < SILENT_AFTER_S

    def start(self) -> None:
        """Start the first engine and watch over it."""
        self._supervising = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def stop(self) -> None:
        """End the engine; whatever it still holds ends in EngineUnavailable."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if self._connection is not None:
            await self._connection.stop()
        self._is_up = False

    def submit(self, request: GenerationRequest) -> Job:
        """Hand ``request`` to the engine. EngineUnavailable while there is none."""
        return self._up().submit(request)

    def submit_text(self, request: TextRequest) -> TextJob:
        """The same for a text; where no language model is loaded its job raises InvalidRequest."""
        return self._up().submit_text(request)

    def submit_rewrite(self, request: RewriteRequest) -> RewriteJob:
        """The same for a wish."""
        return self._up().submit_rewrite(request)

    async def count(self) -> int:
        """How many requests the engine holds, waiting or being painted."""
        return await self._up().ping()

    async def trace(self) -> list[list[str]]:
        """Per recent UNet call, the request id of every row."""
        return await self._up().trace()

    async def stats(self) -> EngineStats | None:
        """The engine's numbers as of a moment ago; None before its first tick."""
        return await self._up().stats()

    def _up(self) -> EngineConnection:
        if self._connection is None or not self._is_up:
            raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
        return self._connection

    async def _supervise(self) -> None:
        while not self.failed.done():
            try:
                await self._one_life()
            except OSError as error:  # no process or no socket to be had: as good as lost
                log.error("engine did not start", extra={"reason": str(error)})
            if self.failed.done():
                return
            self._losses.append(self._now())
            if len(self._losses) == MAX_LOSSES and self._losses[-1] - self._losses[0] < LOSS_WINDOW_S:
                self._give_up(EngineUnavailable(f"the engine was lost {MAX_LOSSES} times in a row; giving up."))
                return
            recent = sum(self._now() - lost_at_s < LOSS_WINDOW_S for lost_at_s in self._losses)
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (recent - 1))
            log.warning("engine restarts", extra={"pause_s": pause_s})
            await asyncio.sleep(pause_s)

    async def _one_life(self) -> None:
        """Start an engine and stay with it until it is gone."""
        connection = self._connection = await EngineConnection.start(self._load, self.metrics)
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                ready = await asyncio.shield(connection.ready)
        except TimeoutError:
            await connection.stop(grace_s=0.0)
            await asyncio.gather(connection.ready, return_exceptions=True)
            self._load_failed(ModelLoadError(f"the model took longer than {self._startup_timeout_s:g} s to load."))
        except ModelLoadError as error:
            await connection.stop()
            self._load_failed(error)
        else:
            self.info, self.text_info = ready.info, ready.language
            self._is_up, self._heard_at_s = True, self._now()
            log.info("engine ready", extra={"model": ready.info.model_id, "engine_pid": connection.pid})
            await self._watch(connection)
            self._is_up = False
            log.error("engine lost", extra={"engine_pid": connection.pid, "exit_code": connection.exit_code})

    async def _watch(self, connection: EngineConnection) -> None:
        """Ping until the engine is gone; kill it when it has been silent for too long."""
        closed = asyncio.create_task(connection.closed.wait())
        pong: asyncio.Task[int] | None = None
        try:
            while not closed.done():
                pong = pong or asyncio.create_task(connection.ping())
                await asyncio.wait({closed, pong}, timeout=PING_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                if closed.done():
                    return
                if pong.done():
                    if pong.exception() is None:
                        self._heard_at_s = self._now()
                    pong = None
                    await asyncio.wait({closed}, timeout=PING_EVERY_S)
                elif self._now() - self._heard_at_s > HUNG_AFTER_S:
                    log.error("engine hangs", extra={"engine_pid": connection.pid})
                    connection.kill()
                    await closed
        finally:
            tasks = [task for task in (closed, pong) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _load_failed(self, error: DiffserveError) -> None:
        if self.info is None:
            self._give_up(error)
        else:
            log.error("engine did not come back", extra={"reason": error.message})

    def _give_up(self, error: DiffserveError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

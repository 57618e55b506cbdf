"""Models of one process: their descriptions, loading them in a thread, and unloading idle ones to make room."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Final, NamedTuple

import msgspec
import torch

from diffserve.api.engine_stats import ImageStats, sum_of
from diffserve.api.errors import DiffserveError, InsufficientMemory, ModelLoadError
from diffserve.api.types import Event, GenerationRequest, ModelInfo, ModelProfile
from diffserve.engine.base_engine import failure_of
from diffserve.engine.image.engine import Engine
from diffserve.engine.image.room import format_bytes
from diffserve.engine.records import FailureReason
from diffserve.runtime import DiffusionModel
from diffserve.runtime.kv import KVSpec, PagePlan, PagePool
from diffserve.runtime.loading.placement import free_over
from diffserve.runtime.memory import give_heap_back, give_memory_back
from diffserve.runtime.text.conditioning import image_specs
from diffserve.runtime.threads import pool_of_threads
from diffserve.settings.config import EngineConfig

LOAD_POLL_S: Final = 0.05
"""Longest wait of a tick for a model that is being loaded, while there is nothing else to do."""

RETRY_AFTER_S: Final = 30.0
"""Seconds after a failed load during which the model is not loaded again."""

logger = logging.getLogger(__name__)


class Survey(NamedTuple):
    """Facts about a model that its files tell before any weight is read.

    Attributes:
        info: The model's description.
        needs_bytes: Memory for its weights and the larger of a step and the decoding of an image.
        specs: The page sizes that it needs.
        window_tokens: Tokens of one window of its text encoders.
    """

    info: ModelInfo
    needs_bytes: int
    specs: tuple[KVSpec, ...]
    window_tokens: int


class Loader(NamedTuple):
    """Functions that read models; both run in the loading thread and raise what ``load_model`` raises.

    Attributes:
        survey: Reads the facts of a model.
        load: Loads a model; it may share parts with the loaded models that it gets.
    """

    survey: Callable[[ModelProfile], Survey]
    load: Callable[[ModelProfile, Sequence[DiffusionModel]], DiffusionModel]


class WaitingRequest(NamedTuple):
    """A request for a model that is not loaded yet, and when it arrived."""

    request: GenerationRequest
    since_s: float


@dataclass(eq=False)
class ModelEntry:
    """A model that requests may name, loaded or not.

    Attributes:
        waiting: Requests that wait for the model, by id.
        is_requested: Whether the model is to be loaded for something other than a request.
        clock_s: Virtual time of the model among the loaded ones.
        last_turn: Number of the tick that served it last.
        used_s: When it last had work.
        past: Statistics of its engines that were unloaded.
        error: Why it could not be loaded at ``failed_s``.
    """

    profile: ModelProfile
    survey: Survey | None = None
    info: ModelInfo | None = None
    engine: Engine | None = None
    waiting: dict[str, WaitingRequest] = field(default_factory=dict)
    is_requested: bool = False
    clock_s: float = 0.0
    last_turn: int = 0
    used_s: float = 0.0
    past: ImageStats = field(default_factory=lambda: sum_of(()))
    error: DiffserveError | None = None
    failed_s: float = 0.0

    @property
    def name(self) -> str:
        """The name of the model in requests."""
        return self.profile.model_id

    @property
    def is_idle(self) -> bool:
        """Whether the model is loaded and has no work, and so could be unloaded."""
        return self.engine is not None and not self.engine.num_live and not self.engine.has_work

    def stats(self) -> ImageStats:
        """Return the statistics of all its engines, unloaded ones included."""
        return sum_of([self.past, *([self.engine.stats()] if self.engine else [])])


class ModelLoading:
    """Loads models one at a time in a thread, and unloads idle ones.

    Args:
        entries: All models.
        config: The configuration of new engines.
        pool: The page pool to share, if any.
        loader: Reads models; ``None`` if all are loaded already.
        unload_after_s: Idle seconds after which a model is unloaded; 0 to keep it.
        clock: In seconds.
        lock: Guards the engines of the entries and their waiting requests.

    Attributes:
        num_changes: How often a model was loaded, unloaded, described, or failed to load.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        config: EngineConfig,
        pool: PagePool | None,
        loader: Loader | None,
        unload_after_s: float,
        clock: Callable[[], float],
        lock: RLock,
    ) -> None:
        self.num_changes = 0
        self._entries = entries
        self._config = config
        self._pool = pool
        self._loader = loader
        self._unload_after_s = unload_after_s
        self._clock = clock
        self._lock = lock
        self._thread = pool_of_threads(1, "loading models")
        self._job: tuple[ModelEntry, float, Future[Survey | DiffusionModel]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a model is being loaded or surveyed."""
        return self._job is not None

    @property
    def is_done(self) -> bool:
        """Whether a result is ready for :meth:`finish`."""
        return self._job is not None and self._job[2].done()

    @property
    def loaded(self) -> list[Engine]:
        """The engines of all loaded models."""
        return [entry.engine for entry in self._entries if entry.engine is not None]

    @property
    def unload_in_s(self) -> float | None:
        """Seconds until an idle model is to be unloaded; ``None`` if none is."""
        if not self._unload_after_s or self._loader is None:
            return None
        ends_s = [entry.used_s + self._unload_after_s for entry in self._entries if entry.is_idle]
        return max(0.0, min(ends_s) - self._clock()) if ends_s else None

    def wait(self) -> None:
        """Wait for the running job, at most ``LOAD_POLL_S``."""
        if self._job is not None:
            wait([self._job[2]], LOAD_POLL_S)

    def may_retry(self, entry: ModelEntry) -> bool:
        """Return whether enough time has passed since ``entry`` failed to load."""
        return self._clock() - entry.failed_s >= RETRY_AFTER_S

    def retry_survey(self, entry: ModelEntry) -> None:
        """Read the files of a model again that could not be read before, at most every ``RETRY_AFTER_S``."""
        if entry.info is None and self._job is None and self._loader is not None and self.may_retry(entry):
            entry.failed_s = self._clock()
            self._job = entry, self._clock(), self._thread.submit(partial(self._loader.survey, entry.profile))

    def begin(self, entry: ModelEntry) -> list[Event]:
        """Start loading ``entry``, after a survey, and return the failures of its requests if it does not fit."""
        assert self._loader is not None
        try:
            work: Callable[[], Survey | DiffusionModel] = partial(self._loader.survey, entry.profile)
            if entry.survey is not None:
                self._make_room(entry, entry.survey)
                work = partial(self._loader.load, entry.profile, [engine.model for engine in self.loaded])
            self._job = entry, self._clock(), self._thread.submit(work)
        except Exception as error:
            return self._fail(entry, error)
        return []

    def finish(self) -> list[Event]:
        """Take the result of a job that is done, and return the failures of the requests that waited in vain."""
        if self._job is None or not self._job[2].done():
            return []
        (entry, started_s, job), self._job = self._job, None
        try:
            self._take(entry, job.result(), self._clock() - started_s)
        except Exception as error:
            return self._fail(entry, error)
        return []

    def unload_idle(self) -> None:
        """Unload models that have been idle for ``unload_after_s``, the longest idle first."""
        while self.unload_in_s == 0.0:
            idle = min((entry for entry in self._entries if entry.is_idle), key=lambda entry: entry.used_s)
            if not self._unload(idle, f"idle for {self._unload_after_s:g} s"):
                break

    def _take(self, entry: ModelEntry, loaded: Survey | DiffusionModel, load_s: float) -> None:
        if isinstance(loaded, Survey):
            self.num_changes += entry.info is None
            entry.survey, entry.info, entry.error = loaded, entry.info or loaded.info, None
            return
        engine = Engine(loaded, self._config, profile=entry.profile, pool=self._pool_for(loaded), clock=self._clock)
        logger.info("%s is loaded: %s in %.1f s", entry.name, format_bytes(engine.info.weights_bytes), load_s)
        give_memory_back(loaded.device)  # of parts that were replaced by shared ones
        give_heap_back()
        with self._lock:
            entry.engine, entry.info, entry.error, entry.used_s = engine, engine.info, None, self._clock()
            entry.is_requested = False
        self.num_changes += 1

    def _pool_for(self, model: DiffusionModel) -> PagePool | None:
        """Return the shared pool if its pages are on the model's device and large enough, else ``None``."""
        pool = self._pool
        if pool is None or pool.arena.data.device.type != model.device.type:
            return None
        needed = PagePlan.smallest_page_bytes(image_specs(model, is_exact=True))
        return pool if needed <= pool.page_bytes else None

    def _fail(self, entry: ModelEntry, error: Exception) -> list[Event]:
        """Record why ``entry`` cannot be loaded, and return the failures of its waiting requests."""
        reason = failure_of(error, f"loading {entry.name}")
        logger.warning("%s cannot be loaded: %s", entry.name, reason.message)
        is_full = isinstance(error, (InsufficientMemory, torch.OutOfMemoryError, MemoryError))
        message = reason.message.replace(entry.profile.path, entry.name)  # clients do not see paths of the server
        with self._lock:
            entry.error = (InsufficientMemory if is_full else ModelLoadError)(message)
            entry.failed_s = self._clock()
            entry.survey = None  # its files may have changed by the next attempt
            waiting, entry.waiting, entry.is_requested = entry.waiting, {}, False
            self.num_changes += 1
            return [FailureReason(entry.error.code, message).of(request_id) for request_id in waiting]

    def _make_room(self, entry: ModelEntry, survey: Survey) -> None:
        """Unload idle models until ``entry`` fits; raise ``InsufficientMemory`` if that is not enough."""
        device = torch.device(survey.info.device)
        free, needs = free_over(device, self._config.device_map), survey.needs_bytes
        if free is None or self._config.offload != "none":
            return
        idle = sorted((other for other in self._entries if other.is_idle), key=lambda other: other.used_s)
        idle_bytes = sum(other.info.weights_bytes for other in idle if other.info)
        logger.info(
            "%s needs %s, including a denoising step; %s are free", entry.name, format_bytes(needs), format_bytes(free)
        )
        if free + idle_bytes < needs:
            busy = [other.name for other in self._entries if other.engine is not None and not other.is_idle]
            verb = "are" if len(busy) > 1 else "is"
            raise InsufficientMemory(
                f"{entry.name} needs {format_bytes(needs)}, including a denoising step, and "
                f"{format_bytes(free + idle_bytes)} are free"
                + (f" while {', '.join(busy)} {verb} in use: try again later" if busy else "")
                + "; choose a smaller model or dtype, or set engine.offload."
            )
        for other in idle:
            if (now := free_over(device, self._config.device_map)) is not None and now >= needs:
                return
            self._unload(other, f"to make room for {entry.name}")

    def _unload(self, entry: ModelEntry, reason: str) -> bool:
        """Unload ``entry`` and return whether it was idle."""
        with self._lock:
            engine = entry.engine
            if engine is None or not entry.is_idle:
                return False
            entry.engine, entry.past = None, _without_caches(entry.stats())
        device, num_bytes = engine.model.device, engine.info.weights_bytes
        engine.close({tenant for other in self.loaded for tenant in other.runners.conditioner.tenants})
        del engine
        gc.collect()
        give_memory_back(device)
        give_heap_back()
        logger.info("%s is unloaded, %s: %s", entry.name, reason, format_bytes(num_bytes))
        self.num_changes += 1
        return True


def _without_caches(stats: ImageStats) -> ImageStats:
    """Return ``stats`` without the memory, slots and adapters of an engine that is unloaded."""
    caches = {name: msgspec.structs.replace(getattr(stats, name), num_bytes=0) for name in ("results", "latents")}
    return msgspec.structs.replace(stats, **caches, num_lanes=0, num_loras=0, lora_bytes=0)

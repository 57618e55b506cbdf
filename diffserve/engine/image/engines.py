"""ImageEngines: the image engines of one process, one for each model that is loaded, behind one face.

::

    request ──► its model is loaded ─────────────────────► Engine ──┐
       └──────► it is not: waits ──► loaded in a thread ──► Engine ─┴── tick: who has work and was served least

Rows of different models share no call, so a tick is one step of one engine: whose, their clocks say, which count the
seconds that each was given while others wanted some (start-time fair queueing, Goyal et al. 1996, as in ``queues``).

A model is loaded when it is first asked for, beside the loop, one at a time, and only where what it takes (weights and
a step, by a dry run) is free: idle models go first, those that were idle for longest. It goes, too, after
``unload_after_s`` without work. What cannot be loaded costs those who asked for it, and is not tried again at once.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Final, NamedTuple

import msgspec
import torch

from diffserve.api.engine_stats import ImageStats, ModelStats, sum_of
from diffserve.api.errors import (
    DeadlineExceeded,
    DiffserveError,
    InsufficientMemory,
    ModelLoadError,
    ModelNotFound,
    QueueFull,
)
from diffserve.api.types import Cancelled, Event, GenerationRequest, ModelInfo, ModelProfile, Queued, ServedModel
from diffserve.engine.engine import failure_of
from diffserve.engine.image.engine import Engine
from diffserve.engine.image.room import said_bytes
from diffserve.engine.image.task import TickTrace
from diffserve.engine.records import FailureReason
from diffserve.rewriting.window import MARKS, TextWindow
from diffserve.runtime import DiffusionModel
from diffserve.runtime.kv import KVSpec, PagePlan, PagePool
from diffserve.runtime.loading.spread import free_over
from diffserve.runtime.memory import give_heap_back, give_memory_back
from diffserve.runtime.text.conditioning import image_specs
from diffserve.runtime.threads import pool_of_threads

LOAD_POLL_S: Final = 0.05
"""A tick waits at most so long for a model that is being loaded, while nobody has anything else to do."""

TRY_AGAIN_S: Final = 30.0
"""So long nobody tries again to load what could not be."""

logger = logging.getLogger(__name__)


class Survey(NamedTuple):
    """What the files of a model tell before any weight is read.

    needs_bytes    to paint with it: its weights, and the hungrier of a step and decoding a picture
    specs          what it asks of a page pool
    window_tokens  of its text encoders
    """

    info: ModelInfo
    needs_bytes: int
    specs: tuple[KVSpec, ...]
    window_tokens: int


class Loader(NamedTuple):
    """How models come into memory; both are called in a thread beside the loop and raise what ``load_model`` does.

    load  is told of the models that are loaded, whose parts it may share
    """

    survey: Callable[[ModelProfile], Survey]
    load: Callable[[ModelProfile, Sequence[DiffusionModel]], DiffusionModel]


class Waiting(NamedTuple):
    """A request for a model that is not loaded yet, and when it came."""

    request: GenerationRequest
    since_s: float


@dataclass(eq=False)
class ModelEntry:
    """A model that requests may name.

    waiting    by request id, those for whom it is to be loaded
    is_wanted  whether somebody else wants it loaded
    clock_s    seconds that it was given, as its share is reckoned
    last_turn  the number of the tick in which it was last served
    used_s     when it last had work
    past       what earlier engines of it did
    error      why it could not be loaded at ``failed_s``
    """

    profile: ModelProfile
    survey: Survey | None = None
    info: ModelInfo | None = None
    engine: Engine | None = None
    waiting: dict[str, Waiting] = field(default_factory=dict)
    is_wanted: bool = False
    clock_s: float = 0.0
    last_turn: int = 0
    used_s: float = 0.0
    past: ImageStats = field(default_factory=lambda: sum_of(()))
    error: DiffserveError | None = None
    failed_s: float = 0.0

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.profile.model_id

    @property
    def is_idle(self) -> bool:
        """Whether it could be unloaded now."""
        return self.engine is not None and not self.engine.num_live and not self.engine.has_work

    def stats(self) -> ImageStats:
        """Of all its engines together."""
        return sum_of([self.past, *([self.engine.stats()] if self.engine else [])])


class ImageEngines:
    """``first`` and engines of ``others``, which ``loader`` loads when they are asked for.

    A face as an Engine has it: ``submit`` and ``cancel`` from any thread, the rest for the thread that ticks.

    unload_after_s  without work, after which a model is unloaded; 0: never
    num_changes     how often what ``served`` says has changed
    last_tick       what the latest tick ran; ``None`` when it had nothing to compute
    """

    def __init__(
        self,
        first: Engine,
        others: Sequence[ModelEntry] = (),
        *,
        loader: Loader | None = None,
        unload_after_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pool: PagePool | None = first.pool
        self.config = first.config
        self.num_changes = 0
        self.last_tick: TickTrace | None = None
        self._loader = loader
        self._unload_after_s = unload_after_s
        self._clock = clock
        self._first = ModelEntry(first.model.profile, info=first.info, engine=first, used_s=clock())
        self._first.profile = msgspec.structs.replace(first.model.profile, model_id=first.info.model_id)
        self._served = {one.name: one for one in (self._first, *others)}
        self._lock = RLock()  # of who waits, and of which engines there are
        self._news: list[Event] = []
        self._thread = pool_of_threads(1, "loading models")
        self._job: tuple[ModelEntry, float, Future[Survey | DiffusionModel]] | None = None
        self._turn: ModelEntry | None = None
        self._had_work: set[ModelEntry] = set()
        self._now_s = 0.0
        self._num_turns = 0

    # What there is -------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """Of the model that paints where a request names none."""
        assert self._first.info is not None
        return self._first.info

    @property
    def first(self) -> Engine:
        """The engine of that model. ModelNotFound while it is not loaded."""
        if self._first.engine is None:
            raise ModelNotFound(f"{self._first.name} is not loaded at the moment.")
        return self._first.engine

    @property
    def loaded(self) -> list[Engine]:
        """Every engine there is now."""
        return [one.engine for one in self._served.values() if one.engine is not None]

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """Every model that may be named, the first one first."""
        return tuple(
            ServedModel(
                name=one.name,
                info=one.info,
                is_loaded=one.engine is not None,
                problem=one.error.message if one.error else "",
                keeps_latents=self.config.latent_cache_bytes > 0,
                unet_paths=() if one.engine is None else one.engine.unet_paths,
                records_graphs=one.engine is not None and one.engine.records_graphs,
            )
            for one in self._served.values()
        )

    def window_of(self, request: GenerationRequest, first: TextWindow) -> TextWindow:
        """What the model that is to paint ``request`` reads in one piece. Of one that is not loaded the length is
        known, and it is counted as ``first`` counts, which is the first model's.
        """
        one = self._of(request.model)
        if one.engine is not None:
            return TextWindow.of(one.engine.model.text)
        return first if one.survey is None else TextWindow(one.survey.window_tokens - MARKS, first.count)

    def family_of(self, request: GenerationRequest) -> str:
        """Of the model that is to paint it."""
        info = self._of(request.model).info
        return self.info.family if info is None else info.family

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something at once."""
        is_done = self._job is not None and self._job[2].done()
        is_wanted = self._job is None and self.is_awaited
        has_work = bool(self._news) or is_done or is_wanted or self._due_s == 0.0
        return has_work or any(engine.has_work for engine in self.loaded)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a model to be loaded."""
        return any(one.waiting or one.is_wanted for one in self._served.values())

    @property
    def rest_s(self) -> float | None:
        """Seconds after which there may be something to do without a request; ``None``: there never is."""
        return LOAD_POLL_S if self._job is not None else self._due_s

    @property
    def _due_s(self) -> float | None:
        """Seconds until a model that stays idle is to be unloaded; ``None``: none is."""
        if not self._unload_after_s or self._loader is None:
            return None
        left = [one.used_s + self._unload_after_s for one in self._served.values() if one.is_idle]
        return max(0.0, min(left) - self._clock()) if left else None

    @property
    def waits_for_pages(self) -> bool:
        """See ``Engine``."""
        return any(engine.waits_for_pages for engine in self.loaded)

    def stats(self) -> ImageStats:
        """Of all models together; who waits for one to be loaded is waiting."""
        total = sum_of(one.stats() for one in self._served.values())
        num_waiting = total.num_waiting + sum(len(one.waiting) for one in self._served.values())
        return msgspec.structs.replace(total, num_waiting=num_waiting)

    def model_stats(self) -> tuple[ModelStats, ...]:
        """Of each."""
        return tuple(
            ModelStats(name=one.name, is_loaded=one.engine is not None, images=one.stats())
            for one in self._served.values()
        )

    def check_integrity(self) -> None:
        """See ``Engine``."""
        for engine in self.loaded:
            engine.check_integrity()

    # The verbs -----------------------------------------------------------------------------------------------------

    def check(self, request: GenerationRequest, *, num_ahead: int = 0) -> None:
        """Raise what submitting would raise, as far as that is known while its model is not loaded."""
        one = self._of(request.model)
        if one.engine is None:
            self._check_waiting(one, num_ahead)
        else:
            one.engine.check(request, num_ahead=num_ahead)

    def submit(self, request: GenerationRequest) -> None:
        """Hand ``request`` to its model's engine, or have that loaded.

        Raises what ``Engine.submit`` does, ModelNotFound, and for a short while what the last loading raised.
        """
        one = self._of(request.model)
        with self._lock:
            if one.engine is not None:
                one.engine.submit(request)
                return
            self._check_waiting(one)
            self._news.append(Queued(request_id=request.request_id, queue_position=len(one.waiting)))
            one.waiting[request.request_id] = Waiting(request, self._clock())

    def want(self, name: str) -> Engine | None:
        """The engine of a model, for whoever paints nothing; ``None`` while it is not loaded, which this asks for.

        Raises ModelNotFound, and for a short while what the last loading raised.
        """
        one = self._of(name)
        with self._lock:
            if one.engine is None:
                self._check_waiting(one)
                one.is_wanted = True
            one.used_s = self._clock()
            return one.engine

    def is_loading(self, name: str) -> bool:
        """Whether a model that is wanted is not loaded yet, and nothing is wrong with it."""
        one = self._of(name)
        return one.engine is None and one.is_wanted

    def cancel(self, request_id: str) -> bool:
        """See ``Engine``."""
        with self._lock:
            for one in self._served.values():
                if one.waiting.pop(request_id, None) is not None:
                    self._news.append(Cancelled(request_id=request_id))
                    return True
            return any(engine.cancel(request_id) for engine in self.loaded)

    def interrupt(self, request_id: str) -> bool:
        """End a request early; see :meth:`Engine.interrupt`."""
        with self._lock:
            is_waiting = any(request_id in model.waiting for model in self._served.values())
            if not is_waiting:
                return any(engine.interrupt(request_id) for engine in self.loaded)
        return self.cancel(request_id)

    def look_again(self, name: str) -> None:
        """Somebody asks for a model whose files could not be read: perhaps they can be, now. Tried now and then."""
        one = self._of(name)
        is_late = self._clock() - one.failed_s >= TRY_AGAIN_S
        if one.info is None and self._job is None and self._loader is not None and is_late:
            one.failed_s = self._clock()
            self._job = one, self._clock(), self._thread.submit(partial(self._loader.survey, one.profile))

    def tick(self) -> list[Event]:
        """One step of one engine; models that have been loaded, or are idle for too long, come and go between them."""
        self._settle()
        self.last_tick = None
        self._turn = self._next()
        events: list[Event] = []
        if self._turn is not None:
            events = self._serve(self._turn)
        elif self._job is not None and self.is_awaited and not self._news:
            wait([self._job[2]], LOAD_POLL_S)
        with self._lock:
            news, self._news = self._news, []
        return [*news, *events]

    def study(self, has_arrived: Callable[[], bool] | None = None) -> bool:
        """See ``Engine``; each in turn."""
        return any(engine.study(has_arrived) for engine in self.loaded)

    def lose_turn(self, failure: FailureReason, request_ids: Iterable[str]) -> list[str]:
        """A tick raised: everybody of the engine whose turn it was has failed. Of ``request_ids``, who they are."""
        with self._lock:
            lost = None if self._turn is None else self._turn.engine
            others = [engine for engine in self.loaded if engine is not lost]
            waiting = {name for one in self._served.values() for name in one.waiting}
            ids = [name for name in request_ids if name not in waiting and not any(one.holds(name) for one in others)]
        if lost is not None:
            lost.fail_all(failure)
        return ids

    # Whose turn it is ----------------------------------------------------------------------------------------------

    def _next(self) -> ModelEntry | None:
        """Of those with work the one served least. Whoever comes back starts with the others: nobody saves up."""
        ready = [one for one in self._served.values() if one.engine is not None and one.engine.has_work]
        for one in ready:
            if one not in self._had_work:
                one.clock_s = max(one.clock_s, self._now_s)
        self._had_work = set(ready)
        first = min(ready, key=lambda one: (one.clock_s, one.last_turn), default=None)
        if first is not None:
            self._now_s = max(self._now_s, first.clock_s)
        return first

    def _serve(self, one: ModelEntry) -> list[Event]:
        assert one.engine is not None
        self._num_turns += 1
        one.last_turn = self._num_turns
        started_s = self._clock()
        num_paths = len(one.engine.unet_paths)
        events = one.engine.tick()
        self.num_changes += len(one.engine.unet_paths) > num_paths
        one.used_s = self._clock()
        one.clock_s += one.used_s - started_s
        self.last_tick = one.engine.last_tick
        if self.last_tick is None:  # its images wait for pages, say, that others hold
            one.clock_s = max(other.clock_s for other in self._had_work)
        return events

    # Coming and going ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take in what has been loaded, begin with what is wanted, let go of what is idle for too long."""
        if self._job is not None and self._job[2].done():
            (one, started_s, done), self._job = self._job, None
            try:
                self._take(one, done.result(), self._clock() - started_s)
            except Exception as error:
                self._fail(one, error)
        for one in self._served.values():
            if one.waiting:
                self._expire(one)
            if one.waiting and one.engine is not None:
                self._hand_over(one, one.engine)
            elif one.engine is None and (one.waiting or one.is_wanted) and self._job is None:
                try:
                    self._begin(one)
                except Exception as error:
                    self._fail(one, error)
        while self._due_s == 0.0:
            idle = min((one for one in self._served.values() if one.is_idle), key=lambda one: one.used_s)
            if not self._unload(idle, f"idle for {self._unload_after_s:g} s"):
                break

    def _begin(self, one: ModelEntry) -> None:
        """Load ``one``, its needs known, beside the loop. Raises InsufficientMemory."""
        assert self._loader is not None
        work: Callable[[], Survey | DiffusionModel] = partial(self._loader.survey, one.profile)
        if one.survey is not None:
            self._make_room(one, one.survey)
            work = partial(self._loader.load, one.profile, [engine.model for engine in self.loaded])
        self._job = one, self._clock(), self._thread.submit(work)

    def _take(self, one: ModelEntry, found: Survey | DiffusionModel, load_s: float) -> None:
        if isinstance(found, Survey):
            self.num_changes += one.info is None
            one.survey, one.info, one.error = found, one.info or found.info, None
            return
        engine = Engine(found, self.config, profile=one.profile, pool=self._pool_for(found), clock=self._clock)
        logger.info("%s is loaded: %s in %.1f s", one.name, said_bytes(engine.info.weights_bytes), load_s)
        give_memory_back(found.device)  # parts that it shares with others, it had of its own for a moment
        give_heap_back()
        with self._lock:
            one.engine, one.info, one.error, one.used_s = engine, engine.info, None, self._clock()
            one.is_wanted = False
        self.num_changes += 1

    def _pool_for(self, model: DiffusionModel) -> PagePool | None:
        """The pool of all, where its pages are on the model's device and large enough; ``None``: one of its own."""
        pool = self.pool
        if pool is None or pool.arena.data.device.type != model.device.type:
            return None
        needed = PagePlan.smallest_page_bytes(image_specs(model, is_exact=True))
        return pool if needed <= pool.page_bytes else None

    def _hand_over(self, one: ModelEntry, engine: Engine) -> None:
        """Those who waited go to the engine, as far as it takes them."""
        with self._lock:
            for request_id, (request, since_s) in list(one.waiting.items()):
                try:
                    engine.submit_late(request, self._clock() - since_s)
                except QueueFull:
                    return
                except Exception as error:
                    self._news.append(failure_of(error, "taking this request").of(request_id))
                del one.waiting[request_id]

    def _expire(self, one: ModelEntry) -> None:
        late = DeadlineExceeded("the deadline passed while the model was being loaded.", param="deadline_s")
        with self._lock:
            for request_id, (request, since_s) in list(one.waiting.items()):
                if request.deadline_s is not None and self._clock() - since_s >= request.deadline_s:
                    del one.waiting[request_id]
                    self._news.append(failure_of(late, "waiting").of(request_id))

    def _fail(self, one: ModelEntry, error: Exception) -> None:
        """``one`` cannot be loaded: those who waited for it have failed."""
        reason = failure_of(error, f"loading {one.name}")
        logger.warning("%s cannot be loaded: %s", one.name, reason.message)
        is_full = isinstance(error, (InsufficientMemory, torch.OutOfMemoryError, MemoryError))
        said = reason.message.replace(one.profile.path, one.name)  # where it lies is nobody's business
        with self._lock:
            one.error = (InsufficientMemory if is_full else ModelLoadError)(said)
            one.failed_s = self._clock()
            one.survey = None  # its files may be others when it is tried again
            waiting, one.waiting, one.is_wanted = one.waiting, {}, False
            self._news += [FailureReason(one.error.code, said).of(request_id) for request_id in waiting]
        self.num_changes += 1

    def _make_room(self, one: ModelEntry, survey: Survey) -> None:
        """Unload idle models until ``one`` fits. InsufficientMemory, and nothing is unloaded, where that is too few."""
        device = torch.device(survey.info.device)
        free, needs = free_over(device, self.config.device_map), survey.needs_bytes
        if free is None or self.config.offload != "none":
            return
        idle = sorted((other for other in self._served.values() if other.is_idle), key=lambda other: other.used_s)
        held = sum(other.info.weights_bytes for other in idle if other.info)
        logger.info("%s takes %s with a step, %s are free", one.name, said_bytes(needs), said_bytes(free))
        if free + held < needs:
            busy = [other.name for other in self._served.values() if other.engine is not None and not other.is_idle]
            raise InsufficientMemory(
                f"{one.name} takes {said_bytes(needs)} with a step, and {said_bytes(free + held)} are free"
                + (f" beside {', '.join(busy)}, at work: try again later" if busy else "")
                + "; choose a smaller model or dtype, or set engine.offload."
            )
        for other in idle:
            if (now := free_over(device, self.config.device_map)) is not None and now >= needs:
                return
            self._unload(other, f"to make room for {one.name}")

    def _unload(self, one: ModelEntry, why: str) -> bool:
        """Let go of ``one``; False where it is not idle any more."""
        with self._lock:
            engine = one.engine
            if engine is None or not one.is_idle:
                return False
            one.engine, one.past = None, _without_caches(one.stats())
        device, num_bytes = engine.model.device, engine.info.weights_bytes
        engine.close({tenant for other in self.loaded for tenant in other.runners.conditioner.tenants})
        self._had_work.discard(one)
        self._turn = None
        del engine
        gc.collect()
        give_memory_back(device)
        give_heap_back()
        logger.info("%s is unloaded, %s: %s", one.name, why, said_bytes(num_bytes))
        self.num_changes += 1
        return True

    def _of(self, name: str) -> ModelEntry:
        if not name:
            return self._first
        if name not in self._served:
            known = ", ".join(self._served)
            raise ModelNotFound(f"there is no model {name[:80]!r}; this server has {known}.", param="model")
        return self._served[name]

    def _check_waiting(self, one: ModelEntry, num_ahead: int = 0) -> None:
        """Raise where nobody may wait for ``one`` now."""
        if one.error is not None and self._clock() - one.failed_s < TRY_AGAIN_S:
            raise type(one.error)(one.error.message)
        num_waiting = len(one.waiting) + num_ahead
        if num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{num_waiting} requests wait for {one.name} to be loaded; try again later.")


def _without_caches(stats: ImageStats) -> ImageStats:
    """The same of an engine that is gone, with its caches and its slots."""
    caches = {name: msgspec.structs.replace(getattr(stats, name), num_bytes=0) for name in ("results", "latents")}
    return msgspec.structs.replace(stats, **caches, num_lanes=0, num_loras=0, lora_bytes=0)

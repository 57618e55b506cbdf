"""ImageEngines: the image engines of one process, one for each loaded model, behind the interface of a single engine.

A request waits until its model is loaded (see ``model_loading``). A tick is one step of one engine: rows of different
models share no call, and start-time fair queueing over the seconds of each engine decides whose turn it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import RLock

import msgspec

from diffserve.api.engine_stats import ImageStats, ModelStats, sum_of
from diffserve.api.errors import (
    DeadlineExceeded,
    ModelNotFound,
    QueueFull,
)
from diffserve.api.types import Cancelled, Event, GenerationRequest, ModelInfo, Queued, ServedModel
from diffserve.engine.base_engine import failure_of
from diffserve.engine.image.engine import Engine
from diffserve.engine.image.model_loading import LOAD_POLL_S, Loader, ModelEntry, ModelLoading, WaitingRequest
from diffserve.engine.image.task import TickTrace
from diffserve.engine.records import FailureReason
from diffserve.rewriting.judging import MARKS, TextWindow
from diffserve.runtime.kv import PagePool


class ImageEngines:
    """Routes requests to the engines of their models, loading these when needed.

    ``submit`` and ``cancel`` may be called from any thread, the other methods only from the thread that ticks.

    Args:
        first: The engine of the default model.
        other_entries: Further models that requests may name.
        loader: Reads the other models.
        unload_after_s: Idle seconds after which a model is unloaded; 0 to keep it.
        clock: In seconds.

    Attributes:
        last_tick: What the latest tick ran; ``None`` if it had nothing to compute.
    """

    def __init__(
        self,
        first: Engine,
        other_entries: Sequence[ModelEntry] = (),
        *,
        loader: Loader | None = None,
        unload_after_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pool: PagePool | None = first.pool
        self.config = first.config
        self._num_path_changes = 0
        self.last_tick: TickTrace | None = None
        self._clock = clock
        self._first = ModelEntry(first.model.profile, info=first.info, engine=first, used_s=clock())
        self._first.profile = msgspec.structs.replace(first.model.profile, model_id=first.info.model_id)
        self._entries = {entry.name: entry for entry in (self._first, *other_entries)}
        self._lock = RLock()  # guards engines, waiting requests and events
        self._events: list[Event] = []
        self._loading = ModelLoading(
            tuple(self._entries.values()), self.config, self.pool, loader, unload_after_s, clock, self._lock
        )
        self._turn: ModelEntry | None = None
        self._had_work: set[ModelEntry] = set()
        self._now_s = 0.0
        self._num_turns = 0

    @property
    def num_changes(self) -> int:
        """Number of changes of :attr:`served` so far."""
        return self._num_path_changes + self._loading.num_changes

    @property
    def info(self) -> ModelInfo:
        """The default model."""
        assert self._first.info is not None
        return self._first.info

    @property
    def first(self) -> Engine:
        """The engine of the default model; raises ``ModelNotFound`` while it is not loaded."""
        if self._first.engine is None:
            raise ModelNotFound(f"{self._first.name} is not loaded at the moment.")
        return self._first.engine

    @property
    def loaded(self) -> list[Engine]:
        """The engines of all loaded models."""
        return self._loading.loaded

    @property
    def served(self) -> tuple[ServedModel, ...]:
        """All models that requests may name, the default one first."""
        return tuple(
            ServedModel(
                name=entry.name,
                info=entry.info,
                is_loaded=entry.engine is not None,
                problem=entry.error.message if entry.error else "",
                keeps_latents=self.config.latent_cache_bytes > 0,
                unet_paths=() if entry.engine is None else entry.engine.unet_paths,
                records_graphs=entry.engine is not None and entry.engine.records_graphs,
            )
            for entry in self._entries.values()
        )

    def window_of(self, request: GenerationRequest, first: TextWindow) -> TextWindow:
        """Return the text window of the model of ``request``.

        The tokens of a model that is not loaded are counted by ``first``, the window of the default model.
        """
        entry = self._of(request.model)
        if entry.engine is not None:
            return TextWindow.of(entry.engine.model.text)
        return first if entry.survey is None else TextWindow(entry.survey.window_tokens - MARKS, first.count)

    def family_of(self, request: GenerationRequest) -> str:
        """Return the family of the model of ``request``."""
        info = self._of(request.model).info
        return self.info.family if info is None else info.family

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something now."""
        may_load = not self._loading.is_running and self.is_awaited
        has_work = bool(self._events) or self._loading.is_done or may_load or self._loading.unload_in_s == 0.0
        return has_work or any(engine.has_work for engine in self.loaded)

    @property
    def is_awaited(self) -> bool:
        """Whether a model that is not loaded is needed."""
        return any(entry.waiting or entry.is_requested for entry in self._entries.values())

    @property
    def next_wakeup_s(self) -> float | None:
        """Seconds until there may be work without a new request; ``None`` if there will be none."""
        return LOAD_POLL_S if self._loading.is_running else self._loading.unload_in_s

    @property
    def waits_for_pages(self) -> bool:
        """Whether an image waits for pages; see ``Engine``."""
        return any(engine.waits_for_pages for engine in self.loaded)

    def stats(self) -> ImageStats:
        """Return the statistics of all models; requests for a model that is not loaded count as waiting."""
        total = sum_of(entry.stats() for entry in self._entries.values())
        num_waiting = total.num_waiting + sum(len(entry.waiting) for entry in self._entries.values())
        return msgspec.structs.replace(total, num_waiting=num_waiting)

    def model_stats(self) -> tuple[ModelStats, ...]:
        """Return the statistics of each model."""
        return tuple(
            ModelStats(name=entry.name, is_loaded=entry.engine is not None, images=entry.stats())
            for entry in self._entries.values()
        )

    def check_integrity(self) -> None:
        """Check every engine; see ``Engine.check_integrity``."""
        for engine in self.loaded:
            engine.check_integrity()

    def check(self, request: GenerationRequest, *, num_ahead: int = 0) -> None:
        """Raise the errors of ``submit`` that are known while the model is not loaded."""
        entry = self._of(request.model)
        if entry.engine is None:
            self._check_waiting(entry, num_ahead)
        else:
            entry.engine.check(request, num_ahead=num_ahead)

    def submit(self, request: GenerationRequest) -> None:
        """Submit ``request`` to the engine of its model, or queue it until the model is loaded.

        Raises the errors of ``Engine.submit``, ``ModelNotFound``, and for 30 seconds the error of a failed load.
        """
        entry = self._of(request.model)
        with self._lock:
            if entry.engine is not None:
                entry.engine.submit(request)
                return
            self._check_waiting(entry)
            self._events.append(Queued(request_id=request.request_id, queue_position=len(entry.waiting)))
            entry.waiting[request.request_id] = WaitingRequest(request, self._clock())

    def request_engine(self, name: str) -> Engine | None:
        """Return the engine of a model, or ``None`` and load the model.

        Raises ``ModelNotFound``, and for 30 seconds the error of a failed load.
        """
        entry = self._of(name)
        with self._lock:
            if entry.engine is None:
                self._check_waiting(entry)
                entry.is_requested = True
            entry.used_s = self._clock()
            return entry.engine

    def is_loading(self, name: str) -> bool:
        """Return whether a model passed to ``request_engine`` is still being loaded."""
        entry = self._of(name)
        return entry.engine is None and entry.is_requested

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; see ``Engine.cancel``."""
        with self._lock:
            for entry in self._entries.values():
                if entry.waiting.pop(request_id, None) is not None:
                    self._events.append(Cancelled(request_id=request_id))
                    return True
            return any(engine.cancel(request_id) for engine in self.loaded)

    def interrupt(self, request_id: str) -> bool:
        """End a request early; see :meth:`Engine.interrupt`."""
        with self._lock:
            is_waiting = any(request_id in model.waiting for model in self._entries.values())
            if not is_waiting:
                return any(engine.interrupt(request_id) for engine in self.loaded)
        return self.cancel(request_id)

    def retry_load(self, name: str) -> None:
        """Read the files of a model again that could not be read before, at most every 30 seconds."""
        self._loading.retry_survey(self._of(name))

    def tick(self) -> list[Event]:
        """Run one step of one engine, after loading and unloading models."""
        self._load_and_unload()
        self.last_tick = None
        self._turn = self._next()
        events: list[Event] = []
        if self._turn is not None:
            events = self._serve(self._turn)
        elif self.is_awaited and not self._events:
            self._loading.wait()
        with self._lock:
            outbox, self._events = self._events, []
        return [*outbox, *events]

    def study(self, has_arrived: Callable[[], bool] | None = None) -> bool:
        """Measure a shape of any engine; see ``Engine.study``."""
        return any(engine.study(has_arrived) for engine in self.loaded)

    def fail_active(self, failure: FailureReason, request_ids: Iterable[str]) -> list[str]:
        """Fail all requests of the engine whose tick raised, and return which of ``request_ids`` they are."""
        with self._lock:
            failed = None if self._turn is None else self._turn.engine
            other_engines = [engine for engine in self.loaded if engine is not failed]
            waiting = {name for entry in self._entries.values() for name in entry.waiting}
            ids = [
                name
                for name in request_ids
                if name not in waiting and not any(entry.holds(name) for entry in other_engines)
            ]
        if failed is not None:
            failed.fail_all(failure)
        return ids

    def _next(self) -> ModelEntry | None:
        """Return the model with work that was served least; a model that was idle earns no credit."""
        ready = [entry for entry in self._entries.values() if entry.engine is not None and entry.engine.has_work]
        for entry in ready:
            if entry not in self._had_work:
                entry.clock_s = max(entry.clock_s, self._now_s)
        self._had_work = set(ready)
        first = min(ready, key=lambda entry: (entry.clock_s, entry.last_turn), default=None)
        if first is not None:
            self._now_s = max(self._now_s, first.clock_s)
        return first

    def _serve(self, entry: ModelEntry) -> list[Event]:
        assert entry.engine is not None
        self._num_turns += 1
        entry.last_turn = self._num_turns
        started_s = self._clock()
        num_paths = len(entry.engine.unet_paths)
        events = entry.engine.tick()
        self._num_path_changes += len(entry.engine.unet_paths) > num_paths
        entry.used_s = self._clock()
        entry.clock_s += entry.used_s - started_s
        self.last_tick = entry.engine.last_tick
        if self.last_tick is None:  # for example, its images wait for pages that others hold
            entry.clock_s = max(other.clock_s for other in self._had_work)
        return events

    def _load_and_unload(self) -> None:
        """Finish a load, hand waiting requests to their engines, start the next load, and unload idle models."""
        self._add_events(self._loading.finish())
        for entry in self._entries.values():
            if entry.waiting:
                self._expire(entry)
            if entry.waiting and entry.engine is not None:
                self._hand_over(entry, entry.engine)
            elif entry.engine is None and (entry.waiting or entry.is_requested) and not self._loading.is_running:
                self._add_events(self._loading.begin(entry))
        self._loading.unload_idle()

    def _add_events(self, events: Iterable[Event]) -> None:
        with self._lock:
            self._events += events

    def _hand_over(self, entry: ModelEntry, engine: Engine) -> None:
        """Submit the waiting requests of ``entry`` to its engine, as far as it accepts them."""
        with self._lock:
            for request_id, (request, since_s) in list(entry.waiting.items()):
                try:
                    engine.submit_late(request, self._clock() - since_s)
                except QueueFull:
                    return
                except Exception as error:
                    self._events.append(failure_of(error, "taking this request").of(request_id))
                del entry.waiting[request_id]

    def _expire(self, entry: ModelEntry) -> None:
        late = DeadlineExceeded("the deadline passed while the model was being loaded.", param="deadline_s")
        with self._lock:
            for request_id, (request, since_s) in list(entry.waiting.items()):
                if request.deadline_s is not None and self._clock() - since_s >= request.deadline_s:
                    del entry.waiting[request_id]
                    self._events.append(failure_of(late, "waiting").of(request_id))

    def _of(self, name: str) -> ModelEntry:
        if not name:
            return self._first
        if name not in self._entries:
            names = ", ".join(self._entries)
            raise ModelNotFound(f"there is no model {name[:80]!r}; this server has {names}.", param="model")
        return self._entries[name]

    def _check_waiting(self, entry: ModelEntry, num_ahead: int = 0) -> None:
        """Raise if no request may wait for ``entry`` now."""
        if entry.error is not None and not self._loading.may_retry(entry):
            raise type(entry.error)(entry.error.message)
        num_waiting = len(entry.waiting) + num_ahead
        if num_waiting >= self.config.max_waiting:
            raise QueueFull(f"{num_waiting} requests wait for {entry.name} to be loaded; try again later.")

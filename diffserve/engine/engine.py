"""The public face of the engine: submit, cancel, tick, and the convenient ways to wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from diffserve.config import EngineConfig, load_settings
from diffserve.disk_cache import DiskCache
from diffserve.engine.admission import Admission
from diffserve.engine.core import EngineCore
from diffserve.engine.plan import TickTrace
from diffserve.engine.sizing import Sized
from diffserve.engine.task import Failure, GroupKey, LiveRequest
from diffserve.engine_stats import ImageStats
from diffserve.errors import (
    DeadlineExceeded,
    DiffserveError,
    EngineUnavailable,
    InvalidRequest,
    NumericalError,
    QueueFull,
)
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.kv import PagePool, PoolStats
from diffserve.types import (
    TERMINAL,
    Accepted,
    Cancelled,
    Event,
    Failed,
    GenerationRequest,
    ImageResult,
    ModelInfo,
    ModelProfile,
    Painted,
)

ERROR_OF_CODE: dict[str, type[DiffserveError]] = {
    "deadline_exceeded": DeadlineExceeded,
    "numerical_error": NumericalError,
}


class Engine:
    """Paints requests in mixed batches. Safe to call from any thread; nothing runs unless somebody ticks.

    ``generate`` and ``stream`` tick in the calling thread. A server calls :meth:`submit`, :meth:`cancel` and, in a
    loop, :meth:`tick`. Every event is delivered exactly once: to the ``generate`` or ``stream`` that submitted the
    request, else by the next :meth:`tick`.

    ``pool``: a page pool that other tenants use too, in the thread that ticks; its pages must suit ``image_specs``.
    Without one the engine makes its own, of ``config.kv_pool_bytes``. ``clock``: in seconds.
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig | None = None,
        *,
        profile: ModelProfile | None = None,
        pool: PagePool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.config = config or EngineConfig()
        defaults = None if profile is None else profile.diffusion
        self._admission = Admission(model.info, model.schedule, model.scheduler_config, defaults)
        self._core = EngineCore(model, self.config, clock, pages=pool)
        self._lock = threading.Lock()  # guards the four below
        self._inbox: dict[str, LiveRequest] = {}
        self._cancelled: list[str] = []
        self._outbox: deque[Event] = deque()
        self._mailboxes: dict[str, deque[Event]] = {}
        self._ticking = threading.Lock()  # one tick at a time
        self._is_draining = False

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "embedded",
        *,
        dtype: str = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
        profile: ModelProfile | None = None,
    ) -> Engine:
        """Load "embedded", its student "embedded-turbo", a diffusers directory or a single safetensors file, and put an
        engine on it.

        ``profile`` gives the defaults, ``config`` says how to batch; where both are left out, the built-in file that
        fits the model gives them. Raises ModelNotFound, ModelLoadError or ConfigError.
        """
        if profile is None:
            settings = load_settings(model=str(model), env={})
            profile, config = settings.model, config or settings.engine
        config = config or EngineConfig()
        cache = DiskCache.at(config.cache_dir)
        loaded = load_model(model, dtype=dtype, device=device, profile=profile, cache=cache)
        return cls(loaded, config, profile=profile)

    # What it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What the model can do and where it runs."""
        return self.model.info

    @property
    def is_deterministic(self) -> bool:
        """Whether an image's bytes are independent of its neighbours."""
        return self._core.runners.groups.is_deterministic

    @property
    def tolerance(self) -> float:
        """By how much a latent may differ from its solo run: 0 when deterministic, else rounding (fp32; 16 bits)."""
        if self.is_deterministic:
            return 0.0
        return 1e-3 if self.info.dtype == "float32" else 5e-2

    @property
    def buckets(self) -> dict[GroupKey, tuple[int, ...]]:
        """The UNet batch sizes in use for each group seen so far."""
        return self._core.runners.groups.describe()

    @property
    def num_threads(self) -> int:
        """Threads that UNet calls run on now, where several numbers may be tried (``config.threads``)."""
        return self._core.runners.groups.threads.choice.current

    @property
    def trace(self) -> tuple[TickTrace, ...]:
        """The last ``config.trace_ticks`` ticks: which rows of which requests shared a UNet call."""
        return tuple(self._core.trace)

    @property
    def last_tick(self) -> TickTrace | None:
        """What the latest tick ran; ``None`` when there was nobody to advance."""
        trace = self._core.trace
        return trace[-1] if trace and trace[-1].tick == self._core.scheduler.num_ticks else None

    def stats(self) -> ImageStats:
        """Counters for the metrics; requests that no tick has seen yet are waiting too."""
        with self._ticking, self._lock:
            stats = self._core.stats()
            return msgspec.structs.replace(stats, num_waiting=stats.num_waiting + len(self._inbox))

    @property
    def waits_for_pages(self) -> bool:
        """Whether an image would have been let in by the latest tick, had there been pages."""
        return self._core.num_postponed > 0 and self._core.scheduler.has_work

    @property
    def pool(self) -> PagePool | None:
        """Where the pages of prompts are; ``None`` where ``config.cross_attention`` is "plain"."""
        return self._core.runners.conditioner.pool

    @property
    def page_stats(self) -> PoolStats | None:
        """Pages and prefix hits by tenant; ``None`` where ``config.cross_attention`` is "plain"."""
        with self._ticking:
            return None if self.pool is None else self.pool.stats()

    @property
    def has_work(self) -> bool:
        """Whether a tick would do or deliver something."""
        with self._lock:
            queued = bool(self._inbox or self._cancelled or self._outbox)
        return queued or self._core.scheduler.has_work

    @property
    def num_live(self) -> int:
        """Requests accepted and not yet over."""
        with self._lock:
            return len(self._inbox) + len(self._core.scheduler.live)

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest picture among the requests that are live, 0 when there is none."""
        live = (*self._inbox.copy().values(), *self._core.scheduler.live.copy().values())
        return max((one.settings.width_px * one.settings.height_px for one in live), default=0)

    @property
    def num_free_lanes(self) -> int:
        """Lanes no image holds; all ``config.max_lanes`` of them when idle."""
        return self._core.scheduler.lanes.num_free

    # The five verbs -----------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> str:
        """Queue ``request`` and return its id. Raises InvalidRequest, QueueFull, EngineUnavailable (draining)."""
        return self._submit(request, mailbox=None)

    def check(self, request: GenerationRequest, *, num_ahead: int = 0) -> None:
        """Raise what :meth:`submit` would raise, and queue nothing. ``num_ahead``: others that will come first."""
        self._admission.admit(request, self._core.clock())
        with self._lock:
            self._refuse_if_full(request.request_id, num_ahead)

    def cancel(self, request_id: str) -> bool:
        """Give a request up; its lanes are free before the next step runs. False when it is not (or no longer) live."""
        with self._lock:
            if self._inbox.pop(request_id, None) is not None:
                self._post(Cancelled(request_id=request_id))
                return True
            if request_id not in self._core.scheduler.live or request_id in self._cancelled:
                return False
            self._cancelled.append(request_id)
            return True

    def tick(self) -> list[Event]:
        """Run one engine iteration and return what happened; cheap when there is nothing to do."""
        self._advance()
        with self._lock:
            events = list(self._outbox)
            self._outbox.clear()
        return events

    def fail_all(self, failure: Failure) -> None:
        """Give up everything, after a tick that raised; the next tick tells. Raises when not even that can be done."""
        with self._ticking:
            self._take_inbox()
            for live in tuple(self._core.scheduler.live.values()):
                events = [event for task in live.tasks for event in self._core.scheduler.fail(task, failure)]
                with self._lock:
                    for event in events:
                        self._post(event)

    def events(self) -> Iterator[Event]:
        """Tick while there is work and yield what happens."""
        while self.has_work:
            yield from self.tick()

    def drain(self) -> list[Event]:
        """Take no more requests, finish those accepted, return the remaining events."""
        self._is_draining = True
        return list(self.events())

    # Convenient ways ----------------------------------------------------------------------------------------------

    def generate(self, request: str | GenerationRequest | Sequence[GenerationRequest]) -> list[ImageResult]:
        """Paint and wait: the images in order of request and image index. A list may be longer than the waiting room.

        A size that the model does not paint is painted at the nearest that it does well, and resized.

        Raises what :meth:`submit` raises (but QueueFull), and for a request that gave no image DeadlineExceeded,
        NumericalError, InvalidRequest or DiffserveError; a request of which only some images failed gives the others.
        """
        if isinstance(request, str):
            request = GenerationRequest(prompt=request)
        requests = [request] if isinstance(request, GenerationRequest) else list(request)
        sized = [Sized.of(one, self.info) for one in requests]
        submitted: list[str] = []
        try:
            for one in sized:
                submitted.append(self._submit_in_turn(one.request))
            events = [
                [one.deliver(event) for event in self._follow(request_id)]
                for one, request_id in zip(sized, submitted, strict=True)
            ]
        finally:
            self._abandon(submitted)
        for history in events:
            raise_if_failed(history[-1])
        painted = [event.result for history in events for event in history if isinstance(event, Painted)]
        order = {request_id: place for place, request_id in enumerate(submitted)}
        return sorted(painted, key=lambda result: (order[result.request_id], result.image_index))

    def stream(self, request: str | GenerationRequest) -> Iterator[Event]:
        """Paint and watch: the request's events up to its terminal one. Closing the iterator cancels the request."""
        if isinstance(request, str):
            request = GenerationRequest(prompt=request)
        sized = Sized.of(request, self.info)
        request_id = self._submit(sized.request, mailbox=deque())
        try:
            yield from map(sized.deliver, self._follow(request_id))
        finally:
            self._abandon([request_id])

    def warm_up(self) -> None:
        """Know the buckets of the native size and touch every network, so that the first request pays for neither."""
        with self._ticking:
            self._core.runners.warm_up(self.info.good_sizes)

    def study(self) -> bool:
        """Measure a little of what is painted cautiously for now, for whoever is idle; one UNet call.

        False where there is nothing to measure.
        """
        with self._ticking:
            return self._core.runners.study()

    def check_integrity(self) -> None:
        """Lanes and pages: free + used = total, and nobody is lost; AssertionError or PoolIntegrityError otherwise."""
        with self._ticking:
            self._core.check_integrity()

    # Below the counter --------------------------------------------------------------------------------------------

    def _submit(self, request: GenerationRequest, mailbox: deque[Event] | None) -> str:
        live = self._admission.admit(request, self._core.clock())
        request_id = request.request_id
        with self._lock:
            ahead = self._refuse_if_full(request_id)
            if mailbox is not None:
                self._mailboxes[request_id] = mailbox
            live.queue_position = ahead
            self._inbox[request_id] = live
            self._post(
                Accepted(
                    request_id=request_id,
                    seed=live.seed,
                    num_images=request.num_images,
                    queue_position=ahead,
                    warnings=live.warnings,
                )
            )
        return request_id

    def _submit_in_turn(self, request: GenerationRequest) -> str:
        """Submit to a mailbox, ticking for as long as the waiting room is full."""
        while True:
            try:
                return self._submit(request, mailbox=deque())
            except QueueFull:
                self._advance()

    def _refuse_if_full(self, request_id: str, num_ahead: int = 0) -> int:
        """Requests ahead in the waiting room; raises when this one cannot join them."""
        if self._is_draining:
            raise EngineUnavailable("the engine is finishing its work and takes no more requests.")
        running = dict(self._core.scheduler.live)
        if request_id in running or request_id in self._inbox:
            raise InvalidRequest(f"request_id {request_id!r} is already being painted.", param="request_id")
        waiting = [live for live in running.values() if not live.has_started and live.request_id not in self._cancelled]
        num_waiting = len(self._inbox) + len(waiting) + num_ahead
        if num_waiting >= self.config.max_waiting:
            raise QueueFull(
                f"{num_waiting} requests are waiting, which is all this engine holds; try again later.",
                retry_after_s=self._core.seconds_left(),
            )
        return num_waiting

    def _advance(self) -> None:
        with self._ticking:
            self._tick_once()

    def _tick_once(self) -> None:
        self._take_inbox()
        events = self._core.tick(self._take_cancelled)
        with self._lock:
            for event in events:
                self._post(event)

    def _take_inbox(self) -> None:
        with self._lock:
            for live in self._inbox.values():
                self._core.scheduler.add(live)
            self._inbox = {}

    def _take_cancelled(self) -> list[str]:
        with self._lock:
            taken, self._cancelled = self._cancelled, []
            return taken

    def _post(self, event: Event) -> None:
        """Into the mailbox of whoever follows the request, else out with the next tick. The lock is held."""
        self._mailboxes.get(event.request_id, self._outbox).append(event)

    def _follow(self, request_id: str) -> Iterator[Event]:
        """Events of one request as they come, ticking when there are none."""
        while True:
            event = self._next_event(request_id)
            if event is None:
                with self._ticking:  # another thread's tick may have brought news meanwhile
                    event = self._next_event(request_id)
                    if event is None:
                        self._tick_once()
                        continue
            yield event
            if isinstance(event, TERMINAL):
                return

    def _next_event(self, request_id: str) -> Event | None:
        with self._lock:
            mailbox = self._mailboxes[request_id]
            return mailbox.popleft() if mailbox else None

    def _abandon(self, request_ids: Sequence[str]) -> None:
        """Nobody follows these any more: what is still live is cancelled, and the news of it dropped."""
        for request_id in request_ids:
            if self.cancel(request_id):
                self._advance()
            with self._lock:
                self._mailboxes.pop(request_id, None)


def raise_if_failed(event: Event) -> None:
    """Raise the error that a ``Failed`` or ``Cancelled`` event stands for."""
    if isinstance(event, Cancelled):
        raise DiffserveError(f"request {event.request_id} was cancelled.", code="cancelled")
    if isinstance(event, Failed):
        blamed = InvalidRequest if event.param is not None else DiffserveError
        raise ERROR_OF_CODE.get(event.code, blamed)(event.message, param=event.param, code=event.code)

"""Pictures: ``Engine``, what a tick of them is, and its public face."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from diffserve.config import EngineConfig, load_settings
from diffserve.disk_cache import DiskCache
from diffserve.engine.delivery import raise_if_failed
from diffserve.engine.engine import CoreEngine
from diffserve.engine.image.admission import ImageAdmission
from diffserve.engine.image.runner import ImageRunner
from diffserve.engine.image.scheduler import RequestScheduler
from diffserve.engine.image.task import GroupKey, LiveRequest, TickOutcome, TickPlan, TickTrace
from diffserve.engine.records import TickBudget
from diffserve.engine_stats import ImageStats
from diffserve.pace import Pace
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.kv import PagePool, PoolStats
from diffserve.sizes import Sized
from diffserve.types import (
    TERMINAL,
    Accepted,
    Event,
    GenerationRequest,
    ImageResult,
    ModelInfo,
    ModelProfile,
    Painted,
)

STUDY_SHARE = 0.125
MOST_CREDIT_S = 1.0
BATCH_WAIT_S = 1e-3


class Engine(CoreEngine[GenerationRequest, LiveRequest, Event]):
    """Paints requests in mixed batches. Safe to call from any thread; nothing runs unless somebody ticks.

    ``generate`` and ``stream`` tick in the calling thread. A server calls :meth:`submit`, :meth:`cancel` and, in a
    loop, :meth:`tick`. Every event is delivered exactly once: to the ``generate`` or ``stream`` that submitted the
    request, else by the next :meth:`tick`.

    ``pool``: a page pool that other tenants use too, in the thread that ticks; its pages must suit ``image_specs``.
    Without one the engine makes its own, of ``config.kv_pool_bytes``. ``clock``: in seconds.
    """

    doing = "painting this image"
    outcome = TickOutcome
    terminal = TERMINAL

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
        super().__init__(self.config.max_waiting, self.config.trace_ticks, clock)
        defaults = None if profile is None else profile.diffusion
        self.runners: ImageRunner = ImageRunner(model, self.config, clock, pool)
        self._admission = ImageAdmission(
            model.info,
            model.schedule,
            model.scheduler_config,
            defaults,
            keeps_latents=self.config.latent_cache_bytes > 0,
            noise_source=self.config.noise_source,
            check_room=self.runners.check_room,
        )
        self.scheduler: RequestScheduler = RequestScheduler(self.config, model.info, self.runners)
        self._num_postponed = 0  # images that the latest tick would have let in, had there been pages
        self._counts = Counter[str]()
        self._pace = Pace(clock)
        self._study_credit_s = 0.0

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
        """Load "embedded", "embedded-turbo" (distilled from it), a diffusers directory or a single safetensors file,
        and put an engine on it.

        ``profile`` gives the defaults, ``config`` says how to batch; where both are left out, the built-in file that
        fits the model gives them. Raises ModelNotFound, ModelLoadError or ConfigError.
        """
        if profile is None:
            settings = load_settings(model=str(model), env={})
            profile, config = settings.model, config or settings.engine
        config = config or EngineConfig()
        cache = DiskCache.at(config.cache_dir)
        loaded = load_model(model, dtype=dtype, device=device, offload=config.offload, profile=profile, cache=cache)
        return cls(loaded, config, profile=profile)

    # What it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What the model can do and where it runs."""
        return self.model.info

    @property
    def is_deterministic(self) -> bool:
        """Whether an image's bytes are independent of its neighbours."""
        return self.runners.groups.is_deterministic

    @property
    def tolerance(self) -> float:
        """By how much a latent may differ from its solo run: 0 when deterministic, else rounding (fp32; 16 bits)."""
        if self.is_deterministic:
            return 0.0
        return 1e-3 if self.info.dtype == "float32" else 5e-2

    @property
    def buckets(self) -> dict[GroupKey, tuple[int, ...]]:
        """The UNet batch sizes in use for each group seen so far."""
        return self.runners.groups.describe()

    @property
    def num_threads(self) -> int:
        """Threads that UNet calls run on now, where several numbers may be tried (``config.threads``)."""
        return self.runners.groups.threads.choice.current

    def stats(self) -> ImageStats:
        """Counters for the metrics; requests that no tick has seen yet are waiting too."""
        with self._ticking, self._lock:
            waiting = sum(not live.has_started for live in self.scheduler.live.values())
            return ImageStats(
                num_running=len(self.scheduler.in_flight),
                num_waiting=waiting + len(self._inbox),
                num_steps=self._counts["steps"],
                num_rows=self._counts["rows"],
                num_painted=self._counts["painted"],
                num_failed=self._counts["failed"],
                busy_s=self._busy_s,
                results=self.scheduler.results.stats,
                latents=self.runners.kept.stats,
            )

    def check_integrity(self) -> None:
        """No lane, image or page is lost; AssertionError or PoolIntegrityError says what is wrong."""
        with self._ticking:
            self.scheduler.check_integrity()
            self.runners.check_integrity(self.scheduler.in_flight)

    @property
    def waits_for_pages(self) -> bool:
        """Whether an image would have been let in by the latest tick, had there been pages."""
        return self._num_postponed > 0 and self.scheduler.has_work

    @property
    def pool(self) -> PagePool | None:
        """Where the pages of prompts are; ``None`` where ``config.cross_attention`` is "plain"."""
        return self.runners.conditioner.pool

    @property
    def page_stats(self) -> PoolStats | None:
        """Pages and prefix hits by tenant; ``None`` where ``config.cross_attention`` is "plain"."""
        with self._ticking:
            return None if self.pool is None else self.pool.stats()

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest picture among the requests that are live, 0 when there is none."""
        live = (*self._inbox.copy().values(), *self.scheduler.live.copy().values())
        return max((one.settings.width_px * one.settings.height_px for one in live), default=0)

    # The verbs ----------------------------------------------------------------------------------------------------

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
        histories = self._answer([one.request for one in sized])
        for history in histories:
            raise_if_failed(history[-1])
        results: list[ImageResult] = []
        for one, history in zip(sized, histories, strict=True):
            painted = [event.result for event in map(one.deliver, history) if isinstance(event, Painted)]
            results += sorted(painted, key=lambda result: result.image_index)
        return results

    def stream(self, request: str | GenerationRequest) -> Iterator[Event]:
        """Paint and watch: the request's events up to its terminal one. Closing the iterator cancels the request."""
        if isinstance(request, str):
            request = GenerationRequest(prompt=request)
        sized = Sized.of(request, self.info)
        events = self._watch(sized.request)
        try:
            yield from map(sized.deliver, events)
        finally:
            events.close()

    def warm_up(self) -> None:
        """Know the buckets of the native size and touch every network, so that the first request pays for neither."""
        with self._ticking:
            self.runners.warm_up(self.info.good_sizes)

    def study(self) -> bool:
        """Measure a little of what is painted cautiously for now, for whoever is idle; one UNet call.

        False where there is nothing to measure.
        """
        with self._ticking:
            return self.runners.study()

    # Below the counter --------------------------------------------------------------------------------------------

    def _admit(self, request: GenerationRequest) -> LiveRequest:
        return self._admission.admit(request, self.clock())

    def _accepted(self, live: LiveRequest, num_ahead: int) -> Event:
        live.queue_position = num_ahead
        return Accepted(
            request_id=live.request_id,
            seed=live.seed,
            num_images=live.request.num_images,
            queue_position=num_ahead,
            warnings=live.warnings,
        )

    def _seconds_left(self) -> float:
        """Seconds that everything accepted will take at the recent pace, at least one; one where no pace is known."""
        return max(1.0, self._pace.seconds(self.scheduler.cost_left) or 1.0)

    def _plan(self, budget: TickBudget) -> TickPlan:
        self._pace.begin()
        plan = self.scheduler.plan(self.clock())
        if self.scheduler.in_flight and not plan.tasks:  # a batch of equals waits to be full
            time.sleep(BATCH_WAIT_S)
        return plan

    def _apply(self, plan: TickPlan, outcome: TickOutcome, started_s: float) -> list[Event]:
        self._num_postponed = len(outcome.postponed)
        events = self.scheduler.apply(plan, outcome) + self.scheduler.moved_up(self.clock())
        self.runners.trim(self.scheduler.in_flight)
        self._remember(plan, outcome, started_s)
        self._pace.did(plan.cost)
        self._study(plan)
        if not self.scheduler.has_work:
            self._pace.rest()
        return events

    def _study(self, plan: TickPlan) -> None:
        """While images of a group that is not measured wait for each other, measure it: an eighth of the time."""
        if plan.group is None:
            return
        wanted = filter(self.runners.groups.is_wanted, (plan.group, plan.group._replace(is_shallow=True)))
        group = next(wanted, None)
        if group is None:
            return
        if sum(task.group == plan.group for task in self.scheduler.in_flight) <= len(plan.rows):
            return
        self._study_credit_s = min(self._study_credit_s + STUDY_SHARE * self._trace[-1].wall_s, MOST_CREDIT_S)
        if self._study_credit_s >= 0.0:
            started_s = self.clock()
            self.runners.study(group)
            self._study_credit_s -= self.clock() - started_s

    def _remember(self, plan: TickPlan, outcome: TickOutcome, started_s: float) -> None:
        if not plan.tasks:
            return
        tick = TickTrace(
            tick=self.scheduler.num_ticks,
            calls=tuple(outcome.calls),
            num_prepared=len(plan.prepare),
            num_decoded=len(outcome.pictures),
            wall_s=self.clock() - started_s,
        )
        self._trace.append(tick)
        self._busy_s += tick.wall_s
        self._counts.update(
            steps=bool(tick.calls), rows=tick.num_rows, painted=tick.num_decoded, failed=len(outcome.failures)
        )

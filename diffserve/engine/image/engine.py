"""Engine: generates images of one model, in mixed batches of many requests."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from diffserve.api.engine_stats import ImageStats, StepTally
from diffserve.api.errors import DeadlineUnreachable
from diffserve.api.pace import Pace
from diffserve.api.sizes import Sized
from diffserve.api.types import (
    CHECKER,
    TERMINAL,
    Accepted,
    Cancelled,
    Event,
    GenerationRequest,
    ImageFinished,
    ImageResult,
    ModelInfo,
    ModelProfile,
    UNetPath,
)
from diffserve.disk_cache import DiskCache
from diffserve.engine.base_engine import TRACE_TICKS, BaseEngine
from diffserve.engine.image.admission import ImageAdmission
from diffserve.engine.image.captures import admit_resumed
from diffserve.engine.image.outputs import AdapterDigests, CheckerScorer, ImageScores, refuse_best_of
from diffserve.engine.image.runner import ImageRunner, control_groups
from diffserve.engine.image.scheduler import RequestScheduler
from diffserve.engine.image.task import GroupKey, LiveRequest, TickOutcome, TickPlan, TickTrace, row_seconds
from diffserve.engine.records import TickBudget, shares
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.kv import PagePool, PoolStats
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

STUDY_SHARE = 0.125
MOST_CREDIT_S = 1.0
BATCH_WAIT_S = 1e-3


class Engine(BaseEngine[GenerationRequest, LiveRequest, Event]):
    """Generates images in mixed batches; all methods are thread-safe, and work happens only in :meth:`tick`.

    ``generate`` and ``stream`` call :meth:`tick` in the calling thread. A server calls :meth:`submit`, :meth:`cancel`
    and, in a loop, :meth:`tick`. Every event is delivered exactly once: to the ``generate`` or ``stream`` that
    submitted the request, else by the next :meth:`tick`.

    Args:
        model: The loaded model.
        config: How to batch.
        profile: Defaults of requests.
        pool: A page pool shared with other tenants of the same thread, with pages that suit ``image_specs``. Without
            one, the engine makes its own pool of ``config.kv_pool_bytes``.
        clock: In seconds.
        trace_ticks: Number of ticks to remember for inspection.
    """

    doing = "generating this image"
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
        trace_ticks: int = TRACE_TICKS,
    ) -> None:
        self.model = model
        self.config = config or EngineConfig()
        super().__init__(self.config.max_waiting, clock, trace_ticks)
        defaults = None if profile is None else profile.diffusion
        self.runners: ImageRunner = ImageRunner(model, self.config, clock, pool)
        scores = ImageScores(CheckerScorer() if model.info.scorer == CHECKER else model.scorer)
        self._admission = ImageAdmission(
            model.info,
            model.schedule,
            model.scheduler_config,
            defaults,
            keeps_latents=self.config.latent_cache_bytes > 0,
            noise_source=self.config.noise_source,
            check_room=self.runners.check_room,
            check_loras=self.runners.loras.check,
            check_controlnets=lambda controls: self.runners.controlnets.check(controls),
            check_references=lambda references: self.runners.references.check(references),
            check_upscaler=self.runners.upscalers.check_between_passes,
            may_decode=self.config.stage == "all",
            check_scores=scores.check if self.config.stage == "all" else refuse_best_of,
        )
        self.scheduler: RequestScheduler = RequestScheduler(
            self.config, model.info, self.runners, scores, self._digests
        )
        self._num_postponed = 0  # images that the latest tick could not prepare for lack of pages
        self._interrupted: dict[str, None] = {}  # guarded by the lock
        self._counts = Counter[str]()
        self._steps = StepTally()
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
        """Load a model and return an engine for it.

        Args:
            model: "embedded", "embedded-turbo" (distilled from it), a diffusers directory or a safetensors file.
            dtype: Precision of the weights.
            device: Device of the model.
            config: How to batch; by default from the built-in settings of the model.
            profile: Defaults of requests; by default from the same settings.

        Raises:
            ModelNotFound: There is no such model.
            ModelLoadError: Its files cannot be loaded.
            ConfigError: A setting does not fit the model.
        """
        if profile is None:
            settings = load_settings(model=str(model), env={})
            profile, config = settings.model, config or settings.engine
        config = config or EngineConfig()
        cache = DiskCache.at(config.cache_dir)
        load = partial(load_model, device=device, dtype=dtype, offload=config.offload, device_map=config.device_map)
        loaded = load(model, profile=profile, cache=cache)
        return cls(loaded, config, profile=profile)

    @property
    def info(self) -> ModelInfo:
        """Description of the model and its device."""
        return self.model.info

    @property
    def unet_paths(self) -> tuple[UNetPath, ...]:
        """The implementation of UNet calls chosen for each shape so far; empty if shapes are measured instead."""
        return self.runners.groups.unet_paths

    @property
    def records_graphs(self) -> bool:
        """Whether UNet calls are recorded as CUDA graphs."""
        return self.runners.groups.compiled.graphs is not None

    @property
    def is_deterministic(self) -> bool:
        """Whether an image's bytes are independent of the rest of the batch."""
        return self.runners.groups.is_deterministic

    @property
    def tolerance(self) -> float:
        """Largest difference of a latent from its run alone: 0 if deterministic, else rounding of fp32 or 16 bits."""
        if self.is_deterministic:
            return 0.0
        return 1e-3 if self.info.dtype == "float32" else 5e-2

    @property
    def buckets(self) -> dict[GroupKey, tuple[int, ...]]:
        """UNet batch sizes in use for each group so far."""
        return self.runners.groups.describe()

    @property
    def num_threads(self) -> int:
        """Threads that UNet calls currently run on (see ``config.threads``)."""
        return self.runners.groups.threads.choice.current

    def stats(self) -> ImageStats:
        """Return counters for the metrics; requests in the inbox count as waiting."""
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
                latents=self.runners.latent_cache.stats,
                num_lanes=self.scheduler.slots.num_slots,
                num_loras=self.runners.loras.num_kept,
                lora_bytes=self.runners.loras.num_bytes,
                steps=self._steps.stats,
            )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` or ``PoolIntegrityError`` if a slot, an image or a page is lost."""
        with self._ticking:
            self.scheduler.check_integrity()
            self.runners.check_integrity(self.scheduler.in_flight)

    @property
    def waits_for_pages(self) -> bool:
        """Whether the latest tick could not prepare an image for lack of pages."""
        return self._num_postponed > 0 and self.scheduler.has_work

    @property
    def pool(self) -> PagePool | None:
        """The page pool of prompts; ``None`` if the UNet uses no pages."""
        return self.runners.conditioner.pool

    @property
    def page_stats(self) -> PoolStats | None:
        """Pages and prefix hits by tenant; ``None`` if the UNet uses no pages."""
        with self._ticking:
            return None if self.pool is None else self.pool.stats()

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest image among the live requests, 0 if there is none."""
        live = (*self._inbox.copy().values(), *self.scheduler.live.copy().values())
        return max((each.settings.width_px * each.settings.height_px for each in live), default=0)

    def close(self, kept_tenants: Collection[str] = ()) -> None:
        """Release the pages of the engine's tenants except ``kept_tenants``, and end its compiler process."""
        with self._ticking:
            self.runners.close(kept_tenants)

    def generate(self, request: str | GenerationRequest | Sequence[GenerationRequest]) -> list[ImageResult]:
        """Generate images and return them in the order of requests and image indices.

        A list may be longer than ``max_waiting``. A size that the model does not support is generated at the nearest
        good size and resized. If some images of a request fail, the others are returned.

        Raises:
            DeadlineExceeded: A request has no image before its deadline.
            NumericalError: The latents of all images of a request are not finite.
            InvalidRequest: A field of a request is invalid.
            DiffserveError: A request failed for another reason; also what :meth:`submit` raises, except QueueFull.
        """
        if isinstance(request, str):
            request = GenerationRequest(prompt=request)
        requests = [request] if isinstance(request, GenerationRequest) else list(request)
        sized = [Sized.of(each, self.info) for each in requests]
        histories = self._answer([each.request for each in sized])
        results: list[ImageResult] = []
        for each, history in zip(sized, histories, strict=True):
            painted = [event.result for event in map(each.deliver, history) if isinstance(event, ImageFinished)]
            results += sorted(painted, key=lambda result: result.image_index)
        return results

    def stream(self, request: str | GenerationRequest) -> Iterator[Event]:
        """Yield the events of a request up to its terminal one; closing the iterator cancels the request."""
        if isinstance(request, str):
            request = GenerationRequest(prompt=request)
        sized = Sized.of(request, self.info)
        events = self._watch(sized.request)
        try:
            yield from map(sized.deliver, events)
        finally:
            events.close()

    def submit_late(self, request: GenerationRequest, waited_s: float) -> None:
        """Submit a request that arrived ``waited_s`` ago; its times and its deadline count from then."""
        with self._lock:
            self._inbox[self.submit(request)].submitted_s -= waited_s

    def interrupt(self, request_id: str) -> bool:
        """End a request at its next step with unfinished images, and return whether it is live.

        A request whose images have not started is cancelled.
        """
        with self._lock:
            if self._inbox.pop(request_id, None) is not None:
                self._deliver([Cancelled(request_id=request_id)])
                return True
            if request_id not in self.scheduler.live:
                return False
            self._interrupted[request_id] = None
            return True

    def warm_up(self) -> None:
        """Measure the native size and run every network once, so that the first request is not slowed."""
        with self._ticking:
            self.runners.warm_up(self.info.good_sizes)

    def study(self, has_arrived: Callable[[], bool] | None = None) -> bool:
        """Make one UNet call that measures a shape, and return whether there was anything to measure.

        Args:
            has_arrived: The call is abandoned as soon as this returns true.
        """
        with self._ticking:
            return self.runners.study(has_arrived=has_arrived)

    def admit(self, request: GenerationRequest) -> LiveRequest:
        """Validate and resolve ``request``; raise InvalidRequest if it is not acceptable."""
        admit = partial(self._admission.admit, now_s=self.clock())
        return admit(request) if request.resume_from is None else admit_resumed(request, self.info, admit)

    def _enter(self, order: GenerationRequest, *, is_followed: bool) -> str:
        request_id = super()._enter(order, is_followed=is_followed)
        with self._lock:
            live = self._inbox.get(request_id)
            if live is not None and live.settings.loras:
                live.lora_loading = self.runners.loras.begin(live.settings.loras, live.settings.lora_digest)
            if live is not None and live.settings.controlnets:
                live.control_loading = self.runners.controlnets.begin(live.settings.controlnets, order.control_images)
            if live is not None and live.settings.references:
                live.reference_loading = self.runners.references.begin(live.settings.references, order.reference_images)
        return request_id

    def _digests(self, live: LiveRequest) -> AdapterDigests:
        request = live.request
        texts = "\n".join((request.prompt, *request.image_prompts, request.negative_prompt))
        return AdapterDigests(
            self.runners.loras.digests(live.settings.lora_digest),
            self.model.text.word_digests(texts),
            self.runners.references.digests(live.settings.references),
        )

    def _is_ready(self, live: LiveRequest) -> bool:
        """Return whether adapters and ControlNets are read; errors of reading are raised in preparation."""
        jobs = (live.lora_loading, live.control_loading, live.reference_loading)
        if all(job is None or job.done() for job in jobs):
            return True
        return self.clock() - live.submitted_s >= (live.request.deadline_s or math.inf)

    def _accepted(self, live: LiveRequest, num_ahead: int) -> Event:
        live.queue_position = num_ahead
        return Accepted(
            request_id=live.request_id,
            seed=live.seed,
            num_images=live.request.num_painted,
            queue_position=num_ahead,
            warnings=live.warnings,
            seconds_left=None if live.seconds_left is None else round(live.seconds_left, 4),
        )

    def _check_deadline(self, live: LiveRequest) -> None:
        """Set the forecast of ``live``; raise ``DeadlineUnreachable`` if that is after its deadline."""
        is_free = live.request.deadline_s is None or not live.request.refuses_late
        deadline_s = math.inf if is_free else live.request.deadline_s or 0.0
        live.seconds_left = self.scheduler.seconds_left(live, self._inbox.values(), self.clock())
        if live.seconds_left is None or live.seconds_left <= deadline_s:
            return
        raise DeadlineUnreachable.of(deadline_s, live.seconds_left or 0.0, self.scheduler.least_s(live))

    def _seconds_left(self) -> float:
        """Return the seconds that all live requests take at the recent pace, at least one."""
        return max(1.0, self._pace.seconds(self.scheduler.cost_left) or 1.0)

    def _plan(self, budget: TickBudget) -> TickPlan:
        self._pace.begin()
        with self._lock:
            interrupted, self._interrupted = self._interrupted, {}
            for request_id in interrupted:
                self._deliver(self.scheduler.interrupt(request_id))
        plan = self.scheduler.plan(self.clock())
        # waits for a fuller batch, for scores, or for adapters
        if (self.scheduler.waits or self._inbox) and not plan.tasks:
            time.sleep(BATCH_WAIT_S)
        return plan

    def _apply(self, plan: TickPlan, outcome: TickOutcome, started_s: float) -> list[Event]:
        self._num_postponed = len(outcome.postponed)
        charged_s = self._charge(plan, outcome, started_s)
        self.runners.captures.keep_finished(plan, outcome)
        events = self.scheduler.apply(plan, outcome, self.clock()) + self.scheduler.position_events(self.clock())
        events += self.runners.captures.capture_due(self.scheduler.live, self.clock())
        self.runners.trim(self.scheduler.in_flight)
        self._remember(plan, outcome, started_s, charged_s)
        self._pace.did(plan.cost)
        self._study(plan)
        if not self.scheduler.has_work:
            self._pace.pause()
        return events

    def _study(self, plan: TickPlan) -> None:
        """Measure the group of ``plan`` for an eighth of the time, while its images wait for each other."""
        if plan.group is None:
            return
        uncontrolled = (plan.group, plan.group._replace(is_shallow=True))
        controlled = (control_groups(task, plan.group) for task in plan.rows if task.state is not None)
        unmeasured = filter(self.runners.is_unmeasured, (*uncontrolled, *itertools.chain.from_iterable(controlled)))
        group = next(unmeasured, None)
        if group is None:
            return
        if sum(task.group == plan.group for task in self.scheduler.in_flight) <= len(plan.rows):
            return
        self._study_credit_s = min(self._study_credit_s + STUDY_SHARE * self._trace[-1].wall_s, MOST_CREDIT_S)
        if self._study_credit_s >= 0.0:
            started_s = self.clock()
            self.runners.study(group)
            self._study_credit_s -= self.clock() - started_s

    def _charge(self, plan: TickPlan, outcome: TickOutcome, started_s: float) -> float:
        """Divide the seconds of this tick, and the rest of the tick before it, among the images.

        The time of a call goes to its rows, the time before the calls to the prepared images, and the time after them
        to the decoded ones.
        """
        if not plan.tasks:
            return 0.0
        now_s = self.clock()
        spans = [(now_s - started_s + self._owed_s, dict.fromkeys(plan.tasks, 0.0))]
        if plan.rows and outcome.rows_ended_s:
            first_s, last_s = outcome.rows_started_s, outcome.rows_ended_s
            before = dict.fromkeys(plan.prepare or plan.rows, 0.0)
            after = dict.fromkeys(plan.decode or plan.rows, 0.0)
            middle = row_seconds(plan, outcome)
            spans = [(first_s - started_s + self._owed_s, before), (last_s - first_s, middle), (now_s - last_s, after)]
        for seconds, weights in spans:
            for task, share_s in shares(seconds, weights).items():
                task.clock.device_s += share_s
        self._owed_s = 0.0
        return now_s - started_s

    def _remember(self, plan: TickPlan, outcome: TickOutcome, started_s: float, charged_s: float) -> None:
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
        if tick.calls:
            is_pure = not tick.num_prepared and not tick.num_decoded
            self._steps.add(tick.num_rows, tick.wall_s if is_pure else None)
            if is_pure:
                self.runners.groups.record_overhead(tick.wall_s - sum(call.wall_s for call in tick.calls))
        self._owed_s += tick.wall_s - charged_s
        self._counts.update(
            steps=bool(tick.calls), rows=tick.num_rows, painted=tick.num_decoded, failed=len(outcome.failures)
        )

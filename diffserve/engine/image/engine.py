"""Pictures: ``Engine``, what a tick of them is, and its public face."""

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
    ImageResult,
    ModelInfo,
    ModelProfile,
    Painted,
    UNetPath,
)
from diffserve.disk_cache import DiskCache
from diffserve.engine.delivery import raise_if_failed
from diffserve.engine.engine import TRACE_TICKS, CoreEngine
from diffserve.engine.image.admission import ImageAdmission
from diffserve.engine.image.runner import ImageRunner, control_groups
from diffserve.engine.image.scheduler import RequestScheduler
from diffserve.engine.image.scoring import CheckerScorer, ImageScores, refuse_best_of
from diffserve.engine.image.task import GroupKey, LiveRequest, TickOutcome, TickPlan, TickTrace, row_seconds
from diffserve.engine.records import TickBudget, shares
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.kv import PagePool, PoolStats
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

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
            check_scores=scores.check if self.config.stage == "all" else refuse_best_of,
        )
        self.scheduler: RequestScheduler = RequestScheduler(
            self.config, model.info, self.runners, scores, self._digests
        )
        self._num_postponed = 0  # images that the latest tick would have let in, had there been pages
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
        load = partial(load_model, device=device, dtype=dtype, offload=config.offload, device_map=config.device_map)
        loaded = load(model, profile=profile, cache=cache)
        return cls(loaded, config, profile=profile)

    # What it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What the model can do and where it runs."""
        return self.model.info

    @property
    def unet_paths(self) -> tuple[UNetPath, ...]:
        """How UNet calls are made, for each shape seen so far; empty while shapes are measured instead of chosen."""
        return self.runners.groups.unet_paths

    @property
    def records_graphs(self) -> bool:
        """Whether UNet calls are recorded as CUDA graphs."""
        return self.runners.groups.compiled.graphs is not None

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
                num_lanes=self.scheduler.slots.num_slots,
                num_loras=self.runners.loras.num_kept,
                lora_bytes=self.runners.loras.num_bytes,
                steps=self._steps.stats,
            )

    def check_integrity(self) -> None:
        """No slot, image or page is lost; AssertionError or PoolIntegrityError says what is wrong."""
        with self._ticking:
            self.scheduler.check_integrity()
            self.runners.check_integrity(self.scheduler.in_flight)

    @property
    def waits_for_pages(self) -> bool:
        """Whether an image would have been let in by the latest tick, had there been pages."""
        return self._num_postponed > 0 and self.scheduler.has_work

    @property
    def pool(self) -> PagePool | None:
        """Where the pages of prompts are; ``None`` where the UNet uses none."""
        return self.runners.conditioner.pool

    @property
    def page_stats(self) -> PoolStats | None:
        """Pages and prefix hits by tenant; ``None`` where the UNet uses none."""
        with self._ticking:
            return None if self.pool is None else self.pool.stats()

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest picture among the requests that are live, 0 when there is none."""
        live = (*self._inbox.copy().values(), *self.scheduler.live.copy().values())
        return max((one.settings.width_px * one.settings.height_px for one in live), default=0)

    def close(self, kept: Collection[str] = ()) -> None:
        """Give up what others hold for an engine that nobody will ask again: its tenants' pages, but for those in
        ``kept``, and a compiler's process.
        """
        with self._ticking:
            self.runners.close(kept)

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

    def submit_late(self, request: GenerationRequest, waited_s: float) -> None:
        """``submit`` what has waited elsewhere for so long: its times and its deadline count from then."""
        with self._lock:
            self._inbox[self.submit(request)].submitted_s -= waited_s

    def interrupt(self, request_id: str) -> bool:
        """End a request at its next step with unfinished pictures. False when it is not live.

        A request without any picture to come is cancelled.
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
        """Know the buckets of the native size and touch every network, so that the first request pays for neither."""
        with self._ticking:
            self.runners.warm_up(self.info.good_sizes)

    def study(self, has_arrived: Callable[[], bool] | None = None) -> bool:
        """Use an idle moment for one UNet call that measures a shape; False where there is nothing to measure.

        ``has_arrived``: the call is given up as soon as this returns true.
        """
        with self._ticking:
            return self.runners.study(has_arrived=has_arrived)

    # Below the counter --------------------------------------------------------------------------------------------

    def admitted(self, request: GenerationRequest) -> LiveRequest:
        """``request`` checked and resolved, for whoever does a part of it elsewhere. Raises InvalidRequest."""
        return self._admit(request)

    def _admit(self, request: GenerationRequest) -> LiveRequest:
        return self._admission.admit(request, self.clock())

    def _enter(self, order: GenerationRequest, *, is_followed: bool) -> str:
        request_id = super()._enter(order, is_followed=is_followed)
        with self._lock:
            live = self._inbox.get(request_id)
            if live is not None and live.settings.loras:
                live.reading = self.runners.loras.begin(live.settings.loras, live.settings.lora_digest)
            if live is not None and live.settings.controlnets:
                live.mapping = self.runners.controlnets.begin(live.settings.controlnets, order.control_images)
        return request_id

    def _digests(self, live: LiveRequest) -> tuple[dict[str, str], dict[str, str]]:
        texts = f"{live.request.prompt}\n{live.request.negative_prompt}"
        return self.runners.loras.digests(live.settings.lora_digest), self.model.text.word_digests(texts)

    def _is_at_hand(self, live: LiveRequest) -> bool:
        """Adapters and ControlNets are read beside the ticks; what goes wrong is told when the image is prepared."""
        if all(one is None or one.done() for one in (live.reading, live.mapping)):
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

    def _foresee(self, live: LiveRequest) -> None:
        """Note when ``live`` would be done. Raises DeadlineUnreachable where that is too late."""
        is_free = live.request.deadline_s is None or not live.request.refuses_late
        deadline_s = math.inf if is_free else live.request.deadline_s or 0.0
        live.seconds_left = self.scheduler.seconds_left(live, self._inbox.values(), self.clock())
        if live.seconds_left is None or live.seconds_left <= deadline_s:
            return
        raise DeadlineUnreachable.of(deadline_s, live.seconds_left or 0.0, self.scheduler.least_s(live))

    def _seconds_left(self) -> float:
        """Seconds that everything accepted will take at the recent pace, at least one; one where no pace is known."""
        return max(1.0, self._pace.seconds(self.scheduler.cost_left) or 1.0)

    def _plan(self, budget: TickBudget) -> TickPlan:
        self._pace.begin()
        with self._lock:
            interrupted, self._interrupted = self._interrupted, {}
            for request_id in interrupted:
                self._deliver(self.scheduler.interrupt(request_id))
        plan = self.scheduler.plan(self.clock())
        # for a batch of equals that is not full, pictures' scores, or adapters
        if (self.scheduler.waits or self._inbox) and not plan.tasks:
            time.sleep(BATCH_WAIT_S)
        return plan

    def _apply(self, plan: TickPlan, outcome: TickOutcome, started_s: float) -> list[Event]:
        self._num_postponed = len(outcome.postponed)
        charged_s = self._charge(plan, outcome, started_s)
        events = self.scheduler.apply(plan, outcome, self.clock()) + self.scheduler.position_events(self.clock())
        self.runners.trim(self.scheduler.in_flight)
        self._remember(plan, outcome, started_s, charged_s)
        self._pace.did(plan.cost)
        self._study(plan)
        if not self.scheduler.has_work:
            self._pace.rest()
        return events

    def _study(self, plan: TickPlan) -> None:
        """While images of a group that is not measured wait for each other, measure it: an eighth of the time."""
        if plan.group is None:
            return
        own = (plan.group, plan.group._replace(is_shallow=True))
        controlled = (control_groups(task, plan.group) for task in plan.rows if task.state is not None)
        wanted = filter(self.runners.is_wanted, (*own, *itertools.chain.from_iterable(controlled)))
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

    def _charge(self, plan: TickPlan, outcome: TickOutcome, started_s: float) -> float:
        """Share out the seconds of this tick so far, and what the one before took after its images were told.

        Of each call to its rows, before the calls to who was prepared, after them to who is decoded.
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
                self.runners.groups.learn_beside(tick.wall_s - sum(call.wall_s for call in tick.calls))
        self._owed_s += tick.wall_s - charged_s
        self._counts.update(
            steps=bool(tick.calls), rows=tick.num_rows, painted=tick.num_decoded, failed=len(outcome.failures)
        )

"""Who runs next: admission to lanes, the choice of rows for a tick, and every move of an image's stage. No torch.

Within a client the order is the policy's (``policy``). With the default it is shortest remaining work first with
ageing, and an image's key is

    remaining work + AGEING_ROWS_PER_TICK * tick of submission          (smaller runs first)

with work in UNet rows of the native size. Between clients ``FairShare`` decides, between priorities
``PriorityShare``.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Literal

from msgspec.structs import replace

from diffserve.api.errors import DiffserveError
from diffserve.api.types import Cancelled, Event, ImageFailed, ImageResult, ModelInfo, Painted, Progress, Queued
from diffserve.engine.image.forecast import Forecast
from diffserve.engine.image.outputs import Digests, ImageOutputs
from diffserve.engine.image.policy import POLICIES, Moment, TickCosts, solo_s
from diffserve.engine.image.priorities import PriorityShare
from diffserve.engine.image.queues import LANES_PER_LANE_LEFT, ImageQueue, LaneTable
from diffserve.engine.image.result_cache import Kept, ResultCache, key_of
from diffserve.engine.image.scoring import PictureScores
from diffserve.engine.image.task import ImageTask, LiveRequest, TickOutcome, TickPlan
from diffserve.engine.records import FailureReason, Scheduler, Stage
from diffserve.settings.config import EngineConfig

PLACES_EVERY_S = 0.5
PLACE_AGAIN_S = 5.0
"""Places in the queue are told no more often, however fast it moves."""

KEPT_OF_LANES = 8
"""One lane, and one more for so many, is kept beyond ``max_lanes`` for clients who hold none."""

IDLE = (Stage.DONE, Stage.FOLLOWING, Stage.SCORING)
"""There is nothing to compute for images that stand there."""

FORECAST_SHARE = 0.05
FORECAST_BURST_S = 1.0
"""Forecasts take at most this share of the time, of which so many seconds may be saved up."""

SURELY = 0.75
"""Of the time that what is left of a request would take alone, as measured. A deadline that leaves less is lost."""

FORGIVEN_PICTURES = 8
"""By as many pictures of the model's default a client may get ahead, by room in ticks that others could not use."""


class RequestScheduler(Scheduler[LiveRequest, Event]):
    """Owns the waiting room, the lanes and the images in flight. ``costs``: of UNet calls, as they are known now;
    ``scores``: who chooses from several pictures; ``digests``: see ``ImageOutputs``.
    """

    product = "picture"

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        costs: TickCosts,
        scores: PictureScores | None = None,
        digests: Digests = lambda _: ({}, {}),
    ) -> None:
        super().__init__()
        self.config = config
        self.costs = costs
        self.policy = POLICIES[config.policy](config, costs)
        self._moment = Moment()
        self.lanes = LaneTable(config.max_lanes, num_kept=1 + config.max_lanes // KEPT_OF_LANES)
        self._waiting = ImageQueue()
        self.forecast = Forecast(costs, config.max_lanes)
        self.timer: Callable[[], float] = time.thread_time
        self._done_s: dict[ImageTask, float] = {}  # when each image will be done, by the last forecast
        self._forecast_at_s = -math.inf  # the earliest time of the next forecast
        self._applied_s: float | None = None
        self._rows_wait = self._was_postponed = False
        self._share = PriorityShare(2.0 * FORGIVEN_PICTURES * info.default_num_steps)
        self._flight: dict[ImageTask, int] = {}  # with its number in the order of arrival
        self._order = itertools.count()
        self._report = ImageOutputs(info, digests)
        self._info = info
        self.results = ResultCache(config.result_cache_bytes)
        self._painting: dict[bytes, ImageTask] = {}  # by key, those whose picture others may share
        self._hits: list[tuple[ImageTask, Kept]] = []
        self._scores = scores or PictureScores(None)
        self._scoring: dict[ImageTask, tuple[ImageResult, Future[float]]] = {}
        self._places_told_s = -math.inf

    @property
    def in_flight(self) -> tuple[ImageTask, ...]:
        """Images that hold a lane, in order of admission."""
        return tuple(self._flight)

    @property
    def waits(self) -> bool:
        """Whether there are images for which there may be nothing to do just now."""
        return bool(self._flight or self._scoring)

    @property
    def cost_left(self) -> float:
        """Work still to do for everything accepted, in UNet rows of the native size."""
        tasks = [task for live in list(self.live.values()) for task in live.tasks]
        return sum(task.cost_left for task in tasks if task.stage not in IDLE)

    def add(self, live: LiveRequest) -> None:
        """Let a validated request into the waiting room."""
        self._rate(live)
        self.live[live.request_id] = live
        self._share.join(live)
        for task in live.tasks:
            if not self._is_painted_already(task):
                self._waiting.add(task, self._key(task), next(self._order))

    def plan(self, now_s: float) -> TickPlan:
        """Choose this tick's work; newcomers get their lanes here. ``now_s``: a reading of the engine's clock.

        Who is prepared has rows in the next tick. So rows wait while newcomers are prepared, who would be before them
        anyhow, and in the tick after that all go together: nobody newer is let in then, lest rows wait for two lots.
        For those who had to wait for pages, and may have to again, nobody waits.
        """
        self.num_ticks += 1
        self._moment = Moment(self.num_ticks, now_s)
        if self._applied_s is not None:
            self.forecast.learn_gap(now_s - self._applied_s)
        have_waited = self._rows_wait
        prepare = tuple(self._admit()) if not have_waited or self._was_postponed else ()
        self._rows_wait = (
            bool(prepare)
            and not (have_waited or self._was_postponed)
            and any(task.stage is Stage.DENOISING for task in self._flight)
        )
        rows = () if self._rows_wait else self._choose_rows()
        done = [task for task in self._flight if task.stage is Stage.DECODING]
        done = self._share.in_turn([*done, *(task for task in rows if task.is_last_row)])
        return TickPlan(
            prepare=prepare,
            group=rows[0].group if rows else None,
            rows=rows,
            num_rows=sum(task.rows_now for task in rows),
            cost=sum(task.cost_now for task in rows),
            previews=tuple(task for task in rows if self._wants_preview(task)),
            decode=tuple(done[: self.config.max_decodes_per_tick]),
        )

    def apply(self, plan: TickPlan, outcome: TickOutcome, now_s: float) -> list[Event]:
        """Move everybody on by what the tick achieved, free what is finished, and tell the world."""
        self.forecast.learn(plan, outcome, now_s - self._moment.now_s)
        self._applied_s = now_s
        events: list[Event] = []
        for task, kept in self._take_hits():
            events += self._answer(task, kept, "hit")
        for task, failure in outcome.failures.items():
            for one in (task, *self._take_followers(task)):
                events += self.fail(one, failure)
        self._was_postponed = bool(outcome.postponed)
        for task in outcome.postponed:
            self._postpone(task)
        for task, group in outcome.groups.items():
            if task.stage is Stage.WAITING:
                task.group, task.stage = group, Stage.DENOISING
                task.clock.prepare_s = outcome.prepare_s[task]
        for task in plan.rows:
            if task.stage is Stage.DENOISING:
                events += self._advance(task, outcome)
        for task in plan.decode:
            if task.stage is Stage.DECODING and task in outcome.pictures:
                self._share.charge(task, task.settings.row_cost)
                skipped = task.settings.skipped_steps
                kept = Kept(outcome.pictures[task], outcome.latents.get(task), task.similarity, skipped)
                painted = self._report.painted(task, kept, outcome.decode_s[task])
                if task.key is not None:
                    self.results.put(task.key, kept)
                followers = self._take_followers(task)
                events += self._finish(task, painted)
                for one in followers:
                    events += self._answer(one, kept, "shared")
        events += self._take_scored()
        if not self._flight:
            self._applied_s = None
        return self._with_seconds_left(events, now_s)

    def expire(self, now_s: float) -> list[Event]:
        """Also those who could not be done by their deadline even if they were alone from now on."""
        events = super().expire(now_s)
        for live in list(self.live.values()):
            left_s = math.inf if live.request.deadline_s is None else live.submitted_s + live.request.deadline_s - now_s
            if left_s < live.solo_s and left_s < self._least_s(live):
                said = f"the deadline of {live.request.deadline_s:g} s cannot be kept any more; what is left of the "
                said += f"{self.product} takes longer than {max(left_s, 0.0):.1f} s."
                events += self.give_up(live, FailureReason("deadline_exceeded", said, "deadline_s"))
        return events

    def seconds_left(self, live: LiveRequest, others: Iterable[LiveRequest], now_s: float) -> float | None:
        """Return the seconds until a new request has all of its images; the queue stays as it is.

        ``None`` while no pace is known, and for requests without a deadline while forecasts take too much of the time.

        Args:
            live: A request that is not in the queue yet.
            others: Requests before it that are not in the queue yet.
            now_s: A reading of the engine's clock.
        """
        self._rate(live)
        if live.request.deadline_s is None and now_s < self._forecast_at_s:
            return None
        for one in others:
            self._rate(one)
        left_s = self._seconds_left(now_s, (*others, live))
        return max(left_s[task] for task in live.tasks) if left_s else None

    def least_s(self, live: LiveRequest) -> float:
        """Seconds that a newcomer takes if it is alone, at the pace that is seen."""
        return live.solo_s * (self.forecast.pace or 1.0)

    def give_up(self, live: LiveRequest, failure: FailureReason) -> list[Event]:
        """All images of a request that are not painted yet are given up."""
        return [event for task in tuple(live.tasks) for event in self.fail(self._part(task), failure)]

    def interrupt(self, request_id: str) -> list[Event | Cancelled]:
        """End a request early, before a plan is made: images that are being denoised are decoded after their next row.

        Images that wait are dropped, and so are those whose picture other requests wait for. Without any other image
        the request is cancelled.
        """
        live = self.live.get(request_id)
        if live is None:
            return []
        for task in tuple(live.tasks):
            if task.stage in (Stage.WAITING, Stage.FOLLOWING) or (task.stage is Stage.DENOISING and task.followers):
                self._release(self._part(task))
            elif task.stage is Stage.DENOISING:
                task.is_interrupted = True
                if task.key is not None:  # an unfinished picture is not for equal requests
                    del self._painting[task.key]
                    task.key = None
        if not live.is_over:
            return []
        self._forget(live)
        best = [] if live.request.best_of is None else [*self._choose_best(live)]
        return [*best, self._report.terminal(live)] if live.num_painted else [Cancelled(request_id=request_id)]

    def moved_up(self, now_s: float) -> list[Event]:
        """News for those who wait for their first lane: whose place in the queue is another than last told, or was told
        long ago, for the time that is left may be another.
        """
        if now_s - self._places_told_s < PLACES_EVERY_S:
            return []
        self._places_told_s = now_s
        waiting = {live.tasks[0]: live for live in self.live.values() if not live.has_started}
        order = self._share.copy(is_due=False).in_order((*self._flight, *waiting), self._key)
        events: list[Event] = []
        for place, live in enumerate(waiting[task] for task in order if task in waiting):
            if live.queue_position != place or now_s >= max(live.submitted_s, live.place_told_s) + PLACE_AGAIN_S:
                live.queue_position, live.place_told_s = place, now_s
                events.append(Queued(request_id=live.request_id, queue_position=place))
        left_s = self._seconds_left(now_s) if events and now_s >= self._forecast_at_s else {}
        for index, event in enumerate(events):
            seconds = [left_s[task] for task in self.live[event.request_id].tasks if task in left_s]
            if seconds:
                events[index] = replace(event, seconds_left=round(max(seconds), 4))
        return events

    def fail(self, task: ImageTask, failure: FailureReason) -> list[Event]:
        """Give up one image; its neighbours and siblings go on."""
        if task.stage is Stage.DONE:
            return []
        live = task.live
        live.first_failure = live.first_failure or failure
        if live.request.best_of is not None:  # others may be good enough
            return self._leave(task)
        live.num_failed += 1
        code, message, _ = failure
        told = ImageFailed(request_id=live.request_id, image_index=task.image_index, code=code, message=message)
        return [told, *self._leave(task)]

    def check_integrity(self) -> None:
        """Lanes free + used = total, every used lane has one living holder, nobody finished is still queued."""
        self.lanes.check_integrity()
        holders = {task.lane: task for task in self._flight}
        assert holders == self.lanes.owners, "the lane table and the images in flight disagree"
        living = {task for live in self.live.values() for task in live.tasks if task.stage is not Stage.DONE}
        waiting = set(self._waiting) | {task for task, _ in self._hits} | self._scoring.keys()
        waiting |= {task for painter in self._painting.values() for task in painter.followers}
        assert waiting | set(self._flight) == living, "an image is lost, or queued although gone"
        assert not any(live.is_over for live in self.live.values()), "a finished request is still live"

    def _rate(self, live: LiveRequest) -> None:
        """What it would take alone, and when it should be done; its place in the order of ageing is here."""
        live.submitted_tick = self.num_ticks
        live.solo_s = solo_s(live, self.costs) + live.request.num_painted * self._report.decode_s
        live.due_s = live.submitted_s + min(self.config.slo_scale * live.solo_s, live.request.deadline_s or math.inf)

    def _least_s(self, live: LiveRequest) -> float:
        """Seconds that what is left of ``live`` takes at the very least."""
        left, whole = sum(task.cost_left for task in live.tasks), sum(task.cost_whole for task in live.tasks)
        return SURELY * live.solo_s * left / whole * min(self.forecast.pace or 0.0, 1.0)

    def _seconds_left(self, now_s: float, newcomers: Sequence[LiveRequest] = ()) -> dict[ImageTask, float]:
        """Return the seconds until each image is done, and note when the next forecast may be made."""
        began_s = self.timer()
        tasks = [task for live in (*dict(self.live).values(), *newcomers) for task in live.tasks]
        hits = dict(self._hits)
        order = self._share.copy(newcomers).in_order(
            (task for task in tasks if task.stage not in IDLE and task not in hits), self._key
        )
        left_s = self.forecast.seconds_left(order)
        earliest_s = max(self._forecast_at_s, now_s - FORECAST_BURST_S)
        self._forecast_at_s = earliest_s + (self.timer() - began_s) / FORECAST_SHARE
        return left_s

    def _with_seconds_left(self, events: list[Event], now_s: float) -> list[Event]:
        """Return ``events`` with the times left, of the image and of its request, in those of class ``Progress``."""
        if not any(isinstance(event, Progress) for event in events):
            return events
        if now_s >= self._forecast_at_s:
            self._done_s = {task: now_s + seconds for task, seconds in self._seconds_left(now_s).items()}
        task_of = {(task.live.request_id, task.image_index): task for task in self._flight}
        task_of |= {(one.live.request_id, one.image_index): task for task in self._flight for one in task.followers}
        for index, event in enumerate(events):
            if not isinstance(event, Progress):
                continue
            task = task_of.get((event.request_id, event.image_index))
            until_s = now_s if task is None else self._until_s(task)  # without a task it is decoded already
            if until_s is None:
                continue
            others = [self._until_s(one) for one in self._missing(event.request_id)]
            last_s = max([until_s, *(other for other in others if other is not None)])
            left, whole = (round(max(seconds - now_s, 0.0), 4) for seconds in (until_s, last_s))
            events[index] = replace(event, seconds_left=left, request_seconds_left=whole)
        return events

    def _missing(self, request_id: str) -> list[ImageTask]:
        """Who is still to be painted until a request is done."""
        live, known = self.live.get(request_id), dict(self._hits)
        left = [] if live is None else [task for task in live.tasks if task not in known]
        return [task.leader or task for task in left if task.stage not in (Stage.DONE, Stage.SCORING)]

    def _until_s(self, task: ImageTask) -> float | None:
        """Return when ``task`` will be done: by the last forecast, else by the one of its request's admission."""
        if task in self._done_s:
            return self._done_s[task]
        return None if task.live.seconds_left is None else task.live.submitted_s + task.live.seconds_left

    def _key(self, task: ImageTask) -> float:
        return self.policy.key(task, self._moment)

    def _admit(self) -> Iterator[ImageTask]:
        """Newcomers, with their lanes."""
        held = Counter(task.live.line for task in self._flight)
        num_batch = sum(task.live.request.priority == "batch" for task in self._flight)
        for _ in range(self.config.max_prepares_per_tick):
            most = LANES_PER_LANE_LEFT * self.lanes.num_left if self.lanes.num_free else min(1, self.lanes.num_left)
            heads = [task for task in self._waiting.heads(self._key) if held[task.live.line] < most]
            heads = [task for task in heads if self._share.may_hold(task, self.lanes, num_batch)]
            if not heads:
                return
            if len(heads) > 1:
                order = self._share.in_order((*self._flight, *heads), self._key)
                heads = [task for task in order if task.lane is None]
            task, number = self._waiting.take(heads[0].live.line)
            task.lane = self.lanes.allocate(task)
            self._flight[task] = number
            held[task.live.line] += 1
            num_batch += task.live.request.priority == "batch"
            yield task

    def _is_painted_already(self, task: ImageTask) -> bool:
        """Whether the picture of a newcomer is known, or being painted; then it takes no part in the queue."""
        request = task.live.request
        is_drawn = request.diffusion.variation_strength > 0.0 and request.diffusion.variation_seed is None
        if self.results.max_bytes == 0 or request.seed is None or is_drawn:
            return False
        settings = task.settings
        seeds = task.seed, task.variation_seed
        key = key_of(request, seeds, self._info, settings.lora_digest + settings.control_digest)
        kept, leader = self.results.get(key), self._painting.get(key)
        if kept is not None:
            task.stage = Stage.DECODING
            self._hits.append((task, kept))
            self.results.num_hits += 1
        elif leader is not None and leader.live.request.priority == "batch" and request.priority != "batch":
            self.results.num_misses += 1  # who is in no hurry is not waited for
        elif leader is not None:
            task.stage, task.leader = Stage.FOLLOWING, leader
            leader.followers.append(task)
            self.results.num_shared += 1
        else:
            task.key = key
            self._painting[key] = task
            self.results.num_misses += 1
        return task.stage is not Stage.WAITING

    def _take_hits(self) -> list[tuple[ImageTask, Kept]]:
        """Those whose picture was known, unless they have left meanwhile."""
        hits, self._hits = self._hits, []
        return [(task, kept) for task, kept in hits if task.stage is Stage.DECODING]

    def _take_followers(self, task: ImageTask) -> list[ImageTask]:
        """Those who waited for the picture of ``task``, and wait no more."""
        followers, task.followers = task.followers, []
        for one in followers:
            one.leader = None
        return followers

    def _answer(self, task: ImageTask, kept: Kept, cached: Literal["hit", "shared"]) -> list[Event]:
        return self._finish(task, self._report.known(task, kept, cached))

    def _finish(self, task: ImageTask, painted: Painted) -> list[Event]:
        """The picture of ``task`` is there: it is told, or, of a best-of, to be scored."""
        if task.live.request.best_of is None:
            task.live.num_painted += 1
            return [painted, *self._leave(task)]
        self._release(task)
        task.stage = Stage.SCORING
        self._scoring[task] = painted.result, self._scores.ask(painted.result)
        return []

    def _take_scored(self) -> list[Event]:
        """Those whose score is known are candidates."""
        events: list[Event] = []
        for task, (result, score) in [(task, asked) for task, asked in self._scoring.items() if asked[1].done()]:
            try:
                task.live.candidates.append(replace(result, score=score.result()))
                events += self._leave(task)
            except Exception as error:  # what the scorer raises is this picture's affair
                said = f"the picture could not be scored: {type(error).__name__}: {error}"
                events += self.fail(task, FailureReason(DiffserveError.default_code, said))
        return events

    @staticmethod
    def _choose_best(live: LiveRequest) -> Iterator[Event]:
        """The best candidates, in their order, and a failure for each that there should be and is not."""
        num_kept = live.request.num_images
        ranked = sorted(live.candidates, key=lambda one: (-(one.score or 0.0), one.image_index))
        rows = sum(one.num_evaluations for one in ranked[num_kept:])
        others = {
            "num_discarded": max(0, len(ranked) - num_kept),
            "discarded_evaluations": rows,
            "discarded_device_s": sum(one.device_s for one in ranked[num_kept:]),
        }
        for rank, one in enumerate(ranked[:num_kept]):
            result = replace(one, image_index=rank, **({} if rank else others))
            yield Painted(request_id=live.request_id, result=result)
        live.num_painted = min(len(ranked), num_kept)
        live.num_failed = num_kept - live.num_painted
        failure = live.first_failure
        for rank in range(live.num_painted, num_kept if failure else 0):
            assert failure is not None
            yield ImageFailed(request_id=live.request_id, image_index=rank, code=failure.code, message=failure.message)

    def _part(self, task: ImageTask) -> ImageTask:
        """``task`` leaves, and whoever waits for the same picture does not: what can be released.

        The first of those who follow a painting takes it over as it stands, lane and all: the two change places in
        their requests. Where it has not begun, that one joins the queue instead.
        """
        if task.leader is not None:
            task.leader.followers.remove(task)
            task.leader = None
            return task
        if not task.followers:
            return task
        heir, *others = self._take_followers(task)
        if task.lane is None:
            heir.stage, heir.key = Stage.WAITING, task.key
            task.key = None
            painter, leaver = heir, task
            self._waiting.add(heir, self._key(heir), next(self._order))
        else:
            task.live.tasks[task.image_index], heir.live.tasks[heir.image_index] = heir, task
            task.live, heir.live = heir.live, task.live
            task.image_index, heir.image_index = heir.image_index, task.image_index
            painter, leaver = task, heir
        assert painter.key is not None
        self._painting[painter.key] = painter
        painter.followers = others
        for one in others:
            one.leader = painter
        return leaver

    def _postpone(self, task: ImageTask) -> None:
        """Back into the waiting room, at its old place, without a lane."""
        if task.stage is Stage.WAITING and task.lane is not None:
            self.lanes.free(task.lane)
            task.lane = None
            self._waiting.add(task, self._key(task), self._flight.pop(task))

    def _choose_rows(self) -> tuple[ImageTask, ...]:
        ready = [task for task in self._flight if task.stage is Stage.DENOISING]
        chosen = self.policy.choose(self._share.in_order(ready, self._key), self._moment) if ready else ()
        if not chosen:
            return ()
        chosen = self._share.spared(
            chosen, ready, self.costs, lambda: Counter(task.live.line for task in self._waiting)
        )
        self._share.led_by(chosen)
        return tuple(sorted(chosen, key=lambda task: task.lane or 0))  # the same rows keep the same order

    @staticmethod
    def _wants_preview(task: ImageTask) -> bool:
        is_shown = task.ends_step and not task.is_last_row
        return is_shown and any(one.live.wants_preview(task.step_index + 1) for one in (task, *task.followers))

    def _advance(self, task: ImageTask, outcome: TickOutcome) -> list[Event]:
        ends_step, is_last_row = task.ends_step, task.is_last_row
        if task.clock.denoise_started_s is None:
            task.clock.denoise_started_s = outcome.rows_started_s
        task.clock.denoise_ended_s = outcome.rows_ended_s
        self._share.charge(task, task.cost_now)
        task.num_evaluations += task.rows_now
        task.row_index += 1
        if is_last_row:
            task.stage = Stage.DECODING
        elif task.row_index == task.settings.switch_row:
            task.group = task.switch()
        return list(self._report.stepped(task, outcome)) if ends_step else []

    def _leave(self, task: ImageTask) -> list[Event]:
        self._release(task)
        live = task.live
        if not live.is_over:
            return []
        self._forget(live)
        best = [] if live.request.best_of is None else [*self._choose_best(live)]
        return [*best, self._report.terminal(live)]

    def _drop(self, live: LiveRequest) -> None:
        for task in tuple(live.tasks):
            self._release(self._part(task))
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        """A request is over."""
        live.reading = live.mapping = None
        if self.live.pop(live.request_id, None) is not None:
            self._share.leave(live)

    def _release(self, task: ImageTask) -> None:
        """The one exit: whatever the reason, the lane, the pages and the state are given back here."""
        task.stage = Stage.DONE
        self._scoring.pop(task, None)
        if task.key is not None and self._painting.get(task.key) is task:
            del self._painting[task.key]
        if task.state is not None:
            task.held.close()
            task.state = None
        if task.lane is not None:
            self.lanes.free(task.lane)
            self._flight.pop(task)
            task.lane = None

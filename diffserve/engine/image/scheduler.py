"""RequestScheduler: assigns slots, chooses the rows of every tick, and moves images from stage to stage (no torch).

The order within a client is the policy's (``policy``), between clients and priorities that of ``fair_share``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from diffserve.api.types import Cancelled, Event, ImageFailed, ImageFinished, ModelInfo, Picture
from diffserve.engine.image.caches import CachedImage, SharedImages
from diffserve.engine.image.fair_share import PriorityShare, SlotQueue
from diffserve.engine.image.forecast import FINISHED_STAGES, Forecast, QueueEstimates
from diffserve.engine.image.outputs import NO_DIGESTS, Digests, ImageOutputs, ImageScores, select_best
from diffserve.engine.image.policy import POLICIES, TickCosts, TickTime, solo_s
from diffserve.engine.image.task import ImageTask, LiveRequest, TickOutcome, TickPlan
from diffserve.engine.records import FailureReason, Scheduler, Stage
from diffserve.settings.config import EngineConfig

PART_S: Final = 0.25
"""Seconds of UNet calls after which a step of an image with many tiles makes way for other images."""

OPTIMISM = 0.75
"""Factor on the measured time of the remaining work; a deadline that leaves less than that is lost."""

MAX_LEAD_IMAGES = 8
"""Default images by which a client may get ahead with rows that others could not use."""


class RequestScheduler(Scheduler[LiveRequest, Event]):
    """Decides what the engine runs next, and applies what a tick achieved.

    Args:
        config: The engine's configuration.
        info: The model.
        costs: The measured costs of UNet calls.
        scores: Scores of best-of images.
        digests: Returns the digests of a request's adapters and learned words; see ``ImageOutputs``.
    """

    product = "image"

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        costs: TickCosts,
        scores: ImageScores | None = None,
        digests: Digests = lambda _: NO_DIGESTS,
    ) -> None:
        super().__init__()
        self.config = config
        self.costs = costs
        self.policy = POLICIES[config.policy](config, costs)
        self._share = PriorityShare(2.0 * MAX_LEAD_IMAGES * info.default_num_steps)
        self._queue = SlotQueue(config.max_lanes, config.max_prepares_per_tick, self._share)
        self.slots = self._queue
        self._shared = SharedImages(info, config.result_cache_bytes)
        self.results = self._shared.results
        self._scores = scores or ImageScores(None)
        self._outputs = ImageOutputs(info, digests)
        self.forecast = Forecast(costs, config.max_lanes)
        self.estimates = QueueEstimates(self.forecast, self.live, self._share, self._shared, self._key)
        self._tick_time = TickTime()
        self._applied_s: float | None = None  # when the latest tick was applied, while images are in flight
        self._rows_waited = self._was_postponed = False

    @property
    def in_flight(self) -> tuple[ImageTask, ...]:
        """Images that hold a slot, in order of admission."""
        return self._queue.holders

    @property
    def waits(self) -> bool:
        """Whether images hold slots or wait for scores, even if the current tick has nothing to compute."""
        return bool(self._queue.holders or self._scores.pending)

    @property
    def cost_left(self) -> float:
        """Remaining work of all live requests, in UNet rows of the native size."""
        tasks = [task for live in list(self.live.values()) for task in live.tasks]
        return sum(task.cost_left for task in tasks if task.stage not in FINISHED_STAGES)

    def add(self, live: LiveRequest) -> None:
        """Queue the images of a validated request, except for those that another image answers."""
        self._rate(live)
        self.live[live.request_id] = live
        self._share.join(live)
        for task in live.tasks:
            if not self._shared.join(task):
                self._queue.add(task, self._key(task))

    def plan(self, now_s: float) -> TickPlan:
        """Assign slots to newcomers and choose the work of the next tick.

        Rows wait for one tick while newcomers are prepared, since these would run first anyhow, and then all run
        together. The tick after that admits no newcomers, so that rows never wait twice. Rows do not wait for
        newcomers that lacked pages, and may lack them again.

        Args:
            now_s: A reading of the engine's clock.
        """
        self.num_ticks += 1
        self._tick_time = TickTime(self.num_ticks, now_s)
        if self._applied_s is not None:
            self.forecast.learn_gap(now_s - self._applied_s)
        have_waited = self._rows_waited
        newcomers = tuple(self._queue.assign(self._key)) if not have_waited or self._was_postponed else ()
        self._rows_waited = (
            bool(newcomers)
            and not (have_waited or self._was_postponed)
            and any(task.stage is Stage.DENOISING for task in self.in_flight)
        )
        for task in newcomers:
            if task.awaits_upscaler:  # it continues in the second pass of hires fix
                task.stage = Stage.ENLARGING
        enlarged = [task for task in self.in_flight if task.stage is Stage.ENLARGING and task not in newcomers]
        prepare = (*enlarged[: self.config.max_prepares_per_tick], *newcomers)
        rows = () if self._rows_waited else self._choose_rows()
        num_rows = sum(task.rows_now for task in rows)
        part = min(num_rows, self._rows_of_part(rows[0])) if _has_parts(rows) else num_rows
        is_partial = part < num_rows
        finished = () if is_partial else tuple(task for task in rows if task.is_last_row)
        decodable = [task for task in self.in_flight if task.stage is Stage.DECODING]
        decodable = self._share.in_turn([*decodable, *finished])
        return TickPlan(
            prepare=prepare,
            group=rows[0].group if rows else None,
            rows=rows,
            num_rows=part,
            cost=sum(task.cost_now for task in rows) * (part / num_rows if is_partial else 1.0),
            previews=() if is_partial else tuple(task for task in rows if self._wants_preview(task)),
            decode=tuple(decodable[: self.config.max_decodes_per_tick]),
            is_partial=is_partial,
        )

    def apply(self, plan: TickPlan, outcome: TickOutcome, now_s: float) -> list[Event]:
        """Move the images of ``plan`` on by what the tick achieved, release finished ones, and return the events."""
        self.forecast.learn(plan, outcome, now_s - self._tick_time.now_s)
        self._applied_s = now_s
        events: list[Event] = []
        for task, image in self._shared.take_hits():
            events += self._answer(task, image, "hit")
        for task, failure in outcome.failures.items():
            for failed in (task, *self._shared.take_followers(task)):
                events += self.fail(failed, failure)
        self._was_postponed = bool(outcome.postponed)
        for task in outcome.postponed:
            if task.stage is Stage.WAITING and task.slot is not None:
                self._queue.postpone(task, self._key(task))
        for task, seconds in outcome.upscale_s.items():
            task.clock.prepare_s += seconds
        for task, group in outcome.groups.items():
            if task.stage in (Stage.WAITING, Stage.ENLARGING):
                task.group, task.stage = group, Stage.DENOISING
                task.clock.prepare_s += outcome.prepare_s[task]
                if task.row_index == task.settings.num_rows:  # it resumes with its final latents
                    task.stage = Stage.DECODING
                    task.clock.denoise_started_s = task.clock.denoise_ended_s = now_s
        for task in plan.rows:
            if task.stage is Stage.DENOISING and plan.is_partial:
                self._charge_rows(task, outcome, plan.cost)
                task.rows_done += plan.num_rows
            elif task.stage is Stage.DENOISING:
                events += self._advance(task, outcome)
        for task in plan.decode:
            if task.stage is Stage.DECODING and task in outcome.pictures:
                events += self._complete(task, outcome)
        events += self._take_scored()
        if not self.in_flight:
            self._applied_s = None
        return self.estimates.add_seconds_left(events, self.in_flight, now_s)

    def expire(self, now_s: float) -> list[Event]:
        """Give up requests whose deadline has passed, or is too close even for a request that runs alone."""
        events = super().expire(now_s)
        for live in list(self.live.values()):
            left_s = math.inf if live.request.deadline_s is None else live.submitted_s + live.request.deadline_s - now_s
            if left_s < live.solo_s and left_s < self._least_s(live):
                message = f"the deadline of {live.request.deadline_s:g} s cannot be met: the rest of the "
                message += f"{self.product} takes longer than {max(left_s, 0.0):.1f} s."
                events += self.give_up(live, FailureReason("deadline_exceeded", message, "deadline_s"))
        return events

    def seconds_left(self, live: LiveRequest, earlier: Iterable[LiveRequest], now_s: float) -> float | None:
        """Return the seconds until a new request has all of its images, without changing the queue.

        ``None`` while no pace is known, and for requests without a deadline while forecasts take too much of the time.

        Args:
            live: A request that is not in the queue yet.
            earlier: Requests before it that are not in the queue yet.
            now_s: A reading of the engine's clock.
        """
        self._rate(live)
        if live.request.deadline_s is None and now_s < self.estimates.next_forecast_s:
            return None
        for other in earlier:
            self._rate(other)
        left_s = self.estimates.seconds_left(now_s, (*earlier, live))
        return max(left_s[task] for task in live.tasks) if left_s else None

    def least_s(self, live: LiveRequest) -> float:
        """Return the seconds that a new request takes if it runs alone at the measured pace."""
        return live.solo_s * (self.forecast.pace or 1.0)

    def give_up(self, live: LiveRequest, failure: FailureReason) -> list[Event]:
        """Fail all images of a request that are not finished."""
        return [event for task in tuple(live.tasks) for event in self.fail(self._detach(task), failure)]

    def interrupt(self, request_id: str) -> list[Event | Cancelled]:
        """End a request early, before a plan is made: images that are being denoised are decoded after their next row.

        Waiting images are dropped, and so are images that other requests follow. Without any image left, the request is
        cancelled.
        """
        live = self.live.get(request_id)
        if live is None:
            return []
        for task in tuple(live.tasks):
            has_steps_left = task.slot is not None and (
                task.stage in (Stage.DENOISING, Stage.ENLARGING)
                or (task.stage is Stage.DECODING and task.settings.second is not None)
            )
            if task.stage in (Stage.WAITING, Stage.FOLLOWING) or (has_steps_left and task.followers):
                self._release(self._detach(task))
            elif has_steps_left:
                task.is_interrupted = True
                self._shared.stop_sharing(task)
        events = self._end(live)
        return events if live.num_painted or not events else [Cancelled(request_id=request_id)]

    def position_events(self, now_s: float) -> list[Event]:
        """Return events for requests whose position in the queue has changed or was sent long ago."""
        return self.estimates.position_events(self.in_flight, now_s)

    def fail(self, task: ImageTask, failure: FailureReason) -> list[Event]:
        """Fail one image; other images of its request and of the tick continue."""
        if task.stage is Stage.DONE:
            return []
        live = task.live
        live.first_failure = live.first_failure or failure
        if live.request.best_of is not None:  # the other candidates may be enough
            return self._leave(task)
        live.num_failed += 1
        code, message, _ = failure
        event = ImageFailed(request_id=live.request_id, image_index=task.image_index, code=code, message=message)
        return [event, *self._leave(task)]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every unfinished image holds a slot or waits, and no slot is lost."""
        self._queue.check_integrity()
        unfinished = {task for live in self.live.values() for task in live.tasks if task.stage is not Stage.DONE}
        waiting = set(self._queue.waiting) | self._shared.hits | self._scores.pending | self._shared.followers
        assert waiting | set(self.in_flight) == unfinished, "an image is lost, or queued although it is finished"
        assert not any(live.is_over for live in self.live.values()), "a finished request is still live"

    def _rate(self, live: LiveRequest) -> None:
        """Set the time that ``live`` takes alone, its due time, and its tick of submission."""
        live.submitted_tick = self.num_ticks
        live.solo_s = solo_s(live, self.costs) + live.request.num_painted * self._outputs.decode_s
        live.due_s = live.submitted_s + min(self.config.slo_scale * live.solo_s, live.request.deadline_s or math.inf)

    def _least_s(self, live: LiveRequest) -> float:
        """Return the seconds that the remaining work of ``live`` takes at the very least."""
        left, total = sum(task.cost_left for task in live.tasks), sum(task.total_cost for task in live.tasks)
        return OPTIMISM * live.solo_s * left / total * min(self.forecast.pace or 0.0, 1.0)

    def _key(self, task: ImageTask) -> float:
        return self.policy.key(task, self._tick_time)

    def _choose_rows(self) -> tuple[ImageTask, ...]:
        ready = [task for task in self.in_flight if task.stage is Stage.DENOISING]
        tasks = self.policy.choose(self._share.in_order(ready, self._key), self._tick_time) if ready else ()
        if not tasks:
            return ()
        tasks = self._share.limit_saturating_clients(
            tasks, ready, self.costs, lambda: Counter(task.live.line for task in self._queue.waiting)
        )
        large = [task for task in tasks if task.rows_done or self._rows_of_part(task) < task.rows_now]
        if large:  # a large image is evaluated in parts, alone
            tasks = large[:1] if large[0] is tasks[0] else [task for task in tasks if task not in large]
        self._share.start_tick(tasks)
        return tuple(sorted(tasks, key=lambda task: task.slot or 0))  # the same rows keep the same order

    def _rows_of_part(self, task: ImageTask) -> int:
        """Return the UNet rows of ``task`` that a tick may evaluate: full calls that take at most ``PART_S``."""
        if not _has_parts([task]):
            return task.rows_now
        group = task.group_now
        cap = max(1, self.costs.row_cap(group, may_probe=False))
        return cap * max(1, int(PART_S / max(self.costs.call_s(group, cap), 1e-6)))

    def _charge_rows(self, task: ImageTask, outcome: TickOutcome, cost: float) -> None:
        if task.clock.denoise_started_s is None:
            task.clock.denoise_started_s = outcome.rows_started_s
        task.clock.denoise_ended_s = outcome.rows_ended_s
        self._share.charge(task, cost)

    @staticmethod
    def _wants_preview(task: ImageTask) -> bool:
        has_preview = task.ends_step and not task.is_last_row
        waiters = (task, *task.followers)
        return has_preview and any(waiter.live.wants_preview(task.steps_done + 1) for waiter in waiters)

    def _advance(self, task: ImageTask, outcome: TickOutcome) -> list[Event]:
        ends_step, is_last_row = task.ends_step, task.is_last_row
        self._charge_rows(task, outcome, task.cost_now)
        task.rows_done = 0
        task.num_evaluations += task.rows_now
        task.row_index += 1
        if is_last_row:
            task.stage = Stage.DECODING
        elif task.row_index == task.settings.switch_row:
            task.group = task.switch()
        return list(self._outputs.step_events(task, outcome)) if ends_step else []

    def _complete(self, task: ImageTask, outcome: TickOutcome) -> list[Event]:
        """Deliver the decoded image of ``task`` to its request and to its followers."""
        self._share.charge(task, task.settings.row_cost * task.settings.num_views)
        if task.settings.second is not None and not task.is_interrupted:
            task.begin_second(Picture.from_array(outcome.pictures[task]))
            return []
        skipped = task.initial_settings.skipped_steps
        image = CachedImage(outcome.pictures[task], outcome.latents.get(task), task.similarity, skipped)
        painted = self._outputs.generated(task, image, outcome.decode_s[task])
        self._shared.put(task, image)
        followers = self._shared.take_followers(task)
        events = self._finish(task, painted)
        for follower in followers:
            events += self._answer(follower, image, "shared")
        return events

    def _answer(self, task: ImageTask, image: CachedImage, cached: Literal["hit", "shared"]) -> list[Event]:
        return self._finish(task, self._outputs.reused(task, image, cached))

    def _finish(self, task: ImageTask, painted: ImageFinished) -> list[Event]:
        """Deliver the image of ``task``, or have it scored if it is a best-of candidate."""
        if task.live.request.best_of is None:
            task.live.num_painted += 1
            return [painted, *self._leave(task)]
        self._release(task)
        task.stage = Stage.SCORING
        self._scores.start(task, painted.result)
        return []

    def _take_scored(self) -> list[Event]:
        """Add scored images to the candidates of their requests."""
        events: list[Event] = []
        for task, scored in self._scores.take_finished():
            if isinstance(scored, FailureReason):
                events += self.fail(task, scored)
            else:
                task.live.candidates.append(scored)
                events += self._leave(task)
        return events

    def _detach(self, task: ImageTask) -> ImageTask:
        """Detach ``task`` from the images that follow it, and return the task to release in its place."""
        leaving, queued = self._shared.detach(task)
        if queued is not None:
            self._queue.add(queued, self._key(queued))
        return leaving

    def _leave(self, task: ImageTask) -> list[Event]:
        self._release(task)
        return self._end(task.live)

    def _end(self, live: LiveRequest) -> list[Event]:
        """Remove ``live`` and return its last events, if it is over."""
        if not live.is_over:
            return []
        self._forget(live)
        best = [] if live.request.best_of is None else [*select_best(live)]
        return [*best, self._outputs.terminal(live)]

    def _drop(self, live: LiveRequest) -> None:
        for task in tuple(live.tasks):
            self._release(self._detach(task))
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        """Remove a request that is over."""
        live.lora_loading = live.control_loading = live.reference_loading = None
        if self.live.pop(live.request_id, None) is not None:
            self._share.leave(live)

    def _release(self, task: ImageTask) -> None:
        """Release the slot, pages and state of ``task``; every image leaves through this function."""
        task.stage = Stage.DONE
        self._scores.drop(task)
        self._shared.release(task)
        if task.state is not None:
            task.loaded_state.close()
            task.state = None
        self._queue.release(task)


def _has_parts(tasks: Sequence[ImageTask]) -> bool:
    """Return whether ``tasks`` is one image with tiles, whose rows may be evaluated in several ticks."""
    return len(tasks) == 1 and tasks[0].settings.tiles is not None

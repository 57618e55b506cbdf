"""Who runs next: admission to lanes, the choice of rows for a tick, and every move of an image's stage. No torch.

Within a client the order is the policy's (``policy``). With the default it is shortest remaining work first with
ageing, and an image's key is

    remaining work + ageing_rows_per_tick * tick of submission          (smaller runs first)

with work in UNet rows of the native size. Between clients ``FairShare`` decides.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from diffserve.config import EngineConfig
from diffserve.engine.image.outputs import ImageOutputs
from diffserve.engine.image.policy import POLICIES, Moment, TickCosts, solo_s
from diffserve.engine.image.queues import LANES_PER_LANE_LEFT, FairShare, ImageQueue, LaneTable
from diffserve.engine.image.result_cache import Kept, ResultCache, key_of
from diffserve.engine.image.task import ImageTask, LiveRequest, TickOutcome, TickPlan
from diffserve.engine.records import FailureReason, Scheduler, Stage
from diffserve.types import Event, ImageFailed, ModelInfo, Queued

PLACES_EVERY_S = 0.5
"""Places in the queue are told no more often, however fast it moves."""

KEPT_OF_LANES = 8
"""One lane, and one more for so many, is kept beyond ``max_lanes`` for clients who hold none."""

FORGIVEN_PICTURES = 8
"""By as many pictures of the model's default a client may get ahead, by room in ticks that others could not use."""


class RequestScheduler(Scheduler[LiveRequest, Event]):
    """Owns the waiting room, the lanes and the images in flight. ``costs``: of UNet calls, as they are known now."""

    product = "picture"

    def __init__(self, config: EngineConfig, info: ModelInfo, costs: TickCosts) -> None:
        super().__init__()
        self.config = config
        self.costs = costs
        self.policy = POLICIES[config.policy](config, costs)
        self._moment = Moment()
        self.lanes = LaneTable(config.max_lanes, num_kept=1 + config.max_lanes // KEPT_OF_LANES)
        self._waiting = ImageQueue()
        self._share = FairShare(2.0 * FORGIVEN_PICTURES * info.default_num_steps)
        self._flight: dict[ImageTask, int] = {}  # with its number in the order of arrival
        self._order = itertools.count()
        self._report = ImageOutputs(info)
        self._info = info
        self.results = ResultCache(config.result_cache_bytes)
        self._painting: dict[bytes, ImageTask] = {}  # by key, those whose picture others may share
        self._hits: list[tuple[ImageTask, Kept]] = []
        self._places_told_s = -math.inf

    @property
    def in_flight(self) -> tuple[ImageTask, ...]:
        """Images that hold a lane, in order of admission."""
        return tuple(self._flight)

    @property
    def cost_left(self) -> float:
        """Work still to do for everything accepted, in UNet rows of the native size."""
        tasks = [task for live in list(self.live.values()) for task in live.tasks]
        return sum(task.cost_left for task in tasks if task.stage not in (Stage.DONE, Stage.FOLLOWING))

    def add(self, live: LiveRequest) -> None:
        """Let a validated request into the waiting room."""
        live.submitted_tick = self.num_ticks
        live.solo_s = solo_s(live, self.costs) + live.request.num_images * self._report.decode_s
        live.due_s = live.submitted_s + min(self.config.slo_scale * live.solo_s, live.request.deadline_s or math.inf)
        self.live[live.request_id] = live
        self._share.join(live.client)
        for task in live.tasks:
            if not self._is_painted_already(task):
                self._waiting.add(task, self._key(task), next(self._order))

    def plan(self, now_s: float) -> TickPlan:
        """Choose this tick's work; newcomers get their lanes here. ``now_s``: a reading of the engine's clock."""
        self.num_ticks += 1
        self._moment = Moment(self.num_ticks, now_s)
        prepare = tuple(self._admit())
        rows = self._choose_rows()
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

    def apply(self, plan: TickPlan, outcome: TickOutcome) -> list[Event]:
        """Move everybody on by what the tick achieved, free what is finished, and tell the world."""
        events: list[Event] = []
        for task, kept in self._take_hits():
            events += self._answer(task, kept, "hit")
        for task, failure in outcome.failures.items():
            for one in (task, *self._take_followers(task)):
                events += self.fail(one, failure)
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
                task.live.num_painted += 1
                self._share.charge(task.live.client, task.settings.row_cost)
                skipped = task.settings.skipped_steps
                kept = Kept(outcome.pictures[task], outcome.latents.get(task), task.similarity, skipped)
                events.append(self._report.painted(task, kept, outcome.decode_s[task]))
                if task.key is not None:
                    self.results.put(task.key, kept)
                followers = self._take_followers(task)
                events += self._leave(task)
                for one in followers:
                    events += self._answer(one, kept, "shared")
        return events

    def give_up(self, live: LiveRequest, failure: FailureReason) -> list[Event]:
        """All images of a request that are not painted yet are given up."""
        return [event for task in tuple(live.tasks) for event in self.fail(self._part(task), failure)]

    def moved_up(self, now_s: float) -> list[Event]:
        """News for those who wait for their first lane and whose place in the queue is another than last told."""
        if now_s - self._places_told_s < PLACES_EVERY_S:
            return []
        self._places_told_s = now_s
        waiting = {live.tasks[0]: live for live in self.live.values() if not live.has_started}
        order = self._share.in_order((*self._flight, *waiting), self._key)
        events: list[Event] = []
        for place, live in enumerate(waiting[task] for task in order if task in waiting):
            if live.queue_position != place:
                live.queue_position = place
                events.append(Queued(request_id=live.request_id, queue_position=place))
        return events

    def fail(self, task: ImageTask, failure: FailureReason) -> list[Event]:
        """Give up one image; its neighbours and siblings go on."""
        if task.stage is Stage.DONE:
            return []
        live = task.live
        live.num_failed += 1
        live.first_failure = live.first_failure or failure
        code, message, _ = failure
        told = ImageFailed(request_id=live.request_id, image_index=task.image_index, code=code, message=message)
        return [told, *self._leave(task)]

    def check_integrity(self) -> None:
        """Lanes free + used = total, every used lane has one living holder, nobody finished is still queued."""
        self.lanes.check_integrity()
        holders = {task.lane: task for task in self._flight}
        assert holders == self.lanes.owners, "the lane table and the images in flight disagree"
        living = {task for live in self.live.values() for task in live.tasks if task.stage is not Stage.DONE}
        waiting = set(self._waiting) | {task for task, _ in self._hits}
        waiting |= {task for painter in self._painting.values() for task in painter.followers}
        assert waiting | set(self._flight) == living, "an image is lost, or queued although gone"
        assert not any(live.is_over for live in self.live.values()), "a finished request is still live"

    def _key(self, task: ImageTask) -> float:
        return self.policy.key(task, self._moment)

    def _admit(self) -> Iterator[ImageTask]:
        """Newcomers, with their lanes."""
        held = Counter(task.live.client for task in self._flight)
        for _ in range(self.config.max_prepares_per_tick):
            most = LANES_PER_LANE_LEFT * self.lanes.num_left if self.lanes.num_free else min(1, self.lanes.num_left)
            heads = [task for task in self._waiting.heads(self._key) if held[task.live.client] < most]
            if not heads:
                return
            if len(heads) > 1:
                order = self._share.in_order((*self._flight, *heads), self._key)
                heads = [task for task in order if task.lane is None]
            task, number = self._waiting.take(heads[0].live.client)
            task.lane = self.lanes.allocate(task)
            self._flight[task] = number
            held[task.live.client] += 1
            yield task

    def _is_painted_already(self, task: ImageTask) -> bool:
        """Whether the picture of a newcomer is known, or being painted; then it takes no part in the queue."""
        request = task.live.request
        if self.results.max_bytes == 0 or request.seed is None:
            return False
        key = key_of(request, task.seed, self._info)
        kept, leader = self.results.get(key), self._painting.get(key)
        if kept is not None:
            task.stage = Stage.DECODING
            self._hits.append((task, kept))
            self.results.num_hits += 1
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
        task.live.num_painted += 1
        return [self._report.known(task, kept, cached), *self._leave(task)]

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
        self._share.led_by(chosen[0].live.client)
        return tuple(sorted(chosen, key=lambda task: task.lane or 0))  # the same rows keep the same order

    @staticmethod
    def _wants_preview(task: ImageTask) -> bool:
        is_shown = task.ends_step and not task.is_last_row
        return is_shown and any(one.live.wants_preview(task.step_index + 1) for one in (task, *task.followers))

    def _advance(self, task: ImageTask, outcome: TickOutcome) -> list[Event]:
        ends_step = task.ends_step
        if task.clock.denoise_started_s is None:
            task.clock.denoise_started_s = outcome.rows_started_s
        task.clock.denoise_ended_s = outcome.rows_ended_s
        self._share.charge(task.live.client, task.cost_now)
        task.num_evaluations += task.rows_now
        task.row_index += 1
        if task.row_index == task.table.num_rows:
            task.stage = Stage.DECODING
        return list(self._report.stepped(task, outcome)) if ends_step else []

    def _leave(self, task: ImageTask) -> list[Event]:
        self._release(task)
        if not task.live.is_over:
            return []
        self._forget(task.live)
        return [self._report.terminal(task.live)]

    def _drop(self, live: LiveRequest) -> None:
        for task in tuple(live.tasks):
            self._release(self._part(task))
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        """A request is over."""
        if self.live.pop(live.request_id, None) is not None:
            self._share.leave(live.client)

    def _release(self, task: ImageTask) -> None:
        """The one exit: whatever the reason, the lane, the pages and the state are given back here."""
        task.stage = Stage.DONE
        if task.key is not None and self._painting.get(task.key) is task:
            del self._painting[task.key]
        if task.state is not None:
            task.held.close()
            task.state = None
        if task.lane is not None:
            self.lanes.free(task.lane)
            self._flight.pop(task)
            task.lane = None

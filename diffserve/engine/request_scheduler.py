"""Who runs next: admission to lanes, the choice of rows for a tick, and every move of an image's stage. No torch.

The order is shortest-remaining-first with ageing. An image's key is

    remaining rows + ageing_rows_per_tick * tick of submission          (smaller runs first)

Waiting does not change the key: everybody's advantage over newcomers grows alike with time, so the order never has to
be refreshed, and a job of N remaining rows is overtaken only by jobs that came within N / ageing ticks after it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from diffserve.config import EngineConfig
from diffserve.engine.lanes import LaneTable
from diffserve.engine.outcome_events import OutcomeEvents
from diffserve.engine.plan import TickOutcome, TickPlan
from diffserve.engine.task import Failure, GroupKey, ImageTask, LiveRequest, Stage
from diffserve.types import Cancelled, Event, ModelInfo

EXPIRED = "deadline_exceeded"
PLACES_EVERY_S = 0.5
"""Places in the queue are told no more often, however fast it moves."""


class RequestScheduler:
    """Owns the waiting room, the lanes and the images in flight. Single-threaded: the engine's tick calls it."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self.config = config
        self.lanes = LaneTable(config.max_lanes)
        self.live: dict[str, LiveRequest] = {}
        self.num_ticks = 0
        self._waiting: list[tuple[float, int, ImageTask]] = []
        self._flight: dict[ImageTask, int] = {}  # with its number in the order of arrival
        self._order = itertools.count()
        self._report = OutcomeEvents(info)
        self._places_told_s = -math.inf

    @property
    def has_work(self) -> bool:
        """Whether a tick would do something."""
        return bool(self.live)

    @property
    def in_flight(self) -> tuple[ImageTask, ...]:
        """Images that hold a lane, in order of admission."""
        return tuple(self._flight)

    @property
    def rows_left(self) -> int:
        """UNet rows still to run for everything accepted."""
        tasks = [task for live in list(self.live.values()) for task in live.tasks]
        return sum(task.rows_left for task in tasks if task.stage is not Stage.DONE)

    def add(self, live: LiveRequest) -> None:
        """Let a validated request into the waiting room."""
        live.submitted_tick = self.num_ticks
        self.live[live.request_id] = live
        for task in live.tasks:
            heapq.heappush(self._waiting, (self._key(task), next(self._order), task))

    def plan(self, row_cap: Callable[[GroupKey], int]) -> TickPlan:
        """Choose this tick's work; newcomers get their lanes here. ``row_cap``: rows that a group's tick may hold."""
        self.num_ticks += 1
        prepare = tuple(self._admit())
        rows = self._choose_rows(row_cap)
        done = [task for task in self._flight if task.stage is Stage.DECODING]
        done += [task for task in rows if task.is_last_row]
        return TickPlan(
            prepare=prepare,
            group=rows[0].group if rows else None,
            rows=rows,
            num_rows=sum(task.rows_now for task in rows),
            previews=tuple(task for task in rows if self._wants_preview(task)),
            decode=tuple(done[: self.config.max_decodes_per_tick]),
        )

    def apply(self, plan: TickPlan, outcome: TickOutcome) -> list[Event]:
        """Move everybody on by what the tick achieved, free what is finished, and tell the world."""
        events: list[Event] = []
        for task, failure in outcome.failures.items():
            events += self.fail(task, failure)
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
                events.append(self._report.painted(task, outcome))
                events += self._leave(task)
        return events

    def cancel(self, request_id: str) -> list[Event]:
        """Forget a request at once; its lanes are free when this returns. Empty when it is not live."""
        live = self.live.pop(request_id, None)
        if live is None:
            return []
        for task in live.tasks:
            self._release(task)
        return [Cancelled(request_id=request_id)]

    def expire(self, now_s: float) -> list[Event]:
        """Give up the images of requests whose deadline has passed."""
        events: list[Event] = []
        for live in [one for one in self.live.values() if (one.deadline_at_s or now_s) < now_s]:
            message = f"the deadline of {live.request.deadline_s:g} s passed before the picture was finished."
            failure = Failure(EXPIRED, message, "deadline_s")
            for task in live.tasks:
                events += self.fail(task, failure)
        return events

    def moved_up(self, now_s: float) -> list[Event]:
        """News for those who wait for their first lane and whose place in the queue is another than last told."""
        if now_s - self._places_told_s < PLACES_EVERY_S:
            return []
        self._places_told_s = now_s
        waiting = [live for live in self.live.values() if not live.has_started]
        waiting.sort(key=lambda live: self._key(live.tasks[0]))
        events: list[Event] = []
        for place, live in enumerate(waiting):
            if live.queue_position != place:
                live.queue_position = place
                events.append(self._report.queued(live))
        return events

    def fail(self, task: ImageTask, failure: Failure) -> list[Event]:
        """Give up one image; its neighbours and siblings go on."""
        if task.stage is Stage.DONE:
            return []
        live = task.live
        live.num_failed += 1
        live.first_failure = live.first_failure or failure
        return [self._report.image_failed(task, failure), *self._leave(task)]

    def check_integrity(self) -> None:
        """Lanes free + used = total, every used lane has one living holder, nobody finished is still queued."""
        self.lanes.check_integrity()
        holders = {task.lane: task for task in self._flight}
        assert holders == self.lanes.owners, "the lane table and the images in flight disagree"
        living = {task for live in self.live.values() for task in live.tasks if task.stage is not Stage.DONE}
        waiting = {task for _, _, task in self._waiting if task.stage is Stage.WAITING and task.lane is None}
        assert waiting | set(self._flight) == living, "an image is lost, or queued although gone"
        assert not any(live.is_over for live in self.live.values()), "a finished request is still live"

    def _key(self, task: ImageTask) -> float:
        return task.rows_left + self.config.ageing_rows_per_tick * task.live.submitted_tick

    def _admit(self) -> Iterator[ImageTask]:
        for _ in range(self.config.max_prepares_per_tick):
            while self._waiting and self._waiting[0][2].stage is Stage.DONE:
                heapq.heappop(self._waiting)
            if not self._waiting or not self.lanes.num_free:
                return
            _, order, task = heapq.heappop(self._waiting)
            task.lane = self.lanes.allocate(task)
            self._flight[task] = order
            yield task

    def _postpone(self, task: ImageTask) -> None:
        """Back into the waiting room, at its old place, without a lane."""
        if task.stage is Stage.WAITING and task.lane is not None:
            self.lanes.free(task.lane)
            task.lane = None
            heapq.heappush(self._waiting, (self._key(task), self._flight.pop(task), task))

    def _choose_rows(self, row_cap: Callable[[GroupKey], int]) -> tuple[ImageTask, ...]:
        ready = sorted((task for task in self._flight if task.stage is Stage.DENOISING), key=self._key)
        if not ready:
            return ()
        group = ready[0].group
        assert group is not None
        cap, chosen, num_rows = row_cap(group), [], 0
        for task in ready:
            if task.group == group and num_rows + task.rows_now <= cap:
                chosen.append(task)
                num_rows += task.rows_now
        return tuple(sorted(chosen, key=lambda task: task.lane or 0))  # the same rows keep the same order

    @staticmethod
    def _wants_preview(task: ImageTask) -> bool:
        every = task.live.request.preview_every
        return every > 0 and task.ends_step and not task.is_last_row and (task.step_index + 1) % every == 0

    def _advance(self, task: ImageTask, outcome: TickOutcome) -> list[Event]:
        ends_step = task.ends_step
        if task.clock.denoise_started_s is None:
            task.clock.denoise_started_s = outcome.rows_started_s
        task.clock.denoise_ended_s = outcome.rows_ended_s
        task.num_evaluations += task.rows_now
        task.row_index += 1
        if task.row_index == task.table.num_rows:
            task.stage = Stage.DECODING
        return list(self._report.stepped(task, outcome)) if ends_step else []

    def _leave(self, task: ImageTask) -> list[Event]:
        self._release(task)
        if not task.live.is_over:
            return []
        self.live.pop(task.live.request_id, None)
        return [self._report.terminal(task.live)]

    def _release(self, task: ImageTask) -> None:
        """The one exit: whatever the reason, the lane, the pages and the canvas are given back here."""
        task.stage = Stage.DONE
        if task.canvas is not None:
            task.canvas.close()
            task.canvas = None
        if task.lane is not None:
            self.lanes.free(task.lane)
            self._flight.pop(task)
            task.lane = None

"""Completion-time forecast: the work ahead of an image in the queue, at the measured seconds per row (no torch).

Images share ticks. An image ends neither before the work up to its position in the queue is done, nor before its steps
are done one after another; the forecast is the later of the two. Later requests are unknown to it.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from diffserve.api.pace import PauseDetector
from diffserve.api.types import Event, Progress, Queued
from diffserve.engine.image.caches import SharedImages
from diffserve.engine.image.fair_share import MAX_SLOWDOWN, Line, Order, PriorityShare
from diffserve.engine.image.policy import TickCosts
from diffserve.engine.image.task import GroupKey, ImageTask, LiveRequest, TickOutcome, TickPlan
from diffserve.engine.records import Stage

MEMORY_S: Final = 8.0
"""Time constant in seconds with which older ticks lose their weight in the pace."""

RECENT: Final = 0.8
"""Weight of the previous average of preparation and decoding times for each new value."""

MAX_FORECAST_SHARE: Final = 0.05
MAX_FORECAST_CREDIT_S: Final = 1.0
"""Forecasts take at most this share of the time; unused time is saved up to the credit in seconds."""

POSITIONS_EVERY_S: Final = 0.5
"""Minimum seconds between two looks for changed queue positions."""

POSITION_REPEAT_S: Final = 5.0
"""Seconds after which an unchanged queue position is sent again, with the new time left."""

FINISHED_STAGES: Final = (Stage.DONE, Stage.FOLLOWING, Stage.SCORING)
"""Stages in which there is nothing to compute for an image."""

UNKNOWN_CAP: Final = 8
"""Assumed rows per tick of a size that has not run yet."""


class Forecast:
    """The measured pace of an engine and the completion times that follow from it.

    Args:
        costs: The measured costs of UNet calls.
        max_lanes: Images that may be in flight at once.
    """

    def __init__(self, costs: TickCosts, max_lanes: int) -> None:
        self._costs = costs
        self._max_lanes = max_lanes
        self._call_total_s = self._tick_total_s = 0.0
        self._pauses, self._gap_pauses = PauseDetector(), PauseDetector()
        self._prepare_s = self._decode_s = 0.0
        self._groups: dict[tuple[int, int], GroupKey] = {}  # the latest group of each size

    @property
    def pace(self) -> float | None:
        """Seconds that a second of measured calls takes with everything around it; ``None`` before the first tick."""
        return self._tick_total_s / self._call_total_s if self._call_total_s > 0.0 else None

    def learn(self, plan: TickPlan, outcome: TickOutcome, seconds: float) -> None:
        """Record a tick that took ``seconds`` from its plan to its end, unless the process paused in it.

        ``plan`` is not yet applied.
        """
        if plan.group is not None and plan.rows:
            self._groups[plan.group[:2]] = plan.group
        call_s = self._call_s(plan)
        usual_s = call_s * (self.pace or math.inf) if call_s else 0.0
        upscale_s = sum(outcome.upscale_s.values())
        usual_s += upscale_s + len(outcome.prepare_s) * self._prepare_s + len(outcome.decode_s) * self._decode_s
        if self._pauses.is_pause(seconds, usual_s):
            return
        for spent_s in outcome.prepare_s.values():
            self._prepare_s = spent_s if not self._prepare_s else RECENT * self._prepare_s + (1 - RECENT) * spent_s
        for spent_s in outcome.decode_s.values():
            self._decode_s = spent_s if not self._decode_s else RECENT * self._decode_s + (1 - RECENT) * spent_s
        if plan.group is None or not plan.rows:
            return
        decoded_now_s = [spent_s for task, spent_s in outcome.decode_s.items() if task in plan.rows]  # after the steps
        other_s = sum(outcome.prepare_s.values()) + sum(decoded_now_s) + upscale_s
        self._decay(seconds)
        self._call_total_s += call_s
        self._tick_total_s += max(seconds - other_s, 0.0)

    def _call_s(self, plan: TickPlan) -> float:
        """Return the seconds that the calls of ``plan`` take by their measured costs."""
        if plan.group is None or not plan.rows:
            return 0.0
        rows = sum(task.rows_now for task in plan.rows)
        work = sum(task.cost_now / task.settings.row_cost for task in plan.rows)
        return self._costs.call_s(plan.group, plan.num_rows) * work / rows

    def learn_gap(self, seconds: float) -> None:
        """Record the time between two ticks while there was work, unless the process paused in it."""
        if self._gap_pauses.is_pause(seconds, 0.0):
            return
        self._decay(seconds)
        self._tick_total_s += seconds if self._call_total_s else 0.0

    def _decay(self, seconds: float) -> None:
        weight = math.exp(-seconds / MEMORY_S)
        self._call_total_s *= weight
        self._tick_total_s *= weight

    def seconds_left(self, order: Sequence[ImageTask]) -> dict[ImageTask, float]:
        """Return the seconds until each image of ``order`` is decoded; empty while no pace is known.

        Args:
            order: All images that are not done, in the order in which they are to run.
        """
        if self.pace is None:
            return {}
        groups = [self._group_of(task) for task in order]
        behind = Counter[GroupKey]()  # rows of one tick, of this image and those behind it
        of_line = Counter[tuple[GroupKey, Line]]()
        for task, group in zip(order, groups, strict=True):
            behind[group] += rows_of(task)
            of_line[group, task.live.line] += rows_of(task)
        caps = {group: self._cap(group) for group in behind}
        saturated = {group for (group, _), rows in of_line.items() if rows >= caps[group]}
        tick_rows = {group: max(1, min(caps[group], rows)) for group, rows in behind.items()}
        row_s = {group: self.pace * self._costs.call_s(group, rows) / rows for group, rows in tick_rows.items()}
        ends: defaultdict[GroupKey, list[float]] = defaultdict(list)  # of the images that share the ticks of a group
        work_s, left_s = 0.0, dict[ImageTask, float]()
        for task, group in zip(order, groups, strict=True):
            settings, rows = task.settings, rows_of(task)
            rows_left = task.cost_left / settings.row_cost
            setup_s = self._decode_s + (self._prepare_s if task.stage is Stage.WAITING else 0.0)
            work_s += setup_s + rows_left * row_s[group]
            slots = max(1, min(caps[group] // rows, self._max_lanes))
            start_s = heapq.heappop(ends[group]) if len(ends[group]) >= slots else 0.0
            shared = max(rows, min(caps[group], behind[group]))
            behind[group] -= rows
            line_rows = min(caps[group], of_line[group, task.live.line])
            call_s = self._costs.call_s(group, shared)
            if line_rows < caps[group] and group in saturated:
                call_s = min(call_s, MAX_SLOWDOWN * self._costs.call_s(group, line_rows))
            steps_s = rows_left / rows * self.pace * call_s
            left_s[task] = max(work_s, start_s + setup_s + steps_s)
            heapq.heappush(ends[group], left_s[task])
        return left_s

    def _group_of(self, task: ImageTask) -> GroupKey:
        """Return the group of ``task``; before its prompt is encoded, that of the latest image of its size."""
        width_px, height_px = task.settings.call_px
        size = height_px, width_px
        return task.group or self._groups.get(size) or GroupKey(*size, 0)

    def _cap(self, group: GroupKey) -> int:
        cap = self._costs.row_cap(group, may_probe=False) if group.num_tokens else UNKNOWN_CAP
        return min(cap, 2 * self._max_lanes)


def rows_of(task: ImageTask) -> int:
    """Return the rows that ``task`` has in its next tick, at least one."""
    return task.rows_now if task.row_index < task.settings.num_rows else 1


class QueueEstimates:
    """Queue positions and remaining times that clients are informed of.

    Args:
        forecast: The measured pace.
        live: The scheduler's live requests, by id.
        share: The fair shares of clients and priorities.
        shared: Images that need no computation of their own.
        key: The order within a client.

    Attributes:
        timer: A clock for the cost of forecasts.
        next_forecast_s: The earliest time of the next forecast that is not mandatory.
    """

    def __init__(
        self,
        forecast: Forecast,
        live: Mapping[str, LiveRequest],
        share: PriorityShare,
        shared: SharedImages,
        key: Order,
    ) -> None:
        self.timer: Callable[[], float] = time.thread_time
        self.next_forecast_s = -math.inf
        self._forecast = forecast
        self._live = live
        self._share = share
        self._shared = shared
        self._key = key
        self._done_s: dict[ImageTask, float] = {}  # completion times of the latest forecast
        self._positions_s = -math.inf

    def seconds_left(self, now_s: float, newcomers: Sequence[LiveRequest] = ()) -> dict[ImageTask, float]:
        """Return the seconds until each image is done, and set the time of the next forecast.

        Args:
            now_s: A reading of the engine's clock.
            newcomers: Requests that are not in the queue yet.
        """
        began_s = self.timer()
        tasks = [task for live in (*dict(self._live).values(), *newcomers) for task in live.tasks]
        hits = self._shared.hits
        order = self._share.copy(newcomers).in_order(
            (task for task in tasks if task.stage not in FINISHED_STAGES and task not in hits), self._key
        )
        left_s = self._forecast.seconds_left(order)
        earliest_s = max(self.next_forecast_s, now_s - MAX_FORECAST_CREDIT_S)
        self.next_forecast_s = earliest_s + (self.timer() - began_s) / MAX_FORECAST_SHARE
        return left_s

    def add_seconds_left(self, events: list[Event], in_flight: Iterable[ImageTask], now_s: float) -> list[Event]:
        """Return ``events`` with the remaining seconds of the image and of its request in every ``Progress``."""
        if not any(isinstance(event, Progress) for event in events):
            return events
        if now_s >= self.next_forecast_s:
            self._done_s = {task: now_s + seconds for task, seconds in self.seconds_left(now_s).items()}
        task_of = {
            (waiter.live.request_id, waiter.image_index): task
            for task in in_flight
            for waiter in (task, *task.followers)
        }
        for index, event in enumerate(events):
            if not isinstance(event, Progress):
                continue
            task = task_of.get((event.request_id, event.image_index))
            done_s = now_s if task is None else self._completion_s(task)  # without a task it is decoded already
            if done_s is None:
                continue
            others_s = [self._completion_s(other) for other in self._unfinished(event.request_id)]
            last_s = max([done_s, *(other_s for other_s in others_s if other_s is not None)])
            image_s, request_s = (round(max(end_s - now_s, 0.0), 4) for end_s in (done_s, last_s))
            events[index] = replace(event, seconds_left=image_s, request_seconds_left=request_s)
        return events

    def position_events(self, in_flight: Iterable[ImageTask], now_s: float) -> list[Event]:
        """Return ``Queued`` events for requests without a slot whose queue position is new or was sent long ago."""
        if now_s - self._positions_s < POSITIONS_EVERY_S:
            return []
        self._positions_s = now_s
        waiting = {live.tasks[0]: live for live in self._live.values() if not live.has_started}
        order = self._share.copy(owes_batch=False).in_order((*in_flight, *waiting), self._key)
        events: list[Event] = []
        for position, live in enumerate(waiting[task] for task in order if task in waiting):
            is_old = now_s >= max(live.submitted_s, live.position_sent_s) + POSITION_REPEAT_S
            if live.queue_position != position or is_old:
                live.queue_position, live.position_sent_s = position, now_s
                events.append(Queued(request_id=live.request_id, queue_position=position))
        left_s = self.seconds_left(now_s) if events and now_s >= self.next_forecast_s else {}
        for index, event in enumerate(events):
            seconds = [left_s[task] for task in self._live[event.request_id].tasks if task in left_s]
            if seconds:
                events[index] = replace(event, seconds_left=round(max(seconds), 4))
        return events

    def _unfinished(self, request_id: str) -> list[ImageTask]:
        """Return the images that a request waits for, leaders in place of followers."""
        live, hits = self._live.get(request_id), self._shared.hits
        tasks = [] if live is None else [task for task in live.tasks if task not in hits]
        return [task.leader or task for task in tasks if task.stage not in (Stage.DONE, Stage.SCORING)]

    def _completion_s(self, task: ImageTask) -> float | None:
        """Return when ``task`` will be done, by the latest forecast or else the one at its submission."""
        if task in self._done_s:
            return self._done_s[task]
        return None if task.live.seconds_left is None else task.live.submitted_s + task.live.seconds_left

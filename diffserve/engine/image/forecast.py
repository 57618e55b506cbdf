"""Completion-time forecast: the work before an image in its queue order, at the measured seconds per row. No torch.

Images share ticks, so an image ends neither before the work ahead of it and its own are done, nor before its own
steps are done one after another. The forecast is the later of the two. It does not know of requests that come later.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from diffserve.api.pace import PauseDetector
from diffserve.engine.image.policy import TickCosts
from diffserve.engine.image.priorities import MAX_SLOWDOWN
from diffserve.engine.image.queues import Line
from diffserve.engine.image.task import GroupKey, ImageTask, TickOutcome, TickPlan
from diffserve.engine.records import Stage

MEMORY_S: Final = 8.0
"""Time constant in seconds with which older ticks lose their weight in the pace."""

RECENT: Final = 0.8
"""Weight of the previous average of preparation and decoding times for each new value."""

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
        self._called_s = self._took_s = 0.0
        self._pauses, self._gap_pauses = PauseDetector(), PauseDetector()
        self._prepare_s = self._decode_s = 0.0
        self._groups: dict[tuple[int, int], GroupKey] = {}  # the latest group of each size

    @property
    def pace(self) -> float | None:
        """Seconds that a second of measured calls takes with everything around it; ``None`` before the first tick."""
        return self._took_s / self._called_s if self._called_s > 0.0 else None

    def learn(self, plan: TickPlan, outcome: TickOutcome, seconds: float) -> None:
        """Record a tick that took ``seconds`` from its plan to its end, unless the process paused in it.

        ``plan`` is not yet applied.
        """
        if plan.group is not None and plan.rows:
            self._groups[plan.group[:2]] = plan.group
        called_s = self._call_s(plan)
        usual_s = called_s * (self.pace or math.inf) if called_s else 0.0
        usual_s += len(outcome.prepare_s) * self._prepare_s + len(outcome.decode_s) * self._decode_s
        if self._pauses.is_pause(seconds, usual_s):
            return
        for spent_s in outcome.prepare_s.values():
            self._prepare_s = spent_s if not self._prepare_s else RECENT * self._prepare_s + (1 - RECENT) * spent_s
        for spent_s in outcome.decode_s.values():
            self._decode_s = spent_s if not self._decode_s else RECENT * self._decode_s + (1 - RECENT) * spent_s
        if plan.group is None or not plan.rows:
            return
        at_once = [spent_s for task, spent_s in outcome.decode_s.items() if task in plan.rows]  # after the steps
        besides_s = sum(outcome.prepare_s.values()) + sum(at_once)
        self._remember(seconds)
        self._called_s += called_s
        self._took_s += max(seconds - besides_s, 0.0)

    def _call_s(self, plan: TickPlan) -> float:
        """Return the seconds that the calls of ``plan`` take by their measured costs."""
        if plan.group is None or not plan.rows:
            return 0.0
        rows = sum(task.rows_now for task in plan.rows)
        work = sum(task.cost_now / task.settings.row_cost for task in plan.rows)
        return self._costs.call_s(plan.group, rows) * work / rows

    def learn_gap(self, seconds: float) -> None:
        """Record the time between two ticks while there was work, unless the process paused in it."""
        if self._gap_pauses.is_pause(seconds, 0.0):
            return
        self._remember(seconds)
        self._took_s += seconds if self._called_s else 0.0

    def _remember(self, seconds: float) -> None:
        kept = math.exp(-seconds / MEMORY_S)
        self._called_s *= kept
        self._took_s *= kept

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
            own_rows = task.cost_left / settings.row_cost
            own_s = self._decode_s + (self._prepare_s if task.stage is Stage.WAITING else 0.0)
            work_s += own_s + own_rows * row_s[group]
            slots = max(1, min(caps[group] // rows, self._max_lanes))
            start_s = heapq.heappop(ends[group]) if len(ends[group]) >= slots else 0.0
            shared = max(rows, min(caps[group], behind[group]))
            behind[group] -= rows
            line_rows = min(caps[group], of_line[group, task.live.line])
            call_s = self._costs.call_s(group, shared)
            if line_rows < caps[group] and group in saturated:
                call_s = min(call_s, MAX_SLOWDOWN * self._costs.call_s(group, line_rows))
            steps_s = own_rows / rows * self.pace * call_s
            left_s[task] = max(work_s, start_s + own_s + steps_s)
            heapq.heappush(ends[group], left_s[task])
        return left_s

    def _group_of(self, task: ImageTask) -> GroupKey:
        """Return the group of ``task``; before its prompt is encoded, that of the latest image of its size."""
        size = task.settings.height_px, task.settings.width_px
        return task.group or self._groups.get(size) or GroupKey(*size, 0)

    def _cap(self, group: GroupKey) -> int:
        cap = self._costs.row_cap(group, may_probe=False) if group.num_tokens else UNKNOWN_CAP
        return min(cap, 2 * self._max_lanes)


def rows_of(task: ImageTask) -> int:
    """Return the rows that ``task`` has in its next tick, at least one."""
    return task.rows_now if task.row_index < task.settings.num_rows else 1

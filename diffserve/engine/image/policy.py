"""Scheduling policies: the order of images, and the images of the next tick (pure functions of costs; no torch).

``latency`` runs the shortest remaining work first, ``throughput`` the group that does most work per second, and
``goodput`` maximizes the requests that meet their deadlines. Images have the same bytes under all policies. The engine
and ``benchmarks/simulator.py`` use the same classes; baselines are in ``benchmarks/baseline_policies.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from diffserve.engine.image.task import GroupKey, ImageTask, LiveRequest
from diffserve.settings.config import EngineConfig

AGEING_ROWS_PER_TICK: Final = 0.5
"""Precedence that an image gains per tick of waiting, in rows of the native size.

An image of N rows is overtaken only by images that arrive within N / ``AGEING_ROWS_PER_TICK`` ticks, so none starves.
"""

LATE: Final = 20.0
"""Factor on the cost of a late image. With more, long late images stay for minutes; with less, old late images make new
ones late."""

HEADROOM: Final = 0.75
"""Share of a tick that UNet calls may take where deadlines are near, since the same tick encodes prompts and decodes
images."""


class TickCosts(Protocol):
    """Measured costs of UNet calls."""

    def row_cap(self, group: GroupKey, *, may_probe: bool = True) -> int:
        """Return the rows that a tick of ``group`` may hold; with ``may_probe`` sometimes more, to measure them."""

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        """Return the seconds that ``num_rows`` rows of ``group`` take, estimated for a group that is not measured."""


class TickTime(NamedTuple):
    """The number of a tick, and the reading of the engine's clock when it is planned."""

    tick: int = 0
    now_s: float = 0.0


class Policy(ABC):
    """Base class of policies.

    Deadlines are ``slo_scale`` times what a request takes alone (as in AlpaServe, Li et al. 2023), or the request's own
    deadline if that is earlier.
    """

    def __init__(self, config: EngineConfig, costs: TickCosts) -> None:
        self.config = config
        self.costs = costs

    @abstractmethod
    def key(self, task: ImageTask, moment: TickTime) -> float:
        """Return the key of ``task`` within its client, the smallest first; it never decreases while an image waits."""

    @abstractmethod
    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Return the images of the next tick, all of one group; none if it is better to wait.

        Args:
            ready: All images that can run, at least one, in fair order: by priority, client, and :meth:`key`.
            moment: The tick that is planned.
        """

    def pack(self, ready: Iterable[ImageTask], group: GroupKey) -> list[ImageTask]:
        """Return as many images of ``group`` as fit into a tick, in the order of ``ready``."""
        load = TickLoad(self.costs)
        return [task for task in ready if task.group == group and load.takes(task)]


class TickLoad:
    """UNet rows of a tick by group of calls: full and shallow rows (DeepCache) make separate calls."""

    def __init__(self, costs: TickCosts) -> None:
        self._costs = costs
        self._caps: dict[GroupKey, int] = {}
        self._rows = Counter[GroupKey]()

    def has_room(self, task: ImageTask) -> bool:
        """Return whether the rows of ``task`` fit into the calls of its group; alone an image always does."""
        group = task.group_now
        rows = self._rows[group]
        return not rows or rows + task.rows_now <= self._cap(group)

    def takes(self, task: ImageTask) -> bool:
        """Add the rows of ``task`` if they fit, and return whether they do."""
        if not self.has_room(task):
            return False
        self.add(task)
        return True

    def add(self, task: ImageTask) -> None:
        """Add the rows of ``task``."""
        self._rows[task.group_now] += task.rows_now

    def seconds(self, further: ImageTask | None = None) -> float:
        """Return the seconds of all calls, with the rows of one ``further`` image."""
        rows = self._rows + Counter({further.group_now: further.rows_now} if further else {})
        return sum(self._costs.call_s(group, num_rows) for group, num_rows in rows.items())

    def _cap(self, group: GroupKey) -> int:
        """Return the rows that a call of ``group`` may have; it stays the same for the load."""
        cap = self._caps.get(group)
        if cap is None:
            cap = self._caps[group] = self._costs.row_cap(group)
        return cap


class Latency(Policy):
    """Shortest remaining work first (Schrage 1968), in rows of the native size, with ageing."""

    def key(self, task: ImageTask, moment: TickTime) -> float:
        """Return the remaining work plus the age; waiting adds the same advantage over newcomers to all images."""
        return task.cost_left + AGEING_ROWS_PER_TICK * task.live.submitted_tick

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Return the first image and those that may share its call."""
        return self.pack(ready, group_of(ready[0]))


class Throughput(Latency):
    """The group whose tick does most work per second, unless another group has an image too old to be overtaken."""

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Return the images of that group, the shortest first."""
        newcomer = AGEING_ROWS_PER_TICK * moment.tick
        leading = [task for task in ready if task.live.request.priority == ready[0].live.request.priority]
        aged = next((task for task in leading if self.key(task, moment) <= newcomer), None)
        if aged is not None:
            return self.pack(ready, group_of(aged))
        packed = [self.pack(ready, group) for group in dict.fromkeys(map(group_of, leading))]
        return max(packed, key=self._work_per_s)

    def _work_per_s(self, selected: Sequence[ImageTask]) -> float:
        load = TickLoad(self.costs)
        for task in selected:
            load.add(task)
        return sum(task.cost_now for task in selected) / load.seconds()


class Goodput(Latency):
    """Policy that meets as many deadlines as possible, with the shortest images first.

    More rows make a tick cheaper per row and slower for each image, so a tick is filled only while its images still
    meet their deadlines. Images that cannot meet their deadline even alone wait, until they age.
    """

    def key(self, task: ImageTask, moment: TickTime) -> float:
        """Return the key of ``Latency``, larger by a multiple of the cost for a late image."""
        late = 0.0 if self._pace_s(task, moment) >= self._solo_pace_s(task) else (LATE - 1.0) * task.total_cost
        return super().key(task, moment) + late

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Return the first image and those that may share its call without making the images before them late."""
        group, load, selected, most_s = group_of(ready[0]), TickLoad(self.costs), list[ImageTask](), math.inf
        for task in ready:
            if task.group != group or not load.has_room(task) or (selected and load.seconds(task) > most_s):
                continue
            selected.append(task)
            load.add(task)
            pace_s = self._pace_s(task, moment)
            if pace_s >= self._solo_pace_s(task):
                most_s = min(most_s, HEADROOM * pace_s)
        return selected

    def _pace_s(self, task: ImageTask, moment: TickTime) -> float:
        """Return the seconds that each remaining tick of ``task`` may take to meet the deadline."""
        return (task.live.due_s - moment.now_s) / max(1, task.settings.num_rows - task.row_index)

    def _solo_pace_s(self, task: ImageTask) -> float:
        """Return the seconds that a tick of ``task`` takes alone."""
        return task.live.solo_s / task.table.num_rows


POLICIES: dict[str, type[Policy]] = {
    "latency": Latency,
    "throughput": Throughput,
    "goodput": Goodput,
}
"""Policies by their names in ``config.POLICIES``."""


def solo_s(live: LiveRequest, costs: TickCosts) -> float:
    """Return the seconds that the UNet takes for a request that runs alone, with all images in every tick.

    The prompt is not encoded yet, so ``num_tokens`` of the group is 0: any group of the size.
    """
    settings, num_images = live.settings, live.request.num_painted
    group = GroupKey(settings.height_px, settings.width_px, 0)
    num_rows = settings.table.num_rows
    controlled = map(bool, settings.controlled or ((),) * num_rows)
    refined = np.arange(num_rows) >= (num_rows if settings.switch_row is None else settings.switch_row)
    kinds = zip(settings.full.tolist(), settings.rows_at, controlled, refined.tolist(), strict=True)
    rows = Counter(kinds)
    return sum(
        count
        * costs.call_s(
            group._replace(is_shallow=not full, is_controlled=is_controlled, is_refined=refined),
            num_parts * num_images,
        )
        for (full, num_parts, is_controlled, refined), count in rows.items()
    )


def group_of(task: ImageTask) -> GroupKey:
    """Return the group of a prepared image."""
    assert task.group is not None
    return task.group

"""Policies: in which order images get on, and which of them share the next tick. Pure: no clock, no torch.

The scheduler asks, in an engine as in ``benchmarks/simulator.py``. A policy is told how much work is left of an image,
when it came, until when it should be done, and what calls cost; it answers with the images of the next tick. It never
touches pictures: they are the same bytes under all.

=========== ======================================================================================================
latency     shortest remaining work first, with ageing; the tick goes to the group of whoever is first
throughput  the same within a group; the tick goes to the group that gets most work done in a second
goodput     shortest first of those who can still be in time, in ticks that leave them in time; then the others
=========== ======================================================================================================

What servers do that batch by request is in ``benchmarks/baseline_policies.py``, to be measured against.

**Ageing** (``AGEING_ROWS_PER_TICK``) goes by cost: an image of N rows, of the native size, is overtaken only by what
came within N / ageing ticks after it (``LATE`` times as many where it is late, under goodput). So nobody starves.

**Deadlines** are those of an SLO: ``slo_scale`` times what a request takes alone (an SLO scale, as in AlpaServe, Li et
al. 2023), or the request's own deadline where that is earlier.
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
"""Precedence that an image gains per tick of waiting, in rows of the native size. Twice the pixels count as two."""

LATE: Final = 20.0
"""A late image counts as so many times its cost. More, and long ones that are late stay for minutes; less, and old late
ones make new ones late."""

HEADROOM: Final = 0.75
"""Share of a tick that its calls may take where deadlines are near: newcomers are encoded and pictures decoded beside
them, and whoever is left to its last moment is late by those."""


class TickCosts(Protocol):
    """What is known of UNet calls."""

    def row_cap(self, group: GroupKey, *, may_probe: bool = True) -> int:
        """Return the rows that a tick of ``group`` may hold; with ``may_probe`` sometimes more, to measure them."""

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        """Seconds that ``num_rows`` rows of ``group`` take; an estimate where the group was never seen."""


class TickTime(NamedTuple):
    """When a tick is planned: its number, and a reading of the engine's clock."""

    tick: int = 0
    now_s: float = 0.0


class Policy(ABC):
    """Who runs next."""

    def __init__(self, config: EngineConfig, costs: TickCosts) -> None:
        self.config = config
        self.costs = costs

    @abstractmethod
    def key(self, task: ImageTask, moment: TickTime) -> float:
        """The order within a client, the smallest first. Of an image that waits it grows or stays."""

    @abstractmethod
    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """The images of the next tick, all of one group; none where it is better to wait.

        ready  everybody who can run, at least one: by :meth:`key` within a client, in fair shares between clients, and
               those of one priority before those of the other
        """

    def pack(self, ready: Iterable[ImageTask], group: GroupKey) -> list[ImageTask]:
        """As many of ``group`` as a tick may hold, in the order of ``ready``; who is too large leaves others room."""
        load = TickLoad(self.costs)
        return [task for task in ready if task.group == group and load.takes(task)]


class TickLoad:
    """UNet rows of a tick, by the calls that they make: whole and shallow rows (DeepCache) make calls of their own."""

    def __init__(self, costs: TickCosts) -> None:
        self._costs = costs
        self._caps: dict[GroupKey, int] = {}
        self._rows = Counter[GroupKey]()

    def has_room(self, task: ImageTask) -> bool:
        """Whether the calls that ``task`` would join may hold its rows, too."""
        group = task.group_now
        return self._rows[group] + task.rows_now <= self._cap(group)

    def takes(self, task: ImageTask) -> bool:
        """Take the rows of ``task``, if there is room."""
        group = task.group_now
        rows = self._rows[group] + task.rows_now
        if rows > self._cap(group):
            return False
        self._rows[group] = rows
        return True

    def add(self, task: ImageTask) -> None:
        """Take the rows of ``task``."""
        self._rows[task.group_now] += task.rows_now

    def seconds(self, further: ImageTask | None = None) -> float:
        """What the calls take, with those of a ``further`` image."""
        rows = self._rows + Counter({further.group_now: further.rows_now} if further else {})
        return sum(self._costs.call_s(group, num_rows) for group, num_rows in rows.items())

    def _cap(self, group: GroupKey) -> int:
        """Rows that a call may have; asked for once."""
        cap = self._caps.get(group)
        if cap is None:
            cap = self._caps[group] = self._costs.row_cap(group)
        return cap


class Latency(Policy):
    """Shortest remaining work first (Schrage 1968), in rows of the native size, minus what was earned by waiting."""

    def key(self, task: ImageTask, moment: TickTime) -> float:
        """Waiting does not change it: everybody's advantage over newcomers grows alike with time."""
        return task.cost_left + AGEING_ROWS_PER_TICK * task.live.submitted_tick

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Whoever is first, and who may share its call."""
        return self.pack(ready, group_of(ready[0]))


class Throughput(Latency):
    """The group whose tick does most work in a second, unless somebody of another is so old that none may overtake."""

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """The tick of that group, shortest first within it."""
        newcomer = AGEING_ROWS_PER_TICK * moment.tick
        leading = [task for task in ready if task.live.request.priority == ready[0].live.request.priority]
        aged = next((task for task in leading if self.key(task, moment) <= newcomer), None)
        if aged is not None:
            return self.pack(ready, group_of(aged))
        packed = [self.pack(ready, group) for group in dict.fromkeys(map(group_of, leading))]
        return max(packed, key=self._work_per_s)

    def _work_per_s(self, chosen: Sequence[ImageTask]) -> float:
        load = TickLoad(self.costs)
        for task in chosen:
            load.add(task)
        return sum(task.cost_now for task in chosen) / load.seconds()


class Goodput(Latency):
    """As many in time as can be: shortest first of those who still can, and ticks no longer than those in them allow.

    More rows in a tick are cheaper each and make everybody in it slower, so a tick is filled as long as the images in
    it that were in time remain so at that pace. Whoever cannot be in time any more, even alone, gives way to others,
    but not for ever.
    """

    def key(self, task: ImageTask, moment: TickTime) -> float:
        """As under latency; that of somebody late is larger by a multiple of its cost."""
        late = 0.0 if self._pace_s(task, moment) >= self._own_pace_s(task) else (LATE - 1.0) * task.total_cost
        return super().key(task, moment) + late

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Whoever is first, and who may share its call without making those before it late."""
        group, load, chosen, most_s = group_of(ready[0]), TickLoad(self.costs), list[ImageTask](), math.inf
        for task in ready:
            if task.group != group or not load.has_room(task) or (chosen and load.seconds(task) > most_s):
                continue
            chosen.append(task)
            load.add(task)
            pace_s = self._pace_s(task, moment)
            if pace_s >= self._own_pace_s(task):
                most_s = min(most_s, HEADROOM * pace_s)
        return chosen

    def _pace_s(self, task: ImageTask, moment: TickTime) -> float:
        """Seconds that each of its ticks may take from now on; what has none left has that long for its picture."""
        return (task.live.due_s - moment.now_s) / max(1, task.settings.num_rows - task.row_index)

    def _own_pace_s(self, task: ImageTask) -> float:
        """Seconds that each of its ticks takes alone."""
        return task.live.solo_s / task.table.num_rows


POLICIES: dict[str, type[Policy]] = {
    "latency": Latency,
    "throughput": Throughput,
    "goodput": Goodput,
}
"""By their names in ``config.POLICIES``."""


def solo_s(live: LiveRequest, costs: TickCosts) -> float:
    """Seconds that the UNet takes for a request that is alone: all of its images in every tick.

    Its texts are not read yet, so it may be of any group of its size: ``num_tokens`` is 0.
    """
    settings, num_images = live.settings, live.request.num_painted
    group = GroupKey(settings.height_px, settings.width_px, 0)
    num_rows = settings.table.num_rows
    controlled = map(bool, settings.controlled or ((),) * num_rows)
    refined = np.arange(num_rows) >= (num_rows if settings.switch_row is None else settings.switch_row)
    kinds = zip(settings.full.tolist(), settings.guided.tolist(), controlled, refined.tolist(), strict=True)
    rows = Counter(kinds)
    return sum(
        count
        * costs.call_s(
            group._replace(is_shallow=not full, is_controlled=told, is_refined=refined), (1 + guided) * num_images
        )
        for (full, guided, told, refined), count in rows.items()
    )


def group_of(task: ImageTask) -> GroupKey:
    """The group of an image that is ready, and so was prepared."""
    assert task.group is not None
    return task.group

"""When pictures will be done: the queue played forward by the policy itself, over what calls cost. No torch.

What is played with are copies of the images and of the shares; the policy, the fair shares and the priorities are those
that serve. From one picture's end to the next the ticks are much alike, and the later they are, the more are taken as
one stride::

    ticks of a stride   until the first of those who run is done, or caps change, or a part of the way so far
    seconds of a tick   pace * call_s(group, rows), shallow rows and ControlNets by their share of the work

``pace`` is what a second of calls has lately taken in truth, with everything besides: planning, previews, the language
model's turns, other engines' ticks, neighbours on the machine. Encoding and decoding are added where they come.

What it cannot know: who comes later, and goes first; what is not measured yet.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from diffserve.config import EngineConfig
from diffserve.engine.image.policy import POLICIES, Moment, TickCosts
from diffserve.engine.image.priorities import PriorityShare
from diffserve.engine.image.queues import Line
from diffserve.engine.image.task import GroupKey, ImageTask, TickOutcome, TickPlan
from diffserve.engine.records import Stage
from diffserve.pace import PauseDetector

MEMORY_S: Final = 8.0
"""What was seen longer ago counts for less and less."""

RECENT: Final = 0.8
"""Weight of what was known of a newcomer's or a picture's seconds, for each new one."""

MOST_STRIDES: Final = 160
"""Whoever is not done after so many is taken to follow at the pace seen in them."""

SHORTEST_STRIDE: Final = 1
GROWTH: Final = 0.1
CONTESTED_GROWTH: Final = 0.03
STEADY_GROWTH: Final = 1.0
"""A stride is no longer than that part of all before it, for in the middle of one others may get their turn; where
several clients or priorities take turns, they do so every few ticks, and where the policy is steady nobody does."""

NEAR_STRIDE: Final = 8
"""Where strides are longer, single ticks that differ are not told apart."""

UNKNOWN_CAP: Final = 8
"""Rows of a tick of a size that was never painted."""


class QuietCosts:
    """``costs``, asked without consequences, for ticks that are to come; see :meth:`look_on`."""

    def __init__(self, costs: TickCosts) -> None:
        self._costs = costs
        self.call_s = costs.call_s
        self.look_on(0)

    def look_on(self, num_asked: int, *, is_far: bool = False) -> None:
        """From now on as if caps had been asked for so often since; ``is_far``: ticks in which more are let in are too
        far away to be told apart, and too few to count."""
        self.num_asked, self._is_far = num_asked, is_far

    def row_cap(self, group: GroupKey, *, ahead: int | None = None) -> int:
        """See ``TickCosts``."""
        cap = self._cap(group, self.num_asked if ahead is None else ahead)
        self.num_asked += ahead is None
        return cap

    def _cap(self, group: GroupKey, ahead: int) -> int:
        if not group.num_tokens:
            return UNKNOWN_CAP
        cap = self._costs.row_cap(group, ahead=ahead)
        return min(cap, self._costs.row_cap(group, ahead=ahead + 1)) if self._is_far else cap


class Forecast:
    """What is known of an engine's pace, and when its pictures will be done by that. ``costs``: of calls as they are
    known now; ``timer``: of what looking takes, in seconds."""

    def __init__(self, costs: TickCosts, config: EngineConfig) -> None:
        self._costs = QuietCosts(costs)
        self._config = config
        self.timer: Callable[[], float] = time.perf_counter
        self._policy = POLICIES[config.policy](config, self._costs)
        self._called_s = self._took_s = 0.0
        self._pauses, self._gap_pauses = PauseDetector(), PauseDetector()
        self._prepare_s = self._decode_s = 0.0
        self._groups: dict[tuple[int, int], GroupKey] = {}  # by size, the latest that was seen

    @property
    def pace(self) -> float | None:
        """Seconds that a second of calls takes; ``None`` while nothing has been seen."""
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
        at_once = [spent_s for task, spent_s in outcome.decode_s.items() if task in plan.rows]  # not beside the steps
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

    def seconds_left(
        self,
        order: Sequence[ImageTask],
        share: PriorityShare,
        moment: Moment,
        wanted: Collection[ImageTask] | None = None,
    ) -> dict[ImageTask, float]:
        """Seconds from ``moment`` until each image is a picture, or each of ``wanted``; empty while no pace is known.

        order  everybody who is not done, those without a lane in the order in which they will get one
        share  a copy, to be used up
        """
        if self.pace is None:
            return {}
        played = {self._copy(task): task for task in order}
        held = [one for one in played if one.lane is not None]
        ready, over = [one for one in held if not is_painted(one)], [one for one in held if is_painted(one)]
        waiting = deque(one for one in played if one.lane is None)
        num_waiting = Counter(one.live.line for one in waiting)
        missing = set(order if wanted is None else wanted)
        done_s: dict[ImageTask, float] = {}
        begun_s = now_s = moment.now_s
        tick, work, num_asked = moment.tick, 0.0, 0
        growth = STEADY_GROWTH if self._policy.is_steady else GROWTH
        if len({one.live.line for one in played}) > 1:
            growth = CONTESTED_GROWTH
        for _ in range(MOST_STRIDES):
            while waiting and len(ready) + len(over) < self._config.max_lanes:
                ready.append(waiting.popleft())
                num_waiting[ready[-1].live.line] -= 1
                now_s += self._prepare_s if ready[-1].stage is Stage.WAITING else 0.0
            if not (ready or over) or not missing:
                return done_s
            most = SHORTEST_STRIDE + int(growth * (tick - moment.tick))
            self._costs.look_on(num_asked, is_far=most > NEAR_STRIDE)
            chosen = self._choose(ready, share, num_waiting, Moment(tick, now_s)) if ready else ()
            if ready and not chosen:
                break  # they wait for others of their kind
            if chosen:
                asked = self._costs.num_asked - num_asked
                ticks = min(most, *(one.settings.num_rows - one.row_index for one in chosen))
                ticks = ticks if most > NEAR_STRIDE else self._alike(chosen, ticks, num_asked, asked)
                num_asked += ticks * asked
                now_s += self._seconds(chosen, ticks)
                tick += ticks
                work += self._advance(chosen, share, ticks)
                if any(map(is_painted, chosen)):
                    over += [one for one in ready if is_painted(one)]
                    ready = [one for one in ready if not is_painted(one)]
            for one in over:
                share.charge(one, one.settings.row_cost)
            for start in range(0, len(over), self._config.max_decodes_per_tick):
                decoded = [played[one] for one in over[start : start + self._config.max_decodes_per_tick]]
                now_s += self._decode_s * len(decoded)
                done_s.update(dict.fromkeys(decoded, now_s - begun_s))
                missing.difference_update(decoded)
            over.clear()
        per_work_s = (now_s - begun_s) / work if work else 0.0
        moment = Moment(tick, now_s)
        for one in (*over, *share.in_order(ready, lambda task: self._policy.key(task, moment)), *waiting):
            now_s += one.cost_left * per_work_s
            done_s[played[one]] = now_s - begun_s
        return done_s

    def _alike(self, chosen: Sequence[ImageTask], ticks: int, num_asked: int, asked: int) -> int:
        """How many of ``ticks`` let in as many as the first does, in each of which caps are ``asked`` for so often."""
        group = chosen[0].group
        assert group is not None
        first = self._costs.row_cap(group, ahead=num_asked)
        others = (self._costs.row_cap(group, ahead=num_asked + place * asked) for place in range(1, ticks))
        return next((place for place, cap in enumerate(others, start=1) if cap != first), ticks)

    def _choose(
        self, ready: Sequence[ImageTask], share: PriorityShare, num_waiting: Mapping[Line, int], moment: Moment
    ) -> Sequence[ImageTask]:
        chosen = self._policy.choose(share.in_order(ready, lambda task: self._policy.key(task, moment)), moment)
        if chosen:
            chosen = share.spared(chosen, ready, self._costs, lambda: num_waiting)
            share.led_by(chosen)
        return chosen

    def _seconds(self, chosen: Sequence[ImageTask], ticks: int) -> float:
        """Of so many ticks of ``chosen``."""
        assert self.pace is not None
        assert chosen[0].group is not None
        rows, work = 0, 0.0
        for one in chosen:
            settings, now, then = one.settings, one.row_index, one.row_index + ticks
            rows += settings.rows_left[now] - settings.rows_left[then]
            work += (settings.cost_left[now] - settings.cost_left[then]) / settings.row_cost
        return ticks * self.pace * self._costs.call_s(chosen[0].group, max(1, round(rows / ticks))) * work / rows

    @staticmethod
    def _advance(chosen: Sequence[ImageTask], share: PriorityShare, ticks: int) -> float:
        """The work of it."""
        done = 0.0
        for one in chosen:
            before = one.cost_left
            one.row_index += ticks
            share.charge(one, before - one.cost_left)
            done += before - one.cost_left
        return done

    def _copy(self, task: ImageTask) -> ImageTask:
        """One to play with. Of what was not read yet, the group is that of the last of its size."""
        one = copy.copy(task)
        size = task.settings.height_px, task.settings.width_px
        one.group = task.group or self._groups.get(size) or GroupKey(*size, 0)
        return one


def is_painted(task: ImageTask) -> bool:
    """Whether all of its steps are done."""
    return task.row_index >= task.settings.num_rows

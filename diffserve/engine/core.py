"""The engine on a postcard: one tick = plan, run, apply."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from diffserve.config import EngineConfig
from diffserve.engine.plan import TickOutcome, TickPlan, TickTrace
from diffserve.engine.request_scheduler import RequestScheduler
from diffserve.engine.runners import Runners, failure_of
from diffserve.engine_stats import ImageStats
from diffserve.pace import Pace
from diffserve.runtime import DiffusionModel
from diffserve.runtime.kv import PagePool
from diffserve.types import Event

STUDY_SHARE = 0.125
MOST_CREDIT_S = 1.0

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and runners, driven by one thread at a time. ``pages``: see ``Runners``.

    num_postponed  images that the latest tick would have let in, had there been pages
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        *,
        pages: PagePool | None = None,
    ) -> None:
        self.clock = clock
        self.scheduler = RequestScheduler(config, model.info)
        self.runners = Runners(model, config, clock, pages)
        self.trace: deque[TickTrace] = deque(maxlen=config.trace_ticks)
        self.num_postponed = 0
        self._counts = Counter[str]()
        self._busy_s = 0.0
        self._pace = Pace(clock)
        self._study_credit_s = 0.0

    def tick(self, take_cancelled: Callable[[], list[str]]) -> list[Event]:
        """Advance everybody who fits by one row. Cancellations are taken before the plan and before its result."""
        started_s = self.clock()
        self._pace.begin()
        events = self._cancel(take_cancelled()) + self.scheduler.expire(started_s)
        plan = self.scheduler.plan(self.runners.row_cap)
        work = sum(task.cost_now for task in plan.rows)
        outcome = self._run(plan)
        self.num_postponed = len(outcome.postponed)
        events += self._cancel(take_cancelled())
        events += self.scheduler.apply(plan, outcome)
        events += self.scheduler.moved_up(self.clock())
        self.runners.trim(self.scheduler.in_flight)
        self._remember(plan, outcome, started_s)
        self._pace.did(work)
        self._study(plan)
        if not self.scheduler.has_work:
            self._pace.rest()
        return events

    def seconds_left(self) -> float:
        """Seconds that everything accepted will take at the recent pace, at least one; one where no pace is known."""
        return max(1.0, self._pace.seconds(self.scheduler.cost_left) or 1.0)

    def stats(self) -> ImageStats:
        """Counters for the metrics."""
        return ImageStats(
            num_running=len(self.scheduler.in_flight),
            num_waiting=sum(not live.has_started for live in self.scheduler.live.values()),
            num_steps=self._counts["steps"],
            num_rows=self._counts["rows"],
            num_painted=self._counts["painted"],
            num_failed=self._counts["failed"],
            busy_s=self._busy_s,
        )

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` or ``PoolIntegrityError`` when a lane, an image or a page has been lost."""
        self.scheduler.check_integrity()
        self.runners.check_integrity(self.scheduler.in_flight)

    def _cancel(self, request_ids: list[str]) -> list[Event]:
        return [event for request_id in request_ids for event in self.scheduler.cancel(request_id)]

    def _run(self, plan: TickPlan) -> TickOutcome:
        """What cannot be blamed on one image fails the images of this tick, and the engine lives on."""
        try:
            return self.runners.run(plan)
        except Exception as error:
            logger.error("a tick failed as a whole")
            return TickOutcome(failures=dict.fromkeys(plan.tasks, failure_of(error)))

    def _study(self, plan: TickPlan) -> None:
        """While images of a group that is not measured wait for each other, measure it: an eighth of the time."""
        group = plan.group
        if group is None or not self.runners.groups.is_wanted(group):
            return
        if sum(task.group == group for task in self.scheduler.in_flight) <= len(plan.rows):
            return
        self._study_credit_s = min(self._study_credit_s + STUDY_SHARE * self.trace[-1].wall_s, MOST_CREDIT_S)
        if self._study_credit_s >= 0.0:
            started_s = self.clock()
            self.runners.study(group)
            self._study_credit_s -= self.clock() - started_s

    def _remember(self, plan: TickPlan, outcome: TickOutcome, started_s: float) -> None:
        if not plan.tasks:
            return
        tick = TickTrace(
            tick=self.scheduler.num_ticks,
            calls=tuple(outcome.calls),
            num_prepared=len(plan.prepare),
            num_decoded=len(outcome.pictures),
            wall_s=self.clock() - started_s,
        )
        self.trace.append(tick)
        self._busy_s += tick.wall_s
        self._counts.update(
            steps=bool(tick.calls), rows=tick.num_rows, painted=tick.num_decoded, failed=len(outcome.failures)
        )

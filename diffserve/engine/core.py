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
from diffserve.runtime import DiffusionModel
from diffserve.runtime.kv import PagePool
from diffserve.types import Event

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

    def tick(self, take_cancelled: Callable[[], list[str]]) -> list[Event]:
        """Advance everybody who fits by one row. Cancellations are taken before the plan and before its result."""
        started_s = self.clock()
        events = self._cancel(take_cancelled()) + self.scheduler.expire(started_s)
        plan = self.scheduler.plan(self.runners.row_cap)
        outcome = self._run(plan)
        self.num_postponed = len(outcome.postponed)
        events += self._cancel(take_cancelled())
        events += self.scheduler.apply(plan, outcome)
        events += self.scheduler.moved_up(self.clock())
        self.runners.trim(self.scheduler.in_flight)
        self._remember(plan, outcome, started_s)
        return events

    def seconds_per_request(self) -> float:
        """How soon a place should come free, from the rows left and the recent pace; 1 when nothing is known."""
        recent = [tick for tick in tuple(self.trace) if tick.num_rows]
        num_rows, num_live = sum(tick.num_rows for tick in recent), len(self.scheduler.live)
        if not num_rows or not num_live:
            return 1.0
        return max(1.0, self.scheduler.rows_left / num_live * sum(tick.wall_s for tick in recent) / num_rows)

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

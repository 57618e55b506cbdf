"""Baseline policies for benchmarks: how servers that batch by request schedule. The product does not offer them.

=========== ====================================================================================
serial      one request at a time, in order of arrival
static      equal requests wait for each other and run to their end together
same-key    continuous batching of equal requests; new ones join those that run
=========== ====================================================================================
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from diffserve.engine.image.policy import Policy, TickTime, group_of
from diffserve.engine.image.scheduler import RequestScheduler
from diffserve.engine.image.task import ImageTask
from diffserve.settings.config import POLICIES, EngineConfig


class InOrder(Policy):
    """Requests in the order in which they came."""

    def key(self, task: ImageTask, moment: TickTime) -> float:
        """Return the time of arrival."""
        return task.live.submitted_s


class Serial(InOrder):
    """One request at a time, as a pipeline behind a lock serves them."""

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Return the images of the request that has started, else of the first."""
        first = next(iter(started(ready)), ready[0])
        return self.pack((task for task in ready if task.live is first.live), group_of(first))


class Static(InOrder):
    """Batches that are full or whose first request has waited ``max_batch_delay_s``; none joins a running batch."""

    max_batch_delay_s = 0.1

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Return the running batch, else the first batch that may begin, else nothing."""
        if running := started(ready):
            return running
        batches: dict[Hashable, list[ImageTask]] = {}
        for task in ready:
            batches.setdefault(batch_key(task), []).append(task)
        for batch in batches.values():
            limit = max(1, self.costs.row_cap(group_of(batch[0])) // (1 + bool(batch[0].settings.guided.any())))
            if len(batch) >= limit or moment.now_s - batch[0].live.submitted_s >= self.max_batch_delay_s:
                return batch[:limit]
        return ()


class SameKey(InOrder):
    """Continuous batching of requests that agree in sampler, steps, guidance and size."""

    def choose(self, ready: Sequence[ImageTask], moment: TickTime) -> Sequence[ImageTask]:
        """Return the running images and their equals; if none runs, the first image and its equals."""
        key = batch_key(next(iter(started(ready)), ready[0]))
        equal = [task for task in ready if batch_key(task) == key]
        return self.pack(sorted(equal, key=lambda task: not task.row_index), group_of(equal[0]))


BASELINES: dict[str, type[Policy]] = {"serial": Serial, "static": Static, "same-key": SameKey}
ALL_POLICIES = (*POLICIES, *BASELINES)
"""Names of the product's policies and of the baselines."""


def configured(policy: str) -> str:
    """Return the value of ``EngineConfig.policy`` for an engine that runs ``policy``, which may be a baseline."""
    return EngineConfig().policy if policy in BASELINES else policy


def use(scheduler: RequestScheduler, policy: str) -> None:
    """Replace the policy of ``scheduler`` if ``policy`` is a baseline."""
    if policy in BASELINES:
        scheduler.policy = BASELINES[policy](scheduler.config, scheduler.costs)


def started(ready: Iterable[ImageTask]) -> list[ImageTask]:
    """Return the images that have run before."""
    return [task for task in ready if task.row_index]


def batch_key(task: ImageTask) -> Hashable:
    """Return what requests must agree in to share a batch where rows of different settings cannot."""
    return (task.group, task.settings.kind, task.settings.skipped_steps, *task.settings.recipe().values())

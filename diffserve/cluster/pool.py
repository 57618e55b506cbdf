"""Pool of replicas on Ray, whose number follows the queued work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from diffserve.cluster.config import ClusterConfig
from diffserve.cluster.replica import Calls, RayReplica
from diffserve.service.engine.pool import ReplicaPool
from diffserve.service.metrics import Metrics
from diffserve.settings.config import Settings
from diffserve.store.unet_paths import UNetPathFile

SCALE_EVERY_S: Final = 0.5
MAX_ATTEMPTS: Final = 3
"""Replicas that one request may occupy; it may be the reason that they are lost."""

MAX_IDLE_FACTOR: Final = 10.0
"""Upper limit, in units of ``idle_s``, for how long an unneeded replica with a slow start is kept."""

log = logging.getLogger("diffserve.cluster")


class Scaler:
    """Decides how many replicas to run; it remembers the growth of the queue and since when fewer would suffice."""

    def __init__(self, config: ClusterConfig) -> None:
        """Create a scaler without history."""
        self._config = config
        self._surplus_since_s: float | None = None
        self._history: deque[tuple[float, float]] = deque()  # time, cost

    def target(self, cost: float, num_started: int, *, start_s: float, now_s: float, is_starting: bool = False) -> int:
        """Return the number of replicas to run.

        Args:
            cost: Queued work in UNet rows of the native size.
            num_started: Replicas that are started.
            start_s: Measured seconds that a replica takes to start. The growth of the queue is extrapolated by this
                time, and an unneeded replica is kept for as long, up to ``MAX_IDLE_FACTOR`` times ``idle_s``.
            now_s: Current time.
            is_starting: A client waits for the first replica, which is not ready yet.
        """
        replicas, scaling = self._config.replicas, self._config.scaling
        needed = math.ceil((cost + self._growth(cost, start_s, now_s)) / scaling.rows_per_replica)
        num_replicas = min(replicas.max, max(replicas.min, needed))
        if num_replicas >= num_started or is_starting:
            self._surplus_since_s = None
            return max(num_replicas, num_started)
        if self._surplus_since_s is None:
            self._surplus_since_s = now_s
        if now_s - self._surplus_since_s < max(scaling.idle_s, min(start_s, MAX_IDLE_FACTOR * scaling.idle_s)):
            return num_started
        self._surplus_since_s = now_s
        return num_started - 1

    def _growth(self, cost: float, start_s: float, now_s: float) -> float:
        """Predict how much the queue grows in the next ``start_s``.

        The growth of the last ``start_s`` continues. Twice the slower of its halves counts, so that a burst of requests
        is not taken for a trend.
        """
        history = self._history
        history.append((now_s, cost))
        while len(history) > 1 and history[1][0] <= now_s - start_s:
            history.popleft()
        first_s, first = history[0]
        if start_s <= 0.0 or first_s > now_s - start_s:
            return 0.0
        middle = next(cost for time_s, cost in reversed(history) if time_s <= now_s - start_s / 2)
        return 2.0 * max(0.0, min(cost - middle, middle - first))


class RayPool(ReplicaPool[RayReplica]):
    """Replicas on Ray as one: starts and stops them by the queued work."""

    def __init__(
        self, settings: Settings, cluster: ClusterConfig, calls: Mapping[str, Calls], metrics: Metrics | None = None
    ) -> None:
        """Create a pool.

        Args:
            settings: Settings of the replicas.
            cluster: Numbers of replicas.
            calls: Calls to every possible replica, by its name.
            metrics: Metrics that several pools share.
        """
        metrics = metrics or Metrics()
        paths = UNetPathFile(Path(settings.serve.data_dir).expanduser())
        replicas = [RayReplica(name, own_calls, metrics, paths) for name, own_calls in calls.items()]
        super().__init__(settings, replicas, metrics, max_attempts=MAX_ATTEMPTS)
        self._cluster = cluster
        self._scaler = Scaler(cluster)
        self._has_waiting_client = False
        self._scaling: asyncio.Task[None] | None = None
        watch_replicas(metrics, [self])

    @property
    def _running(self) -> list[RayReplica]:
        """Replicas that answer questions, also those that are draining."""
        return [replica for replica in self.replicas if replica.ready is not None]

    def require_ready(self) -> None:
        """Raise EngineUnavailable, with the time for a retry, if no replica is ready.

        Without a replica one is started, or kept if it is draining.
        """
        if not self.is_ready:
            self._has_waiting_client = True
            draining = [replica for replica in self.replicas if replica.is_draining and not replica.is_redeploying]
            for replica in draining[:1]:
                replica.start()
        super().require_ready()

    def start(self) -> None:
        """Start the minimum number of replicas, at least one, and scale from then on."""
        for replica in self.replicas[: max(1, self._cluster.replicas.min)]:
            replica.start()
        self._scaling = asyncio.create_task(self._scale(), name="replicas")

    async def stop(self) -> None:
        """Stop all replicas; unfinished requests end in EngineUnavailable."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        await super().stop()

    def set_scaling(self, cluster: ClusterConfig) -> None:
        """Scale by ``cluster`` from now on; its maximum must be the earlier one."""
        self._cluster, self._scaler = cluster, Scaler(cluster)

    async def _scale(self) -> None:
        while True:
            try:
                await self._scale_once()
            except Exception:
                log.exception("scaling failed; it will be retried")
            await asyncio.sleep(SCALE_EVERY_S)

    async def _scale_once(self) -> None:
        """Start as many replicas as the work needs, and stop drained ones."""
        available = [replica for replica in self.replicas if not replica.is_redeploying]
        active = [replica for replica in available if replica.is_started and not replica.is_draining]
        num_active = len(active) + len(self.replicas) - len(available)
        start_s = max(replica.start_s for replica in self.replicas)
        costs = self.queue_costs()
        cost = sum(costs.values())
        if self._has_waiting_client and not num_active:
            cost = max(cost, 1.0)
        self._has_waiting_client = False
        now_s = asyncio.get_running_loop().time()
        is_starting = bool(active) and not any(replica.is_ready for replica in active)
        num_wanted = self._scaler.target(cost, num_active, start_s=start_s, now_s=now_s, is_starting=is_starting)
        idle = [replica for replica in available if not replica.is_started or replica.is_draining]
        idle.sort(key=lambda replica: not replica.is_draining)
        for replica in idle[: max(0, num_wanted - num_active)]:
            log.info("starting replica", extra={"replica": replica.name})
            replica.start()
        if num_wanted < num_active and active:
            min(active, key=lambda replica: (replica.is_ready, costs[replica.name])).drain()
        for replica in available:
            if replica.is_draining and not replica.is_busy:
                log.info("stopping replica", extra={"replica": replica.name})
                with contextlib.suppress(Exception):
                    await replica.stop()


def watch_replicas(metrics: Metrics, pools: Sequence[RayPool]) -> None:
    """Show the state of the replicas of ``pools`` in ``metrics``, replacing earlier calls."""

    def gauge(value: Callable[[RayReplica], float]) -> Callable[[], dict[tuple[str, ...], float]]:
        return lambda: {(replica.name,): float(value(replica)) for pool in pools for replica in pool.replicas}

    def costs() -> dict[tuple[str, ...], float]:
        queues = [(pool.replicas, pool.queue_costs()) for pool in pools]
        return {(replica.name,): costs[replica.name] for replicas, costs in queues for replica in replicas}

    text = "Remaining work of each replica, in UNet rows of the native size."
    metrics.watch("replica_queue_cost", text, costs, "replica")
    text = "Whether a replica would start a request now."
    metrics.watch("replica_up", text, gauge(lambda replica: replica.is_ready), "replica")
    text = "Seconds that a replica took to start."
    metrics.watch("replica_start_seconds", text, gauge(lambda replica: replica.start_s), "replica")

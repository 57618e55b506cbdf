"""Change of the settings of running replicas, one replica after the other."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from msgspec.structs import replace

from diffserve.api.errors import ConfigError, DiffserveError
from diffserve.cluster.config import ClusterConfig, settings_of
from diffserve.cluster.pool import RayPool
from diffserve.cluster.replica import RayReplica
from diffserve.cluster.stages import StagedPool
from diffserve.settings.config import Settings

POLL_EVERY_S: Final = 0.05

Renew = Callable[[Settings], Awaitable[None]]
ReadFiles = Callable[[], tuple[Settings, ClusterConfig]]

log = logging.getLogger("diffserve.cluster")


class Redeployer:
    """Reads the configuration files again at SIGUSR1 and gives the replicas the new settings.

    Attributes:
        num_done: Number of redeployments that have ended.
        problem: Why the last one failed; "" if it did not.
    """

    def __init__(self, cluster: ClusterConfig, renew: Mapping[str, Renew], read_files: ReadFiles | None) -> None:
        """Create a redeployer; without ``read_files`` signals have no effect."""
        self.num_done = 0
        self.problem = ""
        self._cluster = cluster
        self._renew = renew
        self._read_files = read_files

    async def run(self, pool: RayPool | StagedPool) -> None:
        """Wait for signals until the task is cancelled."""
        signaled = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, signaled.set)
        while True:
            await signaled.wait()
            signaled.clear()
            self.problem = ""
            try:
                await self._redeploy_all(pool)
            except DiffserveError as error:
                self.problem = error.message
            except Exception as error:
                log.exception("redeployment failed")
                self.problem = f"the settings of the replicas were not changed: {error}"
            self.num_done += 1

    async def _redeploy_all(self, pool: RayPool | StagedPool) -> None:
        if self._read_files is None:
            return
        settings, cluster = await asyncio.to_thread(self._read_files)
        if cluster.deployments != [
            old._replace(resources=replace(old.resources, min=new.resources.min))
            for old, new in zip(self._cluster.deployments, cluster.deployments, strict=False)
        ]:
            raise ConfigError(
                "replicas.max, cpus and gpus and the stages stay for as long as a cluster is up; set them back, or end "
                "it (diffserve cluster down) and start another."
            )
        stage_pools = pool.pools if isinstance(pool, StagedPool) else {"all": pool}
        for stage, stage_pool in stage_pools.items():
            stage_pool.set_scaling(cluster if stage == "all" else cluster.of_stage(stage))
            stage_settings = settings_of(settings, stage)
            if stage_settings != stage_pool.settings:
                await redeploy(stage_pool, self._renew, stage_settings)
        pool.settings = settings


async def redeploy(pool: RayPool, renew: Mapping[str, Renew], settings: Settings) -> None:
    """Give every replica of ``pool`` other settings.

    A replica that is not started takes over first; if all are started, one stops and comes back at a time, so that a
    single replica is unavailable meanwhile.

    Args:
        pool: The replicas.
        renew: Functions that give a stopped replica's deployment other settings, by the replica's name.
        settings: The new settings.

    Raises:
        DiffserveError: A replica does not start with ``settings``; all have their old settings again.
    """
    old_settings, changed = pool.settings, list[RayReplica]()
    try:
        for replica in sorted(pool.replicas, key=lambda replica: replica.is_started):
            changed.append(replica)
            await _redeploy_replica(pool, replica, renew, settings)
    except DiffserveError as error:
        log.warning("redeployment is rolled back", extra={"reason": error.message})
        for replica in reversed(changed):
            await _redeploy_replica(pool, replica, renew, old_settings)
        raise
    pool.settings = settings


async def _redeploy_replica(pool: RayPool, replica: RayReplica, renew: Mapping[str, Renew], settings: Settings) -> None:
    """Give one replica other settings; as many replicas as before are started afterwards."""
    was_started, replica.is_redeploying = replica.is_started, True
    has_substitute = False
    try:
        if was_started:
            has_substitute = await _wait_for_substitute(pool, replica)
            replica.drain()
            while replica.is_busy:
                await asyncio.sleep(POLL_EVERY_S)
            await replica.stop()
        await renew[replica.name](settings)
        replica.reset_failure()
        pool.watch_failure(replica)
        if was_started and not has_substitute:
            await _start(replica)
        log.info("replica redeployed", extra={"replica": replica.name})
    finally:
        replica.is_redeploying = False


async def _wait_for_substitute(pool: RayPool, replica: RayReplica) -> bool:
    """Wait until another replica can do the work of ``replica``; return whether one was started for that."""
    other_replicas = [other for other in pool.replicas if other is not replica]
    idle = next((other for other in other_replicas if not other.is_started), None)
    if idle is not None:
        idle.is_redeploying = True
        try:
            await _start(idle)
        finally:
            idle.is_redeploying = False
        return True
    while other_replicas and not any(other.is_ready for other in other_replicas):
        if all(other.failed.done() for other in other_replicas):
            break
        await asyncio.sleep(POLL_EVERY_S)
    return False


async def _start(replica: RayReplica) -> None:
    """Start ``replica`` and wait until it is ready; raise the error at which it failed."""
    replica.start()
    while not replica.is_ready:
        if replica.failed.done():
            raise replica.failed.result()
        await asyncio.sleep(POLL_EVERY_S)

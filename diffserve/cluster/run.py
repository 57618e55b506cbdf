"""``diffserve cluster up``: starts or joins Ray, serves over the replicas, and changes their settings at SIGUSR1."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from diffserve.api.errors import ConfigError, DiffserveError
from diffserve.cluster.config import ClusterConfig, settings_of
from diffserve.cluster.pool import RayPool
from diffserve.cluster.ray_calls import ray_cluster
from diffserve.cluster.replica import Calls, RayReplica
from diffserve.cluster.stages import StagedPool
from diffserve.cluster.state import TOKEN, ClusterState, ReplicaState, StateFile, open_private
from diffserve.service.page import MountPage
from diffserve.service.run import serve
from diffserve.settings.config import Settings

LOG: Final = "cluster.log"
START_TIMEOUT_S: Final = 300.0
WRITE_EVERY_S: Final = 0.5
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


def up(
    settings: Settings,
    cluster: ClusterConfig,
    *,
    address: str = "",
    token_file: Path | None = None,
    mount_page: MountPage | None = None,
    read_files: ReadFiles | None = None,
) -> int:
    """Serve over a cluster until stopped; see :func:`~diffserve.service.run.serve`.

    Args:
        settings: Settings of the server and its replicas.
        cluster: Numbers and resources of the replicas.
        address: Address of a Ray cluster to join; "" starts one on this machine that ends with this process.
        token_file: Token of the cluster at ``address``.
        mount_page: As for ``serve``.
        read_files: Reads both configurations again at SIGUSR1, for ``Redeployer``.

    Raises:
        ConfigError: Ray cannot be started or joined, or a cluster is running with this data folder.
    """
    folder = Path(settings.serve.data_dir).expanduser()
    state_file = StateFile(folder)
    token = token_file or folder / TOKEN
    with state_file.locked(), ExitStack() as stack:
        state = ClusterState(pid=os.getpid(), address=address)
        state_file.write(state)
        ray_folder = None if address else stack.enter_context(state_file.ray_folder())
        ray = ray_cluster(settings, cluster, address=address, token_file=token, folder=ray_folder)
        calls = stack.enter_context(ray)
        redeployer = Redeployer(
            cluster, {name: replica_calls.renew for name, replica_calls in calls.items()}, read_files
        )
        reporter = StateReporter(state_file, state)

        def open_engines(settings: Settings) -> RayPool | StagedPool:
            pool = open_pool(settings, cluster, calls)
            reporter.start(pool, redeployer)
            return pool

        return serve(settings, mount_page=mount_page, engines=open_engines)


def open_pool(settings: Settings, cluster: ClusterConfig, calls: Mapping[str, Calls]) -> RayPool | StagedPool:
    """Create the pool of the replicas that ``calls`` lead to."""
    return (RayPool if cluster.stages.together else StagedPool)(settings, cluster, calls)


class StateReporter:
    """Writes the state of the replicas to the state file until it is stopped."""

    def __init__(self, state_file: StateFile, state: ClusterState) -> None:
        """Create a reporter; ``state`` is the state without replicas."""
        self._file = state_file
        self._state = state
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, pool: RayPool | StagedPool, redeployer: Redeployer | None = None) -> None:
        """Report the replicas of ``pool``, and run ``redeployer`` on them."""
        loops = [self._report(pool, redeployer), *([] if redeployer is None else [redeployer.run(pool)])]
        self._tasks = [asyncio.create_task(loop, name="cluster state") for loop in loops]

    def stop(self) -> None:
        """End the report and the redeployer."""
        for task in self._tasks:
            task.cancel()

    async def _report(self, pool: RayPool | StagedPool, redeployer: Redeployer | None) -> None:
        stage_pools = list(pool.pools.values()) if isinstance(pool, StagedPool) else [pool]
        while True:
            replicas = tuple(state for stage_pool in stage_pools for state in _replica_states(stage_pool))
            state = replace(self._state, replicas=replicas)
            if redeployer is not None:
                state = replace(state, num_redeploys=redeployer.num_done, problem=redeployer.problem)
            self._file.write(state)
            await asyncio.sleep(WRITE_EVERY_S)


def _replica_states(pool: RayPool) -> list[ReplicaState]:
    costs, states = pool.queue_costs(), []
    for replica in pool.replicas:
        if replica.is_draining:
            word = "leaving"
        elif replica.is_started:
            word = "ready" if replica.is_ready else "starting"
        else:
            word = "off"
        state = ReplicaState(
            name=replica.name,
            state=word,
            num_requests=replica.reported_requests,
            cost=round(costs[replica.name], 1),
            start_s=round(replica.start_s, 1),
        )
        states.append(state)
    return states


def detach(arguments: list[str], folder: Path) -> int:
    """Run ``diffserve`` with ``arguments`` in the background and wait until a replica is ready.

    Raises:
        ConfigError: The process ended, or no replica is ready within ``START_TIMEOUT_S``.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log, state_file = folder / LOG, StateFile(folder)
    with open_private(log) as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "diffserve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(f"the cluster did not start: {last_line} (the complete log is {log})")
        state = state_file.read()
        if state is not None and any(replica.state == "ready" for replica in state.replicas):
            print(f"up: process {process.pid}, log in {log}")
            return 0
        time.sleep(0.5)
    raise ConfigError(f"the cluster was not up after {START_TIMEOUT_S:g} s; see {log}.")

"""``diffserve cluster up``: starts or joins Ray, and serves over the replicas there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from diffserve.api.errors import ConfigError
from diffserve.cluster.config import ClusterConfig
from diffserve.cluster.pool import RayPool
from diffserve.cluster.ray_calls import ray_cluster
from diffserve.cluster.redeploy import ReadFiles, Redeployer
from diffserve.cluster.replica import Calls
from diffserve.cluster.stages import StagedPool
from diffserve.cluster.state import TOKEN, ClusterState, ReplicaState, StateFile, open_private
from diffserve.service.page import MountPage
from diffserve.service.run import serve
from diffserve.settings.config import Settings

LOG: Final = "cluster.log"
START_TIMEOUT_S: Final = 300.0
WRITE_EVERY_S: Final = 0.5


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
        read_files: Reads both configurations again at SIGUSR1, for :mod:`diffserve.cluster.redeploy`.

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

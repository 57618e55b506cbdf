"""``cluster up``: Ray, the replicas in it, and before them the server that ``serve`` runs, too."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from diffserve.api.errors import ConfigError, DiffserveError
from diffserve.cluster.config import ClusterConfig, settings_of
from diffserve.cluster.engines import RayEngines
from diffserve.cluster.ray_calls import ray_cluster
from diffserve.cluster.redeploy import Renew, redeploy
from diffserve.cluster.seat import Calls, Seat
from diffserve.cluster.stages import StagedEngines
from diffserve.cluster.state import TOKEN, ClusterState, ReplicaState, StateFile, open_private
from diffserve.service.page import MountPage
from diffserve.service.run import serve
from diffserve.settings.config import Settings

LOG: Final = "cluster.log"
UP_S: Final = 300.0

Replicas = RayEngines | StagedEngines

log = logging.getLogger("diffserve.cluster")


def up(
    settings: Settings,
    cluster: ClusterConfig,
    *,
    address: str = "",
    token_file: Path | None = None,
    mount_page: MountPage | None = None,
    read_again: Callable[[], tuple[Settings, ClusterConfig]] | None = None,
) -> int:
    """Serve over a cluster until stopped; as :func:`~diffserve.service.run.serve`.

    ``address``: of a Ray to join, with the token in ``token_file``; "": one is started in this machine, for as long as
    this process lives. ``read_again``: both, as the files say at SIGUSR1; the replicas take them one after the other
    (:mod:`diffserve.cluster.redeploy`), the server stays as it is. Raises ConfigError where that cannot be, or a
    cluster is up in the server's folder.
    """
    folder = Path(settings.serve.data_dir).expanduser()
    state = StateFile(folder)
    token = token_file or folder / TOKEN
    with state.held(), ExitStack() as started:
        state.tell(ClusterState(pid=os.getpid(), address=address))
        own = None if address else started.enter_context(state.ray_folder())
        ray = ray_cluster(settings, cluster, address=address, token_file=token, folder=own)
        calls = started.enter_context(ray)
        renewing = _Renewing(cluster, {name: one.renew for name, one in calls.items()}, read_again)
        told = StateReporter(state, ClusterState(pid=os.getpid(), address=address))

        def over(settings: Settings) -> Replicas:
            engines = replicas_over(settings, cluster, calls)
            told.begin(engines, renewing)
            return engines

        return serve(settings, mount_page=mount_page, engines=over)


def replicas_over(settings: Settings, cluster: ClusterConfig, calls: Mapping[str, Calls]) -> Replicas:
    """The replicas that ``calls`` lead to, as one engine."""
    return (RayEngines if cluster.stages.together else StagedEngines)(settings, cluster, calls)


def _stages(engines: Replicas) -> dict[str, RayEngines]:
    return engines.of_stage if isinstance(engines, StagedEngines) else {"all": engines}


class _Renewing:
    """Gives the replicas other settings, whenever this process is told to."""

    def __init__(
        self,
        cluster: ClusterConfig,
        renew: Mapping[str, Renew],
        read_again: Callable[[], tuple[Settings, ClusterConfig]] | None,
    ) -> None:
        self.num_done = 0
        self.problem = ""
        self._cluster = cluster
        self._renew = renew
        self._read_again = read_again

    async def work(self, engines: Replicas) -> None:
        """As long as the loop runs."""
        asked = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, asked.set)
        while True:
            await asked.wait()
            asked.clear()
            self.problem = ""
            try:
                await self._once(engines)
            except DiffserveError as error:
                self.problem = error.message
            except Exception as error:
                log.exception("replicas have no other settings")
                self.problem = f"the replicas have no other settings: {error}"
            self.num_done += 1

    async def _once(self, engines: Replicas) -> None:
        if self._read_again is None:
            return
        settings, cluster = await asyncio.to_thread(self._read_again)
        if cluster.deployments != [
            one._replace(takes=replace(one.takes, min=each.takes.min))
            for one, each in zip(self._cluster.deployments, cluster.deployments, strict=False)
        ]:
            raise ConfigError(
                "replicas.max, cpus and gpus and the stages stay for as long as a cluster is up; set them back, or end "
                "it (diffserve cluster down) and begin another."
            )
        for stage, own in _stages(engines).items():
            own.scale_by(cluster if stage == "all" else cluster.of_stage(stage))
            wanted = settings_of(settings, stage)
            if wanted != own.settings:
                await redeploy(own, self._renew, wanted)
        engines.settings = settings


class StateReporter:
    """Writes down how the replicas stand, as long as the loop runs, or until it is ended."""

    def __init__(self, state: StateFile, first: ClusterState) -> None:
        """``first``: what is told before there are replicas."""
        self._state = state
        self._first = first
        self._working: list[asyncio.Task[None]] = []

    def begin(self, engines: Replicas, renewing: _Renewing | None = None) -> None:
        """Tell of ``engines`` from now on, and have them take other settings where ``renewing`` can."""
        works = [self._tell(engines, renewing), *([] if renewing is None else [renewing.work(engines)])]
        self._working = [asyncio.create_task(work, name="cluster state") for work in works]

    def end(self) -> None:
        """Tell nothing more."""
        for task in self._working:
            task.cancel()

    async def _tell(self, engines: Replicas, renewing: _Renewing | None) -> None:
        while True:
            told = replace(self._first, replicas=tuple(_state_of(seat) for seat in engines.seats))
            if renewing is not None:
                told = replace(told, num_redeploys=renewing.num_done, problem=renewing.problem)
            self._state.tell(told)
            await asyncio.sleep(0.5)


def _state_of(seat: Seat) -> ReplicaState:
    if seat.is_leaving:
        word = "leaving"
    elif seat.is_held:
        word = "ready" if seat.is_ready else "starting"
    else:
        word = "off"
    return ReplicaState(
        name=seat.name,
        state=word,
        num_requests=seat.num_inside,
        cost=round(seat.cost, 1),
        start_s=round(seat.start_s, 1),
    )


def detach(arguments: list[str], folder: Path) -> int:
    """Run ``diffserve`` with ``arguments`` beside, and wait until a replica is ready. ConfigError where it ends."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log, state = folder / LOG, StateFile(folder)
    with open_private(log) as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "diffserve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until_s = time.monotonic() + UP_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise ConfigError(f"the cluster did not come up: {last} (all of it is in {log})")
        told = state.read()
        if told is not None and any(one.state == "ready" for one in told.replicas):
            print(f"up: process {process.pid}, log in {log}")
            return 0
        time.sleep(0.5)
    raise ConfigError(f"the cluster was not up after {UP_S:g} s; see {log}.")

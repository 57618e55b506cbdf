"""``diffserve cluster status``, ``redeploy`` and ``down``: inspect, update and stop the replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from diffserve.cluster.state import ClusterState, StateFile
from diffserve.settings.config import Settings

SHUTDOWN_MARGIN_S: Final = 60.0
"""Time for the shutdown itself, in addition to the time for running requests."""

NOT_RUNNING: Final = "no cluster is running with this data folder"


def status(settings: Settings) -> int:
    """Print a table of the replicas; return 1 if no cluster is running."""
    state = _file(settings).read()
    if state is None:
        print(NOT_RUNNING)
        return 1
    print(f"front: process {state.pid}; Ray: {_ray_address(state)}")
    table = Table("replica", "state", "requests", "rows queued", "start, s")
    for replica in state.replicas:
        cost, start = f"{replica.cost:g}", f"{replica.start_s:g}"
        table.add_row(replica.name, replica.state, str(replica.num_requests), cost, start)
    Console().print(table)
    return 0


def redeploy(settings: Settings) -> int:
    """Reload the configuration files in all replicas; return 1 if no cluster is running."""
    was_up = _file(settings).redeploy()
    print("redeployed" if was_up else NOT_RUNNING)
    return 0 if was_up else 1


def down(settings: Settings) -> int:
    """Stop the front process, its replicas and the Ray cluster that it started."""
    was_up = _file(settings).end(settings.serve.shutdown_timeout_s + SHUTDOWN_MARGIN_S)
    print("stopped" if was_up else NOT_RUNNING)
    return 0


def _ray_address(state: ClusterState) -> str:
    return state.address or ("the cluster it was deployed in" if state.is_deployed else "started by this command")


def _file(settings: Settings) -> StateFile:
    return StateFile(Path(settings.serve.data_dir).expanduser())

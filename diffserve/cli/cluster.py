"""``diffserve cluster``: a table of replicas, other settings for them, and the end of them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from diffserve.cluster.state import ClusterState, StateFile
from diffserve.settings.config import Settings

LEAVES_S: Final = 60.0  # beside what work in progress is given


def status(settings: Settings) -> int:
    """A table of the replicas; 1 where no cluster is up."""
    told = _file(settings).read()
    if told is None:
        print("no cluster is up here")
        return 1
    print(f"front: process {told.pid}; Ray: {_where(told)}")
    table = Table("replica", "state", "requests", "rows queued", "start, s")
    for one in told.replicas:
        table.add_row(one.name, one.state, str(one.num_requests), f"{one.cost:g}", f"{one.start_s:g}")
    Console().print(table)
    return 0


def redeploy(settings: Settings) -> int:
    """Have the replicas take what the files of the front say now; 1 where no cluster is up."""
    was_up = _file(settings).renew()
    print("redeployed" if was_up else "no cluster is up here")
    return 0 if was_up else 1


def down(settings: Settings) -> int:
    """End the front and what it started."""
    was_up = _file(settings).end(settings.serve.shutdown_timeout_s + LEAVES_S)
    print("down" if was_up else "no cluster is up here")
    return 0


def _where(told: ClusterState) -> str:
    return told.address or ("that which it was deployed in" if told.is_deployed else "its own")


def _file(settings: Settings) -> StateFile:
    return StateFile(Path(settings.serve.data_dir).expanduser())

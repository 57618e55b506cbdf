"""A running cluster for tests that use it or restore its state, and a local server for comparison."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.running import CONFIG, Cluster, running_cluster
from tests.service.server import SOON_S, RunningServer, running_server


@pytest.fixture(scope="session")
def shared_cluster(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run one cluster for all tests here, and check that no process of it is left at the end."""
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    with running_cluster(tiny_model("sd15"), tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
        started = cluster.processes
        ended = subprocess.run(
            [sys.executable, "-m", "diffserve", "cluster", "down", "--data-dir", str(cluster.folder)],
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        assert ended.stdout == "stopped\n"
        assert psutil.wait_procs(started, timeout=SOON_S)[1] == []


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Return the shared cluster with two ready and idle replicas."""
    shared_cluster.settle()
    return shared_cluster


@pytest.fixture(scope="session")
def local(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Run a local server of the same model with the same settings."""
    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("local"), config=CONFIG) as server:
        server.wait_until_ready()
        yield server

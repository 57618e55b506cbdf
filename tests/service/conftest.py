"""One server for all tests that only talk to it; tests that break or stop a server start their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.server import RunningServer, running_server

CONFIG = '[model]\ndtype = "float32"\n[engine]\nmax_rows = 8\n'


@pytest.fixture(scope="session")
def shared_server(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A ready server of the tiny random SD 1.5 model."""
    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("server"), config=CONFIG) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server, still alive and idle after each test."""
    yield shared_server
    assert shared_server.status("/readyz") == 200
    assert shared_server.num_requests() == 0

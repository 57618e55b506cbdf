"""Fixtures that several rooms share: tiny models on disk, and servers for all tests that only talk to them, each built
or started once a session. Tests that break or stop a server start their own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.service.server import RunningServer

SERVER_CONFIG = '[model]\ndtype = "float32"\n[engine]\nmax_rows = 8\nlatent_cache_bytes = 1000000\n'

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the core to the other worker
CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("MPLCONFIGDIR", str(CACHES / "matplotlib"))  # its list of fonts takes seconds
if "PYTEST_XDIST_WORKER" not in os.environ:  # nothing is known from an earlier run; what one worker measured, to all
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="diffserve-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_model(kind)``: directory of the tiny random model of ``kind`` (see ``tests.tiny_models.KINDS``)."""
    from tests.tiny_models import save_model

    root = tmp_path_factory.mktemp("models")
    built: dict[str, Path] = {}

    def build(kind: str) -> Path:
        if kind not in built:
            built[kind] = save_model(kind, root / kind)
        return built[kind]

    return build


def unharmed(server: RunningServer) -> Iterator[RunningServer]:
    """``server`` for a test, after which it is alive and idle, and has answered everybody all the time."""
    num_stalls = server.num_stalls()
    yield server
    server.wait_until_ready()
    server.wait_until_idle()
    assert server.num_stalls() == num_stalls, "something kept the event loop for longer than 250 ms"


@pytest.fixture(scope="session")
def shared_server(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A ready server of the tiny random SD 1.5 model."""
    from tests.service.server import running_server

    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("server"), config=SERVER_CONFIG) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server, still alive and idle after each test."""
    yield from unharmed(shared_server)


@pytest.fixture(scope="session")
def shared_text_server(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A ready server of the tiny image model with the language model of ``tests.service.talker`` beside it."""
    from tests.service import talker
    from tests.service.server import running_server

    workspace = tmp_path_factory.mktemp("text-server")
    env = talker.save(workspace)
    with running_server(tiny_model("sd15"), workspace, config=SERVER_CONFIG, env=env) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def text_server(shared_text_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server with a language model, still alive and idle after each test."""
    yield from unharmed(shared_text_server)


@pytest.fixture(scope="session")
def shared_page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A ready server of the embedded model and its rewriter, with the page at ``/``."""
    from tests.service.server import START_S, running_server, wait_for

    with running_server(Path("embedded"), tmp_path_factory.mktemp("page-server"), page=True) as server:
        server.wait_until_ready()
        wait_for(lambda: server.status("/config") == 200, START_S, "the page")
        yield server


@pytest.fixture
def page_server(shared_page_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server with the page, still alive and idle after each test."""
    yield from unharmed(shared_page_server)

"""Shared fixtures: tiny models on disk, and servers for the tests that only send requests to them.

Each is built or started once per session, by one worker (see the scheduler below). Tests that break or stop a server
start another one.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import missing_packages

if TYPE_CHECKING:
    from tests.service.server import RunningServer

TESTS = Path(__file__).parent
DEVICE_FOLDERS = ("engine", "runtime")
OWN_RAY = "Rays of their own"
SHARED = {
    "a cluster": re.compile(r"^def test_\w+\(\s*cluster: ", re.MULTILINE),
    "the page": re.compile(r"\bpage_server: |^def test_\w+\([^)]*\bvisit: ", re.MULTILINE),
    OWN_RAY: re.compile(r"importorskip\(\"ray"),
    "servers": re.compile(r"\btext_server: |^def test_\w+\([^)]*\bserver: ", re.MULTILINE),
}
SERVER_CONFIG = '[model]\ndtype = "float32"\n[engine]\nmax_rows = 8\nlatent_cache_bytes = 1000000\n'

with suppress(ModuleNotFoundError):
    from hypothesis import settings

    settings.register_profile("the same every time", derandomize=True)  # another profile: HYPOTHESIS_PROFILE
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "the same every time"))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that puts us behind keeps it from us
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the core to the other worker
CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("MPLCONFIGDIR", str(CACHES / "matplotlib"))  # its list of fonts takes seconds
if "PYTEST_XDIST_WORKER" not in os.environ:  # nothing is known from an earlier run; what one worker measured, to all
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="diffserve-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
else:  # a worker imports every test file, and with them these libraries, which would read their own sources for seconds
    from diffserve.runtime.loading.library_imports import one_scan

    with one_scan():
        import transformers.models  # noqa: F401
    with suppress(ModuleNotFoundError):
        import ui.page  # noqa: F401
    gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device`` and read it immediately.

    The fixtures' modules use it and are imported before the options are parsed. Workers get it from the environment.
    """
    folders = ", ".join(DEVICE_FOLDERS)
    parser.addoption(
        "--device",
        default="cpu",
        help=f"torch device of the tests in {folders}, such as cuda; the other tests are then left out",
    )
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["TEST_DEVICE"] = parser.parse_known_args(sys.argv[1:]).device


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin for missing packages, and prepare the device."""
    from tests.device import DEVICE, prepare

    config.pluginmanager.register(missing_packages)  # hooks of this file do not apply to a folder's own conftest
    if config.getoption("--device") != DEVICE:
        raise pytest.UsageError("--device is read from the command line only, not from PYTEST_ADDOPTS or a file.")
    if DEVICE != "cpu":
        prepare()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what does not run on a device other than the CPU."""
    below = collection_path.relative_to(TESTS).parts if collection_path.is_relative_to(TESTS) else ()
    is_left_out = bool(below) and below[0] not in DEVICE_FOLDERS and config.getoption("--device") != "cpu"
    return True if is_left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow tests first, so that no worker waits at the end; leave out or skip what the device does not need.

    The order is: tests of shared servers, tests that kill processes, tests that compile.
    """
    dear = {item.path for item in items if item.get_closest_marker("chaos") or item.path.name == "test_compiled.py"}

    def rank(item: pytest.Item) -> int:
        shared = _shared_by(item.path)
        return 0 if shared and shared != OWN_RAY else 1 if shared or item.path in dear else 2

    items.sort(key=rank)
    from tests.device import DEVICE, cpu_only_reason, uses_device

    if DEVICE != "cpu":  # whose time may be short
        left_out = [item for item in items if not uses_device(item) and not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        ids = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in ids]
    for item in items:
        reason = None if item.get_closest_marker("gpu") else cpu_only_reason(item.nodeid)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"CPU only: {reason}"))


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection, during the imports and after them."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, and all files that share a server to the same worker.

    Files that use the page or a browser also go to one worker, so that each of these is started once. Files that start
    Ray go to one worker after these, because several Ray starts at once take minutes.
    """
    from xdist.scheduler import LoadFileScheduling

    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope

    def scope_of(nodeid: str) -> str:
        file: str = file_of(nodeid)
        return _shared_by(config.rootpath / file) or file

    scheduling._split_scope = scope_of
    return scheduling


@functools.cache
def _shared_by(file: Path) -> str:
    """Return the name of the server that the tests in ``file`` share; empty if they share none."""
    text = file.read_text(encoding="utf-8")
    return next((what for what, pattern in SHARED.items() if pattern.search(text)), "")


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
    """Yield ``server`` for a test; afterwards check that it is alive and idle and answered all requests."""
    num_stalls = server.num_stalls(over_s=0.5)  # of what others on the machine hold back, some is taken for its own
    yield server
    server.wait_until_ready()
    server.wait_until_idle()
    assert server.num_stalls(over_s=0.5) == num_stalls, "something kept the event loop for longer than 500 ms"


@pytest.fixture(scope="session")
def shared_server(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Start a server of the tiny random SD 1.5 model."""
    from tests.service.server import running_server

    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("server"), config=SERVER_CONFIG) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """Return the shared server, which must be alive and idle after each test."""
    yield from unharmed(shared_server)


@pytest.fixture(scope="session")
def shared_text_server(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Start a server of the tiny image model and the language model of ``tests.service.talker``."""
    from tests.service import talker
    from tests.service.server import running_server

    workspace = tmp_path_factory.mktemp("text-server")
    env = talker.save(workspace)
    with running_server(tiny_model("sd15"), workspace, config=SERVER_CONFIG, env=env) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def text_server(shared_text_server: RunningServer) -> Iterator[RunningServer]:
    """Return the shared server with a language model, which must be alive and idle after each test."""
    yield from unharmed(shared_text_server)


@pytest.fixture(scope="session")
def shared_page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Start a server of the embedded model and its rewriter, with the page at ``/``."""
    from tests.service.server import START_S, running_server, wait_for

    grace = {"DIFFSERVE_SERVE_PAGE_GRACE_S": "12"}  # time enough to come back, on a busy machine, too
    grace |= {"DIFFSERVE_SERVE_REQUEST_TIMEOUT_S": "3600"}  # there a thousand steps may take more than its ten minutes
    folder = tmp_path_factory.mktemp("page-server")
    with running_server(Path("embedded"), folder, page=True, env=grace) as server:
        server.wait_until_ready()
        wait_for(lambda: server.status("/config") == 200, START_S, "the page")
        yield server


@pytest.fixture
def page_server(shared_page_server: RunningServer) -> Iterator[RunningServer]:
    """Return the shared server with the page, which must be alive and idle after each test."""
    yield from unharmed(shared_page_server)

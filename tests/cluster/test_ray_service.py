"""The RayService application under ``serve run`` on loopback: answers of its proxy, and its clean exit."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml  # type: ignore[import-untyped]

from diffserve.cluster.ray_calls import FIXED, LOCAL, SERVED
from tests.cluster.ports import listening
from tests.cluster.running import CONFIG, answers, check_hang_up, parts
from tests.service.server import GENERATIONS, ROOT, SOON_S, START_S, STOP_S, RunningServer, error_of, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

KEY = "a-key-of-this-test-alone"
SMALL: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": 2, "seed": 1}


class Served(RunningServer):
    """A ``serve run`` process as a server; its proxy listens where its file configures."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        super().__init__(process, folder / "out", folder / "err")
        self.client.headers["authorization"] = f"Bearer {KEY}"
        self.folder = folder

    def _find_url(self) -> str:
        return self._url

    def has_come_up(self) -> bool:
        """Return whether the server is ready; raise RuntimeError if it ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"serve ended with {self.process.returncode}: {self.errors.read_text()[-3000:]}")
        try:
            return self.status("/readyz") == 200
        except httpx.TransportError:
            return False

    def stop(self) -> int:
        """Send SIGINT, which ``serve run`` expects, and wait."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run the application on two replicas, and check that no process of it is left at the end."""
    pytest.importorskip("ray", reason="the extra cluster is not installed")
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    (folder / "cluster.toml").write_text("[replicas]\nmin = 2\nmax = 2\ncpus = 0.5\n")
    (folder / "serve.toml").write_text(CONFIG)
    (folder / "token").write_text("0123456789abcdef" * 4)
    (folder / "token").chmod(0o600)
    arguments = {"cluster": str(folder / "cluster.toml"), "config": str(folder / "serve.toml")}
    application = {
        "name": "diffserve",
        "route_prefix": "/",
        "import_path": "diffserve.cluster.ray_service:build",
        "args": {**arguments, "model": str(tiny_model("sd15"))},
    }
    http = {"host": "127.0.0.1", "port": port}
    file = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
    (folder / "app.yaml").write_text(yaml.safe_dump(file))
    rays = tempfile.mkdtemp(prefix="diffserve-ray-")  # socket paths have a short length limit
    env = {
        **os.environ,
        **FIXED,
        **LOCAL,
        **SERVED,
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(256 << 20),
        "RAY_TMPDIR": rays,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "DIFFSERVE_API_KEY": KEY,
        "DIFFSERVE_SERVE_DATA_DIR": str(folder / "data"),
        "DIFFSERVE_SERVE_DEBUG": "true",
        "DIFFSERVE_ENGINE_COMPILE": "warm",  # same as the server for comparison
        "DIFFSERVE_SERVE_SPARE_ENGINE": "false",
    }
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "app.yaml"]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    server = Served(process, folder, port)
    try:
        wait_for(server.has_come_up, START_S, "the application")
        yield server
        started = psutil.Process(process.pid).children(recursive=True)
        server.stop()
        assert psutil.wait_procs(started, timeout=SOON_S)[1] == []
    finally:
        if process.poll() is None:
            process.kill()
        shutil.rmtree(rays, ignore_errors=True)


def test_a_proxy_answers_as_a_local_server_does(served: Served, local: RunningServer) -> None:
    actual, expected = answers(served), answers(local)
    assert [answer[0] for answer in expected][:5] == [200, 200, 200, 400, 404]
    for answer, expected_answer in zip(actual, expected, strict=True):
        assert answer == expected_answer


def test_keys_and_ids_belong_to_the_front(served: Served) -> None:
    url = served.url + GENERATIONS
    assert httpx.get(f"{served.url}/livez").status_code == 200
    for headers in ({}, {"authorization": "Bearer of-somebody-else"}):
        refused = httpx.post(url, json=SMALL, headers=headers)
        assert refused.status_code == 401
        assert error_of(refused)["code"] == "invalid_api_key"
    painted = served.client.post(GENERATIONS, json=SMALL, headers={"x-request-id": "mine"})
    [request_id] = painted.headers.get_list("x-request-id")
    assert request_id.startswith("img-")
    streamed = served.client.post(GENERATIONS, json={**SMALL, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert parts(streamed)[-1]["b64_json"] == painted.json()["data"][0]["b64_json"]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_disconnect_at_the_proxy_leaves_the_replica_within_a_few_steps(served: Served, is_streamed: bool) -> None:
    check_hang_up(served, is_streamed=is_streamed)


def test_only_loopback_ports_are_open_and_the_folder_names_its_owner(served: Served) -> None:
    ports = listening(
        [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children(recursive=True)]
    )
    assert [port for port in ports if not port.host.is_loopback] == []
    assert {served.port} < {port.number for port in ports}

    def cluster(word: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "diffserve", "cluster", word, "--data-dir", str(served.folder / "data")]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)

    assert cluster("status").stdout.count("ready") == 2
    for word in ("redeploy", "down"):
        refused = cluster(word)
        assert refused.returncode == 2
        assert "the front here is a deployment of Ray Serve: " in refused.stderr
    assert served.status("/readyz") == 200

"""Test helper that runs ``diffserve serve`` in a process and talks to it over a socket."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
START_S = 280.0  # importing torch takes minutes on a busy machine
STOP_S = 120.0
SOON_S = 60.0  # limit for short operations, with reserve for a busy machine
URL = re.compile(r"listening on (http://\S+),")
T = TypeVar("T")
GENERATIONS = "/v1/images/generations"


class RunningServer:
    """A ``diffserve serve`` process with its output in files, listening at ``url``; ``client`` sends requests to it."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, errors: Path) -> None:
        self.process = process
        self.output = output
        self.errors = errors
        self.url = wait_for(self._find_url, START_S, "the server's address")
        limits = httpx.Limits(max_keepalive_connections=0)  # connections are stale after a suspend
        self.client = httpx.Client(base_url=self.url, timeout=300.0, trust_env=False, limits=limits)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engines(self) -> set[int]:
        """Process ids of the server's engines: the active one and a spare one."""
        unexpected = set()
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # zombie processes are included
                if "diffserve.engine.process" in child.cmdline():
                    unexpected.add(child.pid)
        return unexpected

    @property
    def engine(self) -> psutil.Process:
        """Process of the active engine."""
        (pid,) = self.engines
        return psutil.Process(pid)

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.status("/readyz") == 200, START_S, "readiness")

    def status(self, path: str) -> int:
        return self.client.get(path).status_code

    def num_stalls(self, over_s: float = 0.25) -> int:
        """Return how often the server blocked its event loop for longer than ``over_s``, a bound of its histogram."""
        name = "diffserve_event_loop_blocked_seconds"
        metrics = self.client.get("/metrics").text
        counts = dict(re.findall(rf'^{name}_bucket{{le="(\S+)"}} (\S+)$', metrics, re.MULTILINE))
        return int(float(counts["+Inf"]) - float(counts[f"{over_s:g}"]))

    def num_requests(self) -> int:
        """Return the number of requests in the engine, which may lag by a moment while it works."""
        return int(self.client.get("/debug/trace").json()["num_requests"])

    def num_ended(self, outcome: str) -> int:
        """Return the server's count of image requests with this outcome: "cancelled", "finished", ..."""
        line = rf'^diffserve_engine_requests_total{{kind="image",outcome="{outcome}"}} (\S+)$'
        match = re.search(line, self.client.get("/metrics").text, flags=re.MULTILINE)
        return int(float(match[1])) if match else 0

    def wait_for_requests(self, count: int) -> None:
        """Wait until the engine holds exactly this many requests; raise TimeoutError if it does not happen."""
        wait_for(lambda: self.num_requests() == count, SOON_S, f"{count} requests in the engine")

    def wait_until_idle(self, patience_s: float = SOON_S) -> None:
        """Wait for the last step of cancelled requests; raise AssertionError if a request stays in the engine."""
        deadline_s = time.monotonic() + patience_s
        while (left := self.num_requests()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert left == 0, f"{left} requests stayed in the engine"

    def paint(self, prompt: str = "a red fox", *, num_steps: int = 2, seed: int = 1, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "num_inference_steps": num_steps, "seed": seed, **fields}
        return self.client.post(GENERATIONS, json=body)

    def stop(self) -> int:
        """Send SIGTERM, wait and return the exit code."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(STOP_S)

    def _find_url(self) -> str | None:
        match = URL.search(self.output.read_text())
        if match is None and self.process.poll() is not None:
            raise RuntimeError(f"the server ended with {self.process.returncode}: {self.errors.read_text()[-2000:]}")
        return match[1] if match else None


@contextmanager
def running_server(
    model: Path,
    workspace: Path,
    *,
    config: str = "",
    command: list[str] | None = None,
    env: dict[str, str] | None = None,
    page: bool = False,
) -> Iterator[RunningServer]:
    """Run a server on a free port until the block ends.

    Args:
        model: Model directory or name.
        workspace: Directory for the configuration, the data and the output.
        config: Configuration as TOML.
        env: Additional environment variables.
        page: Whether to serve the page, which takes seconds to import.
        command: Arguments of Python that replace ``-m diffserve serve``.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    (workspace / "serve.toml").write_text(config)
    server = None
    with (workspace / "out").open("wb") as out, (workspace / "err").open("wb") as err:
        process = subprocess.Popen(
            [
                *(sys.executable, *(command or ["-m", "diffserve", "serve"])),
                *("--model", str(model), "--port", "0", "--config", str(workspace / "serve.toml")),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "DIFFSERVE_SERVE_DATA_DIR": str(workspace / "data"),
                "DIFFSERVE_SERVE_PAGE": str(page).lower(),
                "DIFFSERVE_SERVE_DEBUG": "true",
                "DIFFSERVE_ENGINE_COMPILE": "warm",  # only tests of the build wait for a compiler
                "DIFFSERVE_SERVE_SPARE_ENGINE": "false",  # a second process that most tests do not need
                **(env or {}),
            },
        )
        try:
            server = RunningServer(process, workspace / "out", workspace / "err")
            yield server
        finally:
            if server is not None:
                server.stop()
            elif process.poll() is None:
                process.kill()
                process.wait(STOP_S)


def wait_for(look: Callable[[], T | None], seconds: float, what: str) -> T:
    """Return the first true result of ``look``; raise TimeoutError after ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        result = look()
        if result:
            return result
        time.sleep(0.02)
    raise TimeoutError(f"waited {seconds:g} s for {what}")


def files_of(response: httpx.Response) -> list[bytes]:
    """Return the image files in an answer."""
    assert response.status_code == 200, response.text[:500]
    return [base64.b64decode(entry["b64_json"], validate=True) for entry in response.json()["data"]]


def assert_interruptible(server: RunningServer) -> None:
    """Interrupt a task of A1111's API after a step and check that its answer has the unfinished image."""
    body = {"prompt": "a fox that waits", "steps": 900, "width": 64, "height": 64, "seed": 5}
    with ThreadPoolExecutor(1) as pool:
        painting = pool.submit(server.client.post, "/sdapi/v1/txt2img", json=body, timeout=10 * SOON_S)
        wait_for(lambda: server.client.get("/sdapi/v1/progress").json()["progress"], SOON_S, "a step")
        server.client.post("/sdapi/v1/interrupt")
        answer = painting.result(timeout=SOON_S)
    assert answer.status_code == 200
    assert len(answer.json()["images"]) == 1
    assert "of 900 steps; the image is unfinished." in answer.headers["x-diffserve-warnings"]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error object of an answer after checking that its shape is exactly OpenAI's."""
    body = json.loads(response.content)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = body["error"]
    assert "Traceback" not in error["message"]
    assert "\n" not in error["message"]
    return error

"""Test helper that runs ``diffserve cluster up`` in a process; comparison of answers without times and ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from diffserve.cluster.state import StateFile
from tests.service.server import GENERATIONS, SOON_S, RunningServer, running_server, wait_for

TWO = "[replicas]\nmin = 2\nmax = 2\ncpus = 1.0\n"
CONFIG = '[model]\ndtype = "float32"\n[engine]\nmax_waiting = 3\nthreads = 1\n'
STEPS = 1000
LARGE: dict[str, Any] = {"prompt": "a fox", "num_inference_steps": STEPS, "size": "512x512"}
OWN = ("timings", "history_id", "created", "id", "unet_calls")
"""Fields that differ between two servers; ``unet_calls`` lists the image sizes that each has computed."""


class Cluster:
    """A running cluster: its front process and its folder."""

    def __init__(self, server: RunningServer, workspace: Path) -> None:
        self.server = server
        self.folder = workspace / "server" / "data"
        self._workspace = workspace

    @property
    def processes(self) -> list[psutil.Process]:
        """Processes that ``up`` started."""
        started: list[psutil.Process] = psutil.Process(self.server.process.pid).children(recursive=True)
        return started

    @property
    def state(self) -> list[dict[str, Any]]:
        """Reported state of the replicas."""
        config = json.loads((self.folder / "cluster.json").read_text())
        replicas: list[dict[str, Any]] = config["replicas"]
        return replicas

    @property
    def num_ready(self) -> int:
        return sum(replica["state"] == "ready" for replica in self.state)

    @property
    def states(self) -> list[str]:
        """States of the replicas, sorted by name."""
        return sorted(replica["state"] for replica in self.state)

    def write(self, cluster: str = TWO, config: str = CONFIG) -> bool:
        """Write the configuration files, and return whether they changed."""
        files = {self._workspace / "cluster.toml": cluster, self._workspace / "server" / "serve.toml": config}
        is_new = any(path.read_text() != text for path, text in files.items())
        for path, text in files.items():
            path.write_text(text)
        return is_new

    def settle(self) -> None:
        """Restore two replicas with the usual settings, both ready and idle."""
        if self.write():
            StateFile(self.folder).redeploy()
        wait_for(lambda: self.num_ready == 2, 3 * SOON_S, "two replicas")
        self.server.wait_until_idle()

    def log_events(self, event: str) -> list[dict[str, Any]]:
        """Return the log records of ``event``."""
        lines = [json.loads(line) for line in self.server.errors.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def wait_until_reported_idle(self) -> None:
        """Wait until the reported state, which lags by a second, shows no request in a replica."""
        wait_for(
            lambda: not any(replica["num_requests"] for replica in self.state), SOON_S, "replicas without requests"
        )

    def holder(self) -> dict[str, Any]:
        """Wait for a replica that reports requests, and return it."""
        return wait_for(
            lambda: next((replica for replica in self.state if replica["num_requests"]), None),
            SOON_S,
            "a request in a replica",
        )

    def process_of(self, name: str) -> psutil.Process:
        """Return the process of a replica."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):  # zombie processes are included
                if process.name().startswith("ray::ServeRep") and name in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no process is {name}")


@contextmanager
def running_cluster(model: Path, workspace: Path, file: str = TWO) -> Iterator[Cluster]:
    """Run the front and the replicas of ``model`` that ``file`` configures, and wait until all are ready."""
    (workspace / "cluster.toml").write_text(file)
    command = ["-m", "diffserve", "cluster", "up", str(workspace / "cluster.toml")]
    with running_server(model, workspace / "server", config=CONFIG, command=command) as server:
        cluster = Cluster(server, workspace)
        server.wait_until_ready()
        wait_for(lambda: set(cluster.states) == {"ready"}, 3 * SOON_S, "all replicas")
        yield cluster


def parts(reply: httpx.Response) -> list[Any]:
    """Return the JSON documents of an answer; for a stream, its events without progress, whose number varies."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return [reply.json()]
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    return [event for event in events if not event.get("type", "").endswith(".progress")]


def bare(value: Any) -> Any:
    """Return ``value`` without times, ids and what a server reports of its own past."""
    if isinstance(value, dict):
        return {
            key: bare(item) for key, item in value.items() if key not in OWN and not key.endswith(("_id", "_s", "_at"))
        }
    return [bare(item) for item in value] if isinstance(value, list) else value


def answers(server: RunningServer) -> list[Any]:
    """Return comparable answers to typical requests, without the parts that differ between two runs."""
    bodies = [
        {"prompt": "a red fox", "num_inference_steps": 3, "seed": 1},
        {"prompt": "a red fox", "num_inference_steps": 3, "seed": 1, "n": 2, "guidance_scale": 4},
        {"prompt": "a fox", "num_inference_steps": 2, "seed": 2, "stream": True, "partial_images": 1},
        {"prompt": "a fox", "num_inference_steps": -1},
        {"prompt": "a fox", "model": "nobody"},
    ]
    replies = [server.client.post(GENERATIONS, json=body) for body in bodies]
    replies += [server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}]})]
    replies += [server.client.get("/v1/models"), server.client.get("/readyz")]
    return [(reply.status_code, *(bare(part) for part in parts(reply))) for reply in replies]


def check_hang_up(server: RunningServer, *, is_streamed: bool) -> None:
    """Check that a large image leaves its replica within a few steps after its client disconnects."""
    known_replicas, num_cancelled, step = set(unet_calls(server)), server.num_ended("cancelled"), 0
    if is_streamed:
        with server.client.stream("POST", GENERATIONS, json=LARGE | {"stream": True}) as reply:
            events = (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))
            step = next(event["step"] for event in events if event.get("step", 0) >= 3)
    else:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(GENERATIONS, json=LARGE, timeout=1.0)
    server.wait_until_idle()
    after = unet_calls(server)
    replica = max(set(after) - known_replicas, key=after.__getitem__)  # a new replica has run one test step itself
    assert step <= after[replica] < STEPS / 2, f"it had begun, and far from all of it was done: {after}"
    assert server.num_ended("cancelled") == num_cancelled + 1
    assert unet_calls(server) == after, "and nothing more is"


def unet_calls(server: RunningServer) -> Counter[str]:
    """Return the number of recent UNet calls by request."""
    unet_calls: list[list[str]] = server.client.get("/debug/trace").json()["unet_calls"]
    return Counter(call[0] for call in unet_calls)

"""Servers and engines that are killed between two writes of a job: every job ends once, with the bytes of its request.

A chain of servers uses one data folder. Each is killed at another point, so that the next one finds what it left.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from diffserve.api.errors import DiffserveError
from diffserve.client import Client, JobEvent, StoredJob
from diffserve.faults import ENGINE_POINTS, FAULTS_VARIABLE, SERVER_POINTS
from tests.service.server import GENERATIONS, SOON_S, RunningServer, running_server, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
SERVE = """
import os, sys
from diffserve.cli import main
from diffserve.service.engine.connection import EngineConnection

start = EngineConnection.start
num_engines = int(os.environ["NUM_ENGINES_TO_KILL"])

async def start_with_faults(*arguments):
    global num_engines
    num_engines -= 1
    if num_engines < 0:
        os.environ.pop("DIFFSERVE_FAULTS", None)
    return await start(*arguments)

EngineConnection.start = start_with_faults
sys.exit(main(["serve", *sys.argv[1:]]))
"""
"""A server whose first engines get its faults, and later ones none."""

IMG2IMG: Final = "/sdapi/v1/img2img"
SIZE: Final = {"width": 64, "height": 64}
FOX: Final = {"prompt": "a red fox", "size": "64x64", "num_inference_steps": 60}
ARRIVAL: Final = {
    "job_claimed": 2,
    "capture_written": 3,
    "capture_renamed": 3,
    "result_written": 2,
    "engine_stepped": 30,
}
"""The arrival at which a process is killed, where it is not the first one."""


def requests(seed: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return endpoint and body of a job of each kind, by name."""
    png = (Path(__file__).parents[2] / ".assets" / "fox.png").read_bytes()
    edit = SIZE | {"prompt": "a cat", "steps": 60, "init_images": [base64.b64encode(png).decode()], "seed": seed}
    return {
        f"sampler-{seed}": (GENERATIONS, FOX | {"seed": seed, "sampler": "dpmpp_2m_sde"}),
        f"lora-{seed}": (GENERATIONS, FOX | {"seed": seed, "sampler": "euler_a", "loras": [{"name": "sepia"}]}),
        f"cache-{seed}": (GENERATIONS, FOX | {"seed": seed, "cache_interval": 3}),
        f"edit-{seed}": (IMG2IMG, edit | {"denoising_strength": 0.8}),
    }


class Jobs:
    """The jobs of a chain of servers that share the data folder ``data``."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None) -> None:
        self.data = folder / "data"
        self._folder = folder
        self._env = env or {}
        self._num_servers = 0
        self._sent: dict[str, tuple[str, dict[str, Any]]] = {}
        self._unconfirmed: dict[str, tuple[str, dict[str, Any]]] = {}

    @contextmanager
    def server(self, faults: str = "", num_engines: int = 0) -> Iterator[RunningServer]:
        """Run the next server with ``faults``, which its first ``num_engines`` engines get, too."""
        self._num_servers += 1
        self._folder.mkdir(exist_ok=True)
        script = self._folder / "serve.py"
        script.write_text(SERVE)
        env = {
            "DIFFSERVE_SERVE_DATA_DIR": str(self.data),
            "DIFFSERVE_SERVE_CHECKPOINT_EVERY_S": "0.1",
            FAULTS_VARIABLE: faults,
            "NUM_ENGINES_TO_KILL": str(num_engines),
            **self._env,
        }
        workspace = self._folder / f"server-{self._num_servers}"
        with running_server(Path("embedded"), workspace, env=env, command=[str(script)]) as server:
            yield server

    def send(self, server: RunningServer, seed: int) -> None:
        """Create the jobs of ``seed``, and those whose creation was not confirmed. Raises httpx.TransportError."""
        self._unconfirmed |= requests(seed)
        for name, (endpoint, body) in tuple(self._unconfirmed.items()):
            answer = server.client.put(f"/v1/jobs/{name}", json={"endpoint": endpoint, "body": body})
            assert answer.status_code in (200, 202), answer.text
            self._sent[name] = self._unconfirmed.pop(name)

    def look(self, client: Client) -> dict[str, StoredJob]:
        """Return all confirmed jobs by name; every one of them exists."""
        jobs_by_id: dict[str, StoredJob] = {}
        after = ""
        while True:
            page = client.jobs(limit=100, order="asc", after=after)
            jobs_by_id |= {job.id: job for job in page.data}
            if not page.has_more:
                break
            after = page.data[-1].id
        assert self._sent.keys() <= jobs_by_id.keys()
        return jobs_by_id

    def wait(self, client: Client) -> dict[str, StoredJob]:
        """Return all jobs when they are over."""

        def finished() -> dict[str, StoredJob] | None:
            jobs_by_id = self.look(client)
            return jobs_by_id if all(job.is_over for job in jobs_by_id.values()) else None

        return wait_for(finished, 3 * SOON_S, "the end of all jobs")

    def has_one(self, client: Client, status: str) -> bool:
        """Return whether a job has this status."""
        return any(job.status == status for job in self.look(client).values())

    def delete_one(self, client: Client) -> None:
        """Delete a finished job."""
        jobs_by_id = self.look(client)
        name = next(name for name in self._sent if jobs_by_id[name].is_over)
        del self._sent[name]
        client.delete_job(name)

    def check(self, server: RunningServer) -> None:
        """Check that each job has ended once with the image of its request, and that nothing else is left."""
        with Client(server.url) as client:
            jobs_by_id = self.wait(client)
            assert {name: job.status for name, job in jobs_by_id.items()} == dict.fromkeys(jobs_by_id, "succeeded")
            with ThreadPoolExecutor(8) as pool:
                expected = pool.map(lambda call: server.client.post(call[0], json=call[1]), self._sent.values())
            for name, answer in zip(self._sent, expected, strict=True):
                assert answer.status_code == 200, answer.text
                assert images_in(client.job_result(name)) == images_in(answer.content), name
                with client.job_events(name) as events:
                    states = [event.status for event in events if isinstance(event, JobEvent)]
                num_leases = len(states) // 2
                assert num_leases >= jobs_by_id[name].attempts
                assert states == ["queued", "running"] * num_leases + ["succeeded"]

    def check_files(self) -> None:
        """Check the files after the end of the last server: a result for each job, and an intact database."""
        assert len(list((self.data / "jobs").iterdir())) == len(self._sent)
        assert all(path.name.replace("-", "").isdigit() for path in (self.data / "jobs").iterdir())
        if not self._env:
            with sqlite3.connect(self.data / "diffserve.sqlite") as connection:
                assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def images_in(body: bytes) -> list[str]:
    """Return the images in an answer, in base64."""
    answer = json.loads(body)
    return answer["images"] if "images" in answer else [entry["b64_json"] for entry in answer["data"]]


def fault_at(point: str) -> str:
    return f"kill.{point}@{ARRIVAL.get(point, 1)}"


@pytest.mark.parametrize("points", [SERVER_POINTS[:7], SERVER_POINTS[7:]], ids=lambda points: points[0])
def test_jobs_survive_kills_of_the_server_at_every_point(tmp_path: Path, points: tuple[str, ...]) -> None:
    """The points are in two chains, because a job whose server ends ten times is poison."""
    jobs = Jobs(tmp_path)
    for seed, point in enumerate(points):
        with jobs.server(fault_at(point)) as server:
            try:
                jobs.send(server, seed)
                with Client(server.url) as client:
                    if point == "job_drained":
                        wait_for(lambda: jobs.has_one(client, "running"), SOON_S, "a start")
                        server.process.send_signal(signal.SIGTERM)
                    if point == "job_deleted":
                        wait_for(lambda: jobs.has_one(client, "succeeded"), SOON_S, "an end")
                        jobs.delete_one(client)
            except (httpx.TransportError, DiffserveError):  # its connection was lost
                pass
            assert server.process.wait(SOON_S) == -signal.SIGKILL, point
    with jobs.server() as server:
        jobs.send(server, len(points))
        jobs.check(server)
    with jobs.server():
        pass  # it removes what is left of the deleted job
    jobs.check_files()


@pytest.mark.parametrize("point", ENGINE_POINTS)
def test_jobs_survive_kills_of_the_engine_at_every_point(tmp_path: Path, point: str) -> None:
    jobs = Jobs(tmp_path)
    with jobs.server(fault_at(point), num_engines=1) as server:
        jobs.send(server, 0)
        jobs.check(server)
        with Client(server.url) as client:
            attempts = sorted(job.attempts for job in jobs.look(client).values())
        assert attempts[-1] == 2, "the engine was killed"
    jobs.check_files()


def test_a_job_that_kills_two_engines_is_poison_and_the_others_end_well(tmp_path: Path) -> None:
    """The first job takes all others with it; then it runs alone, and fails alone."""
    jobs = Jobs(tmp_path)
    with jobs.server("kill.engine_captured@1", num_engines=2) as server:
        jobs.send(server, 0)
        with Client(server.url) as client:
            ended_jobs = jobs.wait(client)
    first, *other_jobs = ended_jobs.values()
    assert (first.status, first.attempts) == ("failed", 2)
    assert first.error is not None
    assert first.error.code == "poison"
    assert {job.status for job in other_jobs} == {"succeeded"}
    assert os.listdir(jobs.data / "jobs")

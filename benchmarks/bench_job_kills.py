"""Job kills benchmark: random kills of servers and engines over a hundred jobs, and the steps that are repeated.

    python benchmarks/bench_job_kills.py
    python benchmarks/bench_job_kills.py --servers 2 --postgresql postgresql://user@host/name

Jobs of mixed samplers, adapters, start images and DeepCache are created on the first server. Then a random server or
its engine is killed by SIGKILL, again and again, and a killed server is started again. An engine is killed only while
none of its jobs has lost one before, since a second loss makes a job poison. At the end each job must have ended once,
with the bytes that the last server computes for the same request without a disturbance, and no other file may be left.

Every server (this file with ``serve``) appends the steps of its images to one file, from which the repeated steps are
counted: those between the last step before a kill and the first one after it, and the seconds that they took before.
One JSON document to stdout and to results/.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import psutil
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_memory import engine_of, server  # noqa: E402
from benchmarks.report import RESULTS, hardware, summary, versions, write  # noqa: E402
from diffserve.store import Database  # noqa: E402
from diffserve.store.database import PageSelection  # noqa: E402
from diffserve.store.jobs import Job, JobFilter, Jobs  # noqa: E402

STEPS_FILE: Final = "BENCH_JOB_STEPS_FILE"
GENERATIONS: Final = "/v1/images/generations"
IMG2IMG: Final = "/sdapi/v1/img2img"
KINDS: Final[dict[str, dict[str, Any]]] = {
    "ddim": {"sampler": "ddim"},
    "dpmpp_2m_sde": {"sampler": "dpmpp_2m_sde"},
    "euler_a": {"sampler": "euler_a"},
    "lora": {"sampler": "dpmpp_2m", "loras": [{"name": "sepia"}]},
    "deepcache": {"sampler": "euler", "cache_interval": 3},
}
NUM_STEPS: Final = 100
MAX_REPEATED_STEPS: Final = 5
MAX_REPEATED_S: Final = 3.0
OVER_S: Final = 600.0
BUSY: Final = (429, 503)
"""Statuses of requests that are refused for the moment."""

Call = tuple[str, dict[str, Any]]


def serve(arguments: list[str]) -> Any:
    """Run a server that appends every begun image request and every step to the file of ``STEPS_FILE``."""
    from diffserve.api.types import GenerationRequest, Progress
    from diffserve.cli import main as command
    from diffserve.service.engine.connection import EngineConnection

    steps = os.open(os.environ[STEPS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    take, dispatch = EngineConnection.take, EngineConnection._dispatch

    def watched_take(connection: EngineConnection, job: Any) -> None:
        if isinstance(job.request, GenerationRequest):
            os.write(steps, f"{time.time()} {job.request_id} seed {job.request.seed}\n".encode())
        take(connection, job)

    def watched_dispatch(connection: EngineConnection, report: Any) -> None:
        if isinstance(report, Progress):
            os.write(steps, f"{time.time()} {report.request_id} step {report.step_index}\n".encode())
        dispatch(connection, report)

    EngineConnection.take = watched_take  # type: ignore[method-assign, assignment]
    EngineConnection._dispatch = watched_dispatch  # type: ignore[method-assign, assignment]
    return command(arguments)


def calls_of(num_jobs: int) -> dict[str, Call]:
    """Return endpoint and body of each job, by name; the seed of a job is its number."""
    png = base64.b64encode((ROOT / ".assets" / "fox.png").read_bytes()).decode()
    calls: dict[str, Call] = {}
    for number in range(num_jobs):
        kind = [*KINDS, "img2img"][number % (len(KINDS) + 1)]
        if kind == "img2img":
            body = {"prompt": "a cat", "steps": NUM_STEPS, "denoising_strength": 0.8, "init_images": [png]}
            size = {"width": 64, "height": 64}
            calls[f"{kind}-{number}"] = IMG2IMG, body | size | {"seed": number}
        else:
            body = {"prompt": "a red fox", "size": "64x64", "num_inference_steps": NUM_STEPS, "seed": number}
            calls[f"{kind}-{number}"] = GENERATIONS, body | KINDS[kind]
    return calls


class Servers:
    """Servers with one data folder, and their kills; ``steps_between`` is the largest number of steps between two."""

    def __init__(self, folder: Path, url: str, num_servers: int, seed: int, steps_between: int) -> None:
        self.data = folder / "data"
        self.steps_file = folder / "steps"
        self.kills = Counter[str]()
        self._random = random.Random(seed)
        self._folder = folder
        self._steps_between = steps_between
        os.environ |= {STEPS_FILE: str(self.steps_file), "DIFFSERVE_STORE_URL": url}
        os.environ |= {"DIFFSERVE_SERVE_SPARE_ENGINE": "false"}
        self._running = [self._start() for _ in range(num_servers)]
        self._jobs = Jobs(Database(self.data, url))

    @property
    def url(self) -> str:
        """Address of the first server."""
        return self._running[0][1]

    def jobs(self, *statuses: str) -> list[Job]:
        """Return the jobs with one of ``statuses``, or all."""
        page = self._jobs.page("", PageSelection(10_000, order="asc"), JobFilter(statuses))
        assert page is not None
        return page[0]

    def kill_one(self) -> None:
        """Kill a random server or its engine, a random number of steps after the last kill."""
        num_steps, until_s = self._num_steps() + self._random.randint(1, self._steps_between), time.monotonic() + OVER_S
        while self._num_steps() < num_steps and time.monotonic() < until_s and self.unfinished():
            self.restart_ended()
            time.sleep(0.02)
        index = self._random.randrange(len(self._running))
        stack, _, pid = self._running[index]
        if self._random.random() < 0.5 and not self._has_suspects():
            with suppress(ValueError):  # it starts again at the moment
                os.kill(engine_of(pid), signal.SIGKILL)
                self.kills["engine"] += 1
        else:
            os.kill(pid, signal.SIGKILL)
            stack.close()
            self.kills["server"] += 1
            self._running[index] = self._start()

    def unfinished(self) -> int:
        """Return the number of jobs that are not over."""
        return sum(not job.is_over for job in self.jobs())

    def restart_ended(self) -> None:
        """Start servers again that have ended, as they do when they lose engines too often."""
        for index, (stack, _, pid) in enumerate(self._running):
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                stack.close()
                self.kills["ended by itself"] += 1
                self._running[index] = self._start()

    def _num_steps(self) -> int:
        return self.steps_file.read_bytes().count(b" step ")

    def _has_suspects(self) -> bool:
        return any(job.losses for job in self.jobs("queued", "running"))

    def stop(self) -> None:
        """Stop all servers."""
        for stack, _, _ in self._running:
            stack.close()

    def _start(self) -> tuple[ExitStack, str, int]:
        stack = ExitStack()
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        options = ("--model", "embedded", "--data-dir", str(self.data), "--no-page")
        url, pid = stack.enter_context(server(options, folder, entry=(__file__,)))
        return stack, url, pid


def repeated_work(text: str) -> list[tuple[int, float]]:
    """Return for each continued image how many steps were repeated, and the seconds that they took at first.

    Args:
        text: The lines of ``STEPS_FILE``.
    """
    seeds: dict[str, str] = {}
    attempts: dict[str, dict[str, list[tuple[float, int]]]] = defaultdict(dict)
    for line in text.splitlines():
        time_s, request_id, kind, value = line.split()
        if kind == "seed":
            seeds[request_id] = value
        else:
            attempts[seeds[request_id]].setdefault(request_id, []).append((float(time_s), int(value)))
    repeated = []
    for by_request in attempts.values():
        lives = list(by_request.values())
        for index in range(1, len(lives)):
            last_s, last = lives[index - 1][-1]
            first = lives[index][0][1]
            times_s = [time_s for life in lives[:index] for time_s, step in life if step < first]
            from_s = max(times_s, default=lives[index - 1][0][0])
            began_s = lives[index - 1][0][0]
            repeated.append((max(0, last - first + 1), last_s - max(from_s, began_s)))
    return repeated


def check(servers: Servers, calls: dict[str, Call]) -> dict[str, Any]:
    """Compare the jobs with undisturbed requests, and return what holds."""
    jobs_by_id = {job.id: job for job in servers.jobs()}
    ends = [[status for status, _ in job.entered if status not in ("queued", "running")] for job in jobs_by_id.values()]
    with httpx.Client(base_url=servers.url, timeout=OVER_S, trust_env=False) as client, ThreadPoolExecutor(8) as pool:

        def has_equal_bytes(name: str) -> bool:
            endpoint, body = calls[name]
            until_s = time.monotonic() + OVER_S
            while (direct := client.post(endpoint, json=body)).status_code in BUSY and time.monotonic() < until_s:
                time.sleep(float(direct.headers.get("retry-after", 1.0)))
            expected = direct.raise_for_status().json()
            result = client.get(f"/v1/jobs/{name}/result").json()
            key = "images" if endpoint == IMG2IMG else "data"
            images = [[image if isinstance(image, str) else image["b64_json"] for image in answer.get(key, [])]
                      for answer in (expected, result)]  # fmt: skip
            return bool(images[0]) and images[0] == images[1]

        unequal = [name for name, is_equal in zip(calls, pool.map(has_equal_bytes, calls), strict=True) if not is_equal]
    return {
        "states": Counter(job.status for job in jobs_by_id.values()),
        "errors": [job.error for job in jobs_by_id.values() if job.error],
        "ended_once": sum(end == ["succeeded"] for end in ends),
        "equal_bytes": len(calls) - len(unequal),
        "unequal": unequal,
        "attempts": summary([job.attempts for job in jobs_by_id.values()]),
    }


def measure(num_jobs: int, num_kills: int, num_servers: int, url: str, seed: int, steps_between: int) -> dict[str, Any]:
    """Run the jobs with the kills and return the figures."""
    calls = calls_of(num_jobs)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="diffserve-kills-") as folder:
        servers = Servers(Path(folder), url, num_servers, seed, steps_between)
        try:
            for name, (endpoint, body) in calls.items():
                fields = {"endpoint": endpoint, "body": body}
                httpx.put(
                    f"{servers.url}/v1/jobs/{name}", json=fields, timeout=60.0, trust_env=False
                ).raise_for_status()
            while servers.kills["engine"] + servers.kills["server"] < num_kills and servers.unfinished():
                servers.kill_one()
                print(f"{dict(servers.kills)}, {servers.unfinished()} jobs left", file=sys.stderr, flush=True)
            until_s = time.monotonic() + OVER_S
            while servers.unfinished() and time.monotonic() < until_s:
                servers.restart_ended()
                time.sleep(0.5)
            text = servers.steps_file.read_text()
            results = check(servers, calls)
        finally:
            servers.stop()
        names = [path.name for path in (servers.data / "jobs").iterdir()]
        integrity = "PostgreSQL"
        if not url:
            with closing(sqlite3.connect(servers.data / "diffserve.sqlite")) as connection:
                integrity = connection.execute("PRAGMA integrity_check").fetchone()[0]
    repeated = repeated_work(text)
    num_over = sum(steps > MAX_REPEATED_STEPS and seconds > MAX_REPEATED_S for steps, seconds in repeated)
    return {
        "jobs": num_jobs,
        "kills": servers.kills,
        **results,
        "continued": len(repeated),
        "repeated_steps": summary([steps for steps, _ in repeated]),
        "repeated_s": summary([seconds for _, seconds in repeated]),
        "repeated_too_much": num_over,
        "unneeded_files": sorted(name for name in names if not name.replace("-", "").isdigit()),
        "integrity_check": integrity,
        "seconds": round(time.monotonic() - started_s, 1),
        "holds": {
            "ended_once": results["ended_once"] == num_jobs,
            "equal_bytes": results["equal_bytes"] == num_jobs,
            "files": len(names) == num_jobs and all(name.replace("-", "").isdigit() for name in names),
            "repeated": num_over == 0,
            "integrity_check": integrity in ("ok", "PostgreSQL"),
        },
    }


def main(
    jobs: Annotated[int, typer.Option(min=1, help="Number of jobs.")] = 100,
    kills: Annotated[int, typer.Option(min=0, help="Number of kills.")] = 40,
    servers: Annotated[int, typer.Option(min=1, help="Servers that run at the same time.")] = 1,
    postgresql: Annotated[str, typer.Option(help="Address of an empty PostgreSQL database; empty: SQLite.")] = "",
    steps_between: Annotated[
        int, typer.Option(min=1, help="Largest number of steps of all images between kills.")
    ] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the times and victims of the kills.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    options = f"--jobs {jobs} --kills {kills} --servers {servers} --steps-between {steps_between} --seed {seed}"
    document = {
        "benchmark": "job_kills",
        "command": f"python benchmarks/bench_job_kills.py {options}{' --postgresql URL' if postgresql else ''}",
        "hardware": hardware("cpu"),
        "versions": versions(),
        "store": "postgresql" if postgresql else "sqlite",
        **measure(jobs, kills, servers, postgresql, seed, steps_between),
    }
    write(document, out or RESULTS / f"job-kills-{document['store']}.json")
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(sys.argv[1:]))
    typer.run(main)

"""Does a server grow? Thousands of requests, a third of them given up, and the memory of both processes on the way.

    python benchmarks/bench_memory.py
    python benchmarks/bench_memory.py --requests 1000 --settle 200 --clients 4 --texts 0

Every request has words, a seed and a number of steps that none had before; some are streamed, some are wishes for the
language model. ``--aborts`` of them are given up by hanging up, at a moment of their own. What counts is anonymous
memory, which a file's pages on their way in and out do not disturb (Linux tells it; elsewhere it is the set that only
this process has). The slope is fitted to what comes after ``--settle`` requests: by least squares, and by the median of
the slopes of all pairs, which one step of the allocator does not move. Goal: under 1 MB for 1000 requests in either
process. Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, median
from typing import Annotated, Any, Final

import httpx
import psutil
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import RESULTS, hardware, versions, write  # noqa: E402

GOAL_MB_PER_1000: Final = 1.0
START_S: Final = 300.0
SAMPLERS: Final = ("ddim", "euler", "euler_a", "dpmpp_2m", "heun", "ddpm")
ABORTED_STEPS: Final = 400
LONGEST_PATIENCE_S: Final = 0.4
SYLLABLES: Final = ("ba", "ke", "li", "mo", "nu", "ra", "si", "to", "vu", "za")
ANONYMOUS = re.compile(rb"^Anonymous:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    """Settings of the load: ``aborts`` and ``texts`` are shares of all requests, ``clients`` is the concurrency."""

    requests: int
    clients: int
    aborts: float
    texts: float
    size: str
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory in bytes after ``num_requests``."""

    num_requests: int
    server: int
    engine: int


def memory_of(pid: int) -> int:
    """Return the anonymous bytes of a process, or its unique set size where the system does not report them."""
    try:
        match = ANONYMOUS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    except OSError:
        match = None
    return 1024 * int(match[1]) if match else int(psutil.Process(pid).memory_full_info().uss)


def growth(samples: Sequence[Sample], name: str, settle: int) -> dict[str, float]:
    """Fit the growth of process ``name`` in MB per 1000 requests, in two ways, after the first ``settle`` requests."""
    settled = [sample for sample in samples if sample.num_requests >= settle]
    if len(settled) < 3:
        raise ValueError(f"{len(settled)} samples after {settle} requests; 3 make a slope: ask for more requests.")
    at = [sample.num_requests / 1000 for sample in settled]
    megabytes = [getattr(sample, name) / 1e6 for sample in settled]
    slopes = [
        (megabytes[b] - megabytes[a]) / (at[b] - at[a])
        for a, b in itertools.combinations(range(len(settled)), 2)
        if at[b] > at[a]
    ]
    return {
        "mb_per_1000": round(linear_regression(at, megabytes).slope, 3),
        "mb_per_1000_median": round(median(slopes), 3),
        "first_mb": round(megabytes[0], 1),
        "last_mb": round(megabytes[-1], 1),
        "peak_mb": round(max(megabytes), 1),
    }


@contextlib.contextmanager
def server(
    options: Sequence[str], folder: Path, *, entry: Sequence[str] = ("-m", "diffserve")
) -> Iterator[tuple[str, int]]:
    """Yield (url, process id) of a ready server with ``options``; ``entry`` is Python's command."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, *entry, "serve", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        until_s = time.monotonic() + START_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the server did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def engine_of(server_pid: int) -> int:
    """Return the process id of the server's engine; a spare one is younger."""
    engines = []
    for child in psutil.Process(server_pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if "diffserve.engine.process" in child.cmdline():
                engines.append(child)
    return int(min(engines, key=lambda child: child.create_time()).pid)


class RunningQueue:
    """Closed-loop load of ``load.clients`` clients; ``outcomes`` counts how requests ended."""

    def __init__(self, url: str, load: Load) -> None:
        self.outcomes = Counter[str]()
        self.num_done = 0
        self._url = url
        self._load = load
        self._numbers = iter(range(load.requests))

    async def run(self, sample_every: int, sample: Any) -> None:
        """Send everything; call ``sample(number)`` now and then."""
        next_sample = 0

        async def client() -> None:
            nonlocal next_sample
            async with httpx.AsyncClient(base_url=self._url, timeout=120.0, trust_env=False) as http:
                for number in self._numbers:
                    self.outcomes[await self._send_one(http, random.Random(f"{self._load.seed} {number}"))] += 1
                    self.num_done += 1
                    if self.num_done >= next_sample:
                        next_sample = self.num_done + sample_every
                        sample(self.num_done)

        await asyncio.gather(*(client() for _ in range(self._load.clients)))

    async def _send_one(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """Send one request and return its outcome."""
        is_aborted, is_text = rng.random() < self._load.aborts, rng.random() < self._load.texts
        path, body = (wish if is_text else picture)(rng, is_aborted, self._load.size)
        try:
            async with asyncio.timeout(rng.random() * LONGEST_PATIENCE_S if is_aborted else None):
                response = await http.post(path, json=body)
        except TimeoutError:
            return "given up"
        except httpx.TransportError as error:
            return type(error).__name__
        return str(response.status_code)


def picture(rng: random.Random, is_aborted: bool, size: str) -> tuple[str, dict[str, Any]]:
    """Return path and body of an image request; an aborted one has many steps."""
    return "/v1/images/generations", {
        "prompt": words(rng, 6),
        "negative_prompt": words(rng, 3),
        "seed": rng.randrange(1 << 32),
        "num_inference_steps": ABORTED_STEPS if is_aborted else rng.randint(1, 3),
        "sampler": rng.choice(SAMPLERS),
        "guidance_scale": rng.choice((1.0, 3.0)),
        "size": size,
        "stream": rng.random() < 0.3,
    }


def wish(rng: random.Random, is_aborted: bool, size: str) -> tuple[str, dict[str, Any]]:
    """Return path and body of a request to rewrite a wish."""
    return "/v1/prompts/rewrite", {"prompt": words(rng, 4), "stream": rng.random() < 0.3}


def words(rng: random.Random, count: int) -> str:
    """Return new random words."""
    return " ".join("".join(rng.choices(SYLLABLES, k=3)) for _ in range(count))


def measure(model: str, load: Load, settle: int, every: int) -> dict[str, Any]:
    """Measure both slopes, the samples, and the outcomes of the requests."""
    samples: list[Sample] = []
    options = ("--model", model, "--no-page")
    with tempfile.TemporaryDirectory() as folder, server(options, Path(folder)) as (url, server_pid):
        engine_pid = engine_of(server_pid)

        def sample(number: int) -> None:
            samples.append(Sample(number, memory_of(server_pid), memory_of(engine_pid)))
            last = samples[-1]
            print(f"{number}: {last.server / 1e6:.1f} {last.engine / 1e6:.1f} MB", file=sys.stderr, flush=True)

        crowd = RunningQueue(url, load)
        started_s = time.monotonic()
        asyncio.run(crowd.run(every, sample))
        wall_s = time.monotonic() - started_s
        same_engine = engine_of(server_pid) == engine_pid
    slopes = {name: growth(samples, name, settle) for name in ("server", "engine")}
    return {
        **slopes,
        "goal_mb_per_1000": GOAL_MB_PER_1000,
        "holds": same_engine and all(slope["mb_per_1000_median"] < GOAL_MB_PER_1000 for slope in slopes.values()),
        "is_same_engine": same_engine,
        "outcomes": dict(sorted(crowd.outcomes.items())),
        "wall_s": round(wall_s, 1),
        "samples": [asdict(sample) for sample in samples],
    }


def main(
    model: Annotated[str, typer.Option(help="Model, as for diffserve serve.")] = "embedded-turbo",
    requests: Annotated[int, typer.Option(min=10, help="Number of requests.")] = 10_000,
    settle: Annotated[int, typer.Option(min=0, help="Warm-up requests before the slope is measured.")] = 1000,
    every: Annotated[int, typer.Option(min=1, help="Requests between two samples.")] = 50,
    clients: Annotated[int, typer.Option(min=1, help="Concurrent clients.")] = 8,
    aborts: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that are cancelled.")] = 0.3,
    texts: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests to the language model.")] = 0.1,
    size: Annotated[str, typer.Option(help="Image size.")] = "128x128",
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    load = Load(requests, clients, aborts, texts, size, seed)
    document = {
        "benchmark": "memory",
        "command": " ".join(["python", "benchmarks/bench_memory.py", *(Path(word).name for word in sys.argv[1:])]),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "load": asdict(load) | {"settle": settle, "model": Path(model).name},
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("MALLOC_", "OMP_"))},
        "found": measure(model, load, settle, every),
    }
    write(document, out or RESULTS / f"memory-{Path(model).name}.json")
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    typer.run(main)

"""Jobs benchmark: ten thousand jobs on one server, of which a share is cancelled; what grows, and how long pages take.

    python benchmarks/bench_many_jobs.py
    python benchmarks/bench_many_jobs.py --jobs 1000 --engine diffserve

The server is diffserve's own; by default the engine is ``noop_engine.py``, which computes nothing, so that the jobs are
limited by the queue. Clients create jobs over HTTP and cancel some of them at once. Memory, descriptors and threads of
the server are read whenever a tenth of the jobs is over and nothing runs; the write-ahead log is watched all the time.
Threads and descriptors of pools are created when they are first needed, so these must be constant in the second half.
Then the list of jobs is read page by page, each page after a request to ``/livez``, which shows what the machine itself
takes. One JSON document to stdout and to results/.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import httpx
import psutil
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_memory import server  # noqa: E402
from benchmarks.report import RESULTS, hardware, summary, versions, write  # noqa: E402

ENTRIES: Final = {"noop": ("benchmarks/noop_engine.py",), "diffserve": ("-m", "diffserve")}
GENERATIONS: Final = "/v1/images/generations"
NUM_STAGES: Final = 10
NUM_CLIENTS: Final = 8
PAGE: Final = 100
SETTLE_S: Final = 3.0
GOALS: Final = {"wal_bytes": 64 << 20, "page_s": 0.05, "growth_bytes": 32 << 20}


class Server:
    """A running server with the data folder ``data`` and the process ``pid``."""

    def __init__(self, client: httpx.AsyncClient, pid: int, data: Path) -> None:
        self.client = client
        self.data = data
        self.wal_bytes = 0
        self.cancelled = Counter[int]()
        self._process = psutil.Process(pid)

    def resources(self) -> dict[str, int]:
        """Return memory in bytes, and the numbers of descriptors and threads of the server's process."""
        process = self._process
        return {
            "resident_bytes": process.memory_info().rss,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "engine_resident_bytes": sum(child.memory_info().rss for child in process.children()),
        }

    async def watch_wal(self) -> None:
        """Keep the largest size of the write-ahead log."""
        while True:
            log = self.data / "diffserve.sqlite-wal"
            self.wal_bytes = max(self.wal_bytes, log.stat().st_size)
            await asyncio.sleep(0.1)

    async def create(self, number: int, *, is_cancelled: bool) -> None:
        """Create a job, and cancel it at once if ``is_cancelled``."""
        body = {"prompt": f"a red fox {number}", "size": "64x64", "num_inference_steps": 1, "seed": number}
        answer = await self.client.put(f"/v1/jobs/{number}", json={"endpoint": GENERATIONS, "body": body})
        answer.raise_for_status()
        if is_cancelled:
            self.cancelled[(await self.client.post(f"/v1/jobs/{number}/cancel")).status_code] += 1

    async def wait(self) -> None:
        """Wait until no job is unfinished."""
        query: dict[str, Any] = {"status": ["queued", "running"], "limit": 1}
        while (await self.client.get("/v1/jobs", params=query)).json()["data"]:
            await asyncio.sleep(0.2)

    async def read_pages(self) -> tuple[Counter[str], list[float], list[float]]:
        """Return how many jobs there are in each state, and the seconds of each page and of a trivial request."""
        counts, pages_s, trivial_s = Counter[str](), list[float](), list[float]()
        after = ""
        while True:
            started_s = time.perf_counter()
            await self.client.get("/livez")
            trivial_s.append(time.perf_counter() - started_s)
            started_s = time.perf_counter()
            page = (await self.client.get("/v1/jobs", params={"limit": PAGE, "after": after})).json()
            pages_s.append(time.perf_counter() - started_s)
            counts.update(job["status"] for job in page["data"])
            if not page["has_more"]:
                return counts, pages_s, trivial_s
            after = page["data"][-1]["id"]


async def run(server: Server, num_jobs: int, cancelled_percent: int) -> dict[str, Any]:
    """Create the jobs in stages and return the figures."""
    numbers = iter(range(num_jobs))
    stages = []
    watching = asyncio.create_task(server.watch_wal())
    for stage in range(1, NUM_STAGES + 1):
        until = num_jobs * stage // NUM_STAGES
        started_s = time.perf_counter()

        async def create_some(until: int) -> None:
            while (number := next(numbers, None)) is not None:
                await server.create(number, is_cancelled=number * 37 % 100 < cancelled_percent)
                if number + NUM_CLIENTS >= until:
                    return

        await asyncio.gather(*(create_some(until) for _ in range(NUM_CLIENTS)))
        await server.wait()
        seconds = time.perf_counter() - started_s
        await asyncio.sleep(SETTLE_S)
        stages.append({"jobs": until, "seconds": round(seconds, 2), **server.resources()})
        print(stages[-1], file=sys.stderr, flush=True)
    watching.cancel()
    counts, pages_s, trivial_s = await server.read_pages()
    base, middle, last = stages[NUM_STAGES // 5 - 1], stages[NUM_STAGES // 2 - 1], stages[-1]
    growth_bytes = last["resident_bytes"] - base["resident_bytes"]
    return {
        "stages": stages,
        "states": counts,
        "cancel_statuses": {str(status): count for status, count in server.cancelled.items()},
        "wal_bytes": server.wal_bytes,
        "growth_bytes": growth_bytes,
        "growth_from_jobs": base["jobs"],
        "page_s": summary(pages_s),
        "livez_s": summary(trivial_s),
        "files": sum(1 for _ in (server.data / "jobs").iterdir()),
        "holds": {
            "wal_bytes": server.wal_bytes <= GOALS["wal_bytes"],
            "page_s": max(pages_s) <= GOALS["page_s"],
            "growth_bytes": growth_bytes <= GOALS["growth_bytes"],
            "descriptors": last["descriptors"] <= middle["descriptors"],
            "threads": last["threads"] <= middle["threads"],
            "listed": counts.total() == num_jobs,
        },
    }


async def measure(engine: str, num_jobs: int, cancelled_percent: int) -> dict[str, Any]:
    """Run one server and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        options = ("--model", "embedded", "--data-dir", str(data), "--no-page")
        with server(options, Path(folder), entry=ENTRIES[engine]) as (url, pid):
            async with httpx.AsyncClient(base_url=url, timeout=300.0, trust_env=False) as client:
                return await run(Server(client, pid, data), num_jobs, cancelled_percent)


def main(
    jobs: Annotated[int, typer.Option(min=NUM_STAGES * NUM_CLIENTS, help="Number of jobs.")] = 10_000,
    cancelled: Annotated[int, typer.Option(min=0, max=100, help="Percentage that is cancelled.")] = 30,
    engine: Annotated[Literal["noop", "diffserve"], typer.Option(help="noop computes nothing.")] = "noop",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    document = {
        "benchmark": "many_jobs",
        "command": " ".join(["python", "benchmarks/bench_many_jobs.py", *sys.argv[1:]]),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "engine": engine,
        "goals": GOALS,
        **asyncio.run(measure(engine, jobs, cancelled)),
    }
    write(document, out or RESULTS / "many-jobs.json")
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    typer.run(main)

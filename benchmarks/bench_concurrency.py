"""Memory cost of one more concurrent image: a server's peak memory, throughput and latency by number of clients.

    python benchmarks/bench_concurrency.py
    python benchmarks/bench_concurrency.py --clients 1,4,16 --model embedded-turbo --size 256x256

Each client sends its next request, with a new prompt, as soon as it has an image. The peak resident set of API process
and engine process is read from Linux and reset between two numbers of clients. Progress goes to stderr, one JSON
document to stdout and to results/.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import httpx
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_memory import engine_of, server, words
from benchmarks.report import RESULTS, hardware, versions, write

HIGHEST: Final = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
LONGEST_S: Final = 600.0


def forget_highest(pid: int) -> None:
    """Reset the peak resident set of the process to its current value."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def highest_bytes(pid: int) -> int:
    """Return the peak resident set of the process since the last reset, in bytes."""
    match = HIGHEST.search(Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


async def ask(url: str, num_clients: int, rounds: int, body: dict[str, Any]) -> list[float]:
    """Request images from ``num_clients`` clients, ``rounds`` times each; return the seconds of each image."""
    rng, taken = random.Random(num_clients), list[float]()

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=LONGEST_S, trust_env=False) as http:
            for _ in range(rounds):
                request = {**body, "prompt": words(rng, 6), "seed": rng.randrange(1 << 32)}
                started_s = time.monotonic()
                (await http.post("/v1/images/generations", json=request)).raise_for_status()
                taken.append(time.monotonic() - started_s)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return taken


def measure(
    url: str, server_pid: int, numbers: Sequence[int], rounds: int, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure one point for each number of clients, after an uncounted image."""
    asyncio.run(ask(url, 1, 1, body))
    points = []
    for num_clients in numbers:
        pids = {"server": server_pid, "engine": engine_of(server_pid)}
        for pid in pids.values():
            forget_highest(pid)
        started_s = time.monotonic()
        taken = asyncio.run(ask(url, num_clients, rounds, body))
        wall_s = time.monotonic() - started_s
        points.append(
            {
                "clients": num_clients,
                "highest_bytes": {name: highest_bytes(pid) for name, pid in pids.items()},
                "images_per_s": round(len(taken) / wall_s, 3),
                "picture_s": {"median": round(median(taken), 3), "max": round(max(taken), 3)},
            }
        )
        print(points[-1], file=sys.stderr, flush=True)
    return points


def main(
    model: Annotated[str, typer.Option(help="Model, as for diffserve serve.")] = "embedded",
    clients: Annotated[str, typer.Option(help="Comma-separated numbers of concurrent clients.")] = "1,2,4,8,16,32",
    rounds: Annotated[int, typer.Option(min=1, help="Images per client.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 10,
    size: Annotated[str, typer.Option(help="Image size.")] = "128x128",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    body = {"num_inference_steps": steps, "size": size}
    with tempfile.TemporaryDirectory() as folder, server(("--model", model, "--no-page"), Path(folder)) as (url, pid):
        points = measure(url, pid, [int(number) for number in clients.split(",")], rounds, body)
    document = {
        "benchmark": "concurrency",
        "command": " ".join(["python", "benchmarks/bench_concurrency.py", *sys.argv[1:]]),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "model": {"id": Path(model).name},
        "points": points,
        "engine_most_clients_over_fewest": round(
            points[-1]["highest_bytes"]["engine"] / points[0]["highest_bytes"]["engine"], 3
        ),
    }
    write(document, out or RESULTS / f"concurrency-{Path(model).name}.json")
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    typer.run(main)

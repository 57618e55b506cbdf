"""Latency of a lone user of a server that has just started with an empty cache: what idle-time measurements cost it.

    python benchmarks/bench_first_minute.py

Starts ``diffserve serve`` with empty cache and data folders and sends requests one after the other. For each it notes
the wall time minus the device time that the answer reports. Progress goes to stderr, one JSON document to stdout and to
results/. The goal is a p95 below 60 ms over the first 30 requests.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_memory import server
from benchmarks.report import RESULTS, hardware, versions, write

GOAL_MS: Final = 60.0
SIZES: Final = ("128x128", "192x128", "128x192")


def measure(url: str, count: int, num_steps: int, pause_s: float) -> list[float]:
    """Return the milliseconds of wall time minus device time of ``count`` sequential requests.

    Every third request has another size than the one before, and ``pause_s`` seconds pass between two requests, so that
    the engine has time and reason to measure.
    """
    taken = []
    with httpx.Client(base_url=url, trust_env=False, timeout=300.0) as client:
        for number in range(count):
            body: dict[str, Any] = {"prompt": "a red fox", "seed": number, "num_inference_steps": num_steps}
            body["size"] = SIZES[number // 3 % len(SIZES)]
            began_s = time.perf_counter()
            answer = client.post("/v1/images/generations", json=body).raise_for_status()
            wall_s = time.perf_counter() - began_s
            taken.append(1e3 * (wall_s - answer.json()["usage"]["device_s"]))
            time.sleep(pause_s)
    return taken


def quantile(values: list[float], share: float) -> float:
    """Return the value that ``share`` of ``values`` do not exceed."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 1)


def main(
    count: Annotated[int, typer.Option(help="Requests per number of steps.")] = 30,
    pause_s: Annotated[float, typer.Option(help="Seconds between two requests.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure requests of 4 and of 25 steps, each on a server of its own."""
    document: dict[str, Any] = {
        "benchmark": "first_minute",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/bench_first_minute.py", *sys.argv[1:]]),
        "hardware": hardware("cpu"),
        "versions": versions(),
        "goal_ms": GOAL_MS,
        "points": [],
    }
    path = out or RESULTS / "first-minute-embedded-cpu.json"
    for num_steps in (4, 25):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            began_s = time.monotonic()
            options = ("--data-dir", str(Path(folder) / "data"), "--no-page")
            with server(options, Path(folder)) as (url, _):
                ready_s = time.monotonic() - began_s
                taken = measure(url, count, num_steps, pause_s)
        point = {
            "num_steps": num_steps,
            "ready_after_s": round(ready_s, 1),
            "beyond_device_ms": {
                "p50": quantile(taken, 0.5),
                "p95": quantile(taken, 0.95),
                "max": round(max(taken), 1),
            },
        }
        print(json.dumps(point), file=sys.stderr, flush=True)
        document["points"].append(point)
        write(document, path)
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

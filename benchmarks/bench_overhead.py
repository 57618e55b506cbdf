"""Overhead of the server: per image, in memory, and per step while many clients hold idle event streams.

    python benchmarks/bench_overhead.py
    python benchmarks/bench_overhead.py --parts request,memory

request  images of an engine that computes nothing (``noop_engine``), sequentially on one connection: time from the
         first byte sent to the last byte read, and CPU time of the server process; whole, and streamed. For comparison
         the PNG encoder alone, in this process.
memory   resident bytes of the API process, when it is ready and after images, with the page and without.
readers  steps of a real model with and without many idle event streams of the page, in turns; from the server's own
         metrics, with the CPU time of the engine per step.

Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import httpx
import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_memory import engine_of, server
from benchmarks.noop_engine import picture_of
from benchmarks.report import RESULTS, hardware, summary, versions, write
from diffserve.media.images import encode_image

GENERATIONS: Final = "/v1/images/generations"
NOOP: Final = (str(Path(__file__).resolve().parent / "noop_engine.py"),)
STEP: Final = re.compile(r"^diffserve_denoise_step_seconds_(count|sum)\{[^}]*\} (\S+)$", re.MULTILINE)
SETTLED_S: Final = 2.0
"""After readers have come or gone."""

GOALS: Final = {"request_ms": 5.0, "readers_ratio": 1.1, "memory_bytes": 200e6}


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def serving(*options: str, entry: Sequence[str] = ("-m", "diffserve")) -> Iterator[tuple[str, int]]:
    """Start a server with an empty data directory."""
    with tempfile.TemporaryDirectory() as folder:
        data_options = ("--data-dir", str(Path(folder) / "data"))
        with server((*options, *data_options), Path(folder), entry=entry) as started:
            yield started


def measure_requests(url: str, pid: int, count: int, num_steps: int, size: str) -> dict[str, Any]:
    """Measure ``count`` requests, whole and streamed in turns, after twenty that are not counted.

    Returns the milliseconds of each kind, and the CPU milliseconds of the server process per request.
    """
    taken: dict[str, list[float]] = {"whole": [], "stream": []}
    process, before_s = psutil.Process(pid), 0.0
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as client:
        for number in range(20 + count):
            before_s = used_s(process) if number == 20 else before_s
            for kind, ms in taken.items():
                body = {"prompt": "a red fox", "num_inference_steps": num_steps, "seed": number, "size": size}
                started_s = time.perf_counter()
                client.post(GENERATIONS, json=body | {"stream": kind == "stream"}).raise_for_status()
                if number >= 20:
                    ms.append(1e3 * (time.perf_counter() - started_s))
    cpu_ms = 1e3 * (used_s(process) - before_s) / (2 * count)
    figures = {kind: summary(ms) | {"p95": round(sorted(ms)[int(0.95 * len(ms))], 3)} for kind, ms in taken.items()}
    return figures | {"server_cpu_ms": round(cpu_ms, 3)}


def encode_ms(size: str) -> float:
    """Measure the CPU milliseconds of encoding the no-op engine's image as PNG, the median of 51."""
    width, _, height = size.partition("x")
    picture = picture_of(int(width), int(height))
    taken = []
    for _ in range(51):
        started_s = time.thread_time()
        encode_image(picture, infotext="a red fox\nSteps: 20")
        taken.append(1e3 * (time.thread_time() - started_s))
    return round(median(taken), 3)


def measure_memory(url: str, pid: int) -> dict[str, int]:
    """Measure the resident bytes of the server process: when ready, and after a hundred images."""
    process = psutil.Process(pid)
    before = process.memory_info().rss
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as client:
        for number in range(100):
            client.post(GENERATIONS, json={"prompt": "a red fox", "seed": number}).raise_for_status()
    return {"ready_bytes": before, "after_100_pictures_bytes": process.memory_info().rss}


def wait_for_page(url: str) -> None:
    """Return when the page is there."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as client:
        while client.get("/config").status_code != 200:
            time.sleep(0.2)


def steps_of(url: str) -> tuple[float, float]:
    """Return the number of steps without other work and their total seconds so far."""
    totals = {"count": 0.0, "sum": 0.0}
    for name, value in STEP.findall(httpx.get(f"{url}/metrics", trust_env=False, timeout=60.0).text):
        totals[name] += float(value)
    return totals["count"], totals["sum"]


async def measure_readers(url: str, pid: int, num_readers: int, rounds: int, num_steps: int) -> dict[str, Any]:
    """Measure the milliseconds and the engine's CPU time of a step, with and without readers in turns."""
    engine = psutil.Process(engine_of(pid))
    points: dict[str, dict[str, list[float]]] = {
        kind: {"step_ms": [], "cpu_ms": [], "server_cpu": []} for kind in ("none", "readers")
    }
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600.0) as client:
        for number in range(2 * rounds + 2):
            kind = "readers" if number % 2 else "none"
            readers = [await open_reader(url, i) for i in range(num_readers)] if kind == "readers" else []
            await asyncio.sleep(SETTLED_S)
            front, body = psutil.Process(pid), {"prompt": "a red fox", "num_inference_steps": num_steps}
            before, cpu_s, front_s, started_s = steps_of(url), used_s(engine), used_s(front), time.monotonic()
            (await client.post(GENERATIONS, json=body | {"sampler": "ddim"})).raise_for_status()
            wall_s = time.monotonic() - started_s
            await asyncio.sleep(1.2)  # the engine counts once a second
            after = steps_of(url)
            num_done, seconds = after[0] - before[0], after[1] - before[1]
            if number >= 2:
                points[kind]["step_ms"].append(1e3 * seconds / num_done)
                points[kind]["cpu_ms"].append(1e3 * (used_s(engine) - cpu_s) / num_done)
                points[kind]["server_cpu"].append((used_s(front) - front_s) / (wall_s + 1.2))
                say(f"{kind}: {points[kind]['step_ms'][-1]:.1f} ms a step")
            for writer in readers:
                writer.close()

    def ratio(name: str) -> dict[str, float]:
        """Compute values with readers over values without, pair by pair."""
        both = zip(points["readers"][name], points["none"][name], strict=True)
        return summary([with_ / without for with_, without in both])

    figures = {kind: {name: summary(values) for name, values in of.items()} for kind, of in points.items()}
    return figures | {"num_readers": num_readers, "ratio": ratio("step_ms"), "cpu_ratio": ratio("cpu_ms")}


async def open_reader(url: str, number: int) -> asyncio.StreamWriter:
    """Open a connection that waits for the page's events of a visitor. Raises RuntimeError if refused."""
    place = httpx.URL(url)
    reader, writer = await asyncio.open_connection(place.host, place.port)
    request = f"GET /gradio_api/heartbeat/reader{number} HTTP/1.1\r\nHost: {place.host}:{place.port}\r\n\r\n"
    writer.write(request.encode())
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.splitlines()[0]:
        raise RuntimeError(f"reader {number} was refused: {head.splitlines()[0].decode()}")
    return writer


def used_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main(
    parts: Annotated[
        str, typer.Option(help="Comma-separated parts: request, memory, readers.")
    ] = "request,memory,readers",
    count: Annotated[int, typer.Option(min=3, help="Measured requests per kind.")] = 200,
    steps: Annotated[int, typer.Option(min=1, help="Steps per request; each sends an event.")] = 20,
    readers: Annotated[int, typer.Option(min=1, help="Number of event stream clients.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds with and without readers.")] = 5,
    reader_steps: Annotated[int, typer.Option(min=10, help="Steps per round.")] = 60,
    model: Annotated[str, typer.Option(help="Model whose steps are measured with readers.")] = "embedded",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    document: dict[str, Any] = {
        "benchmark": "overhead", "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/bench_overhead.py", *sys.argv[1:]]),
        "hardware": hardware("cpu"), "versions": versions(), "goals": GOALS,
    }  # fmt: skip
    selected_parts = set(parts.split(","))
    if "request" in selected_parts:
        with serving("--model", model, "--no-page", entry=NOOP) as (url, pid):
            results_by_size = {
                size: measure_requests(url, pid, count, steps, size) for size in ("64x64", "128x128", "512x512")
            }
        document["request_ms"] = {
            size: results | {"png_cpu_ms": encode_ms(size)} for size, results in results_by_size.items()
        }
        say(json.dumps(document["request_ms"]))
    if "memory" in selected_parts:
        document["memory"] = {}
        for name in ("no-page", "page"):
            with serving("--model", model, f"--{name}", entry=NOOP) as (url, pid):
                if name == "page":
                    wait_for_page(url)
                document["memory"][name] = measure_memory(url, pid)
        say(json.dumps(document["memory"]))
    if "readers" in selected_parts:
        with serving("--model", model, "--page") as (url, pid):
            wait_for_page(url)
            document["readers"] = asyncio.run(measure_readers(url, pid, readers, rounds, reader_steps))
        say(json.dumps(document["readers"]))
    write(document, out or RESULTS / "overhead.json")
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    typer.run(main)

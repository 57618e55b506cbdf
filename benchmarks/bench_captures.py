"""Captures benchmark: the throughput that captures of unfinished images cost an engine process at full load.

    python benchmarks/bench_captures.py --model embedded
    python benchmarks/bench_captures.py --model /models/sd15 --rounds 20

An engine process runs the same requests in pairs of runs, one with ``[serve] checkpoint_every_s`` and one without, in
alternating order. The CPU time of both processes is measured, too: other work on the machine disturbs it less than the
wall time. An engine in this process then shows what a capture takes in its tick, and what its transfer takes. One JSON
document to stdout and to results/.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
import typer
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import RESULTS, head, summary, write
from diffserve.api import ipc
from diffserve.api.types import Captured, DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.service.engine.client import EngineClient
from diffserve.settings.layers import load_settings

SAMPLERS = ("ddim", "dpmpp_2m", "euler_a", "dpmpp_2m_sde")
PROMPTS = ("a red circle", "a blue square", "two green triangles", "a small yellow star")


class Run(NamedTuple):
    """Wall and CPU seconds of one run, and the captures that it got."""

    wall_s: float
    cpu_s: float
    num_captures: int
    capture_bytes: int


def make_requests(num_images: int, num_steps: int) -> list[GenerationRequest]:
    """Return ``num_images`` requests of mixed samplers; every fourth uses DeepCache."""
    return [
        GenerationRequest(
            prompt=PROMPTS[index % len(PROMPTS)],
            seed=index,
            diffusion=DiffusionParams(
                sampler=SAMPLERS[index % len(SAMPLERS)], num_steps=num_steps, cache_interval=1 + (index % 4 == 3)
            ),
        )
        for index in range(num_images)
    ]


async def run_once(client: EngineClient, requests: list[GenerationRequest], *, is_captured: bool) -> Run:
    """Run all ``requests`` at once and wait for their images."""
    captures: list[int] = []
    assert client.engine_id is not None
    processes = [psutil.Process(), psutil.Process(client.engine_id)]

    async def paint(request: GenerationRequest) -> None:
        on_capture = (lambda data: captures.append(len(data))) if is_captured else None
        async with client.submit(request, is_whole=True, on_capture=on_capture) as job:
            async for _ in job:
                pass

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    started_s, started_cpu_s = time.perf_counter(), cpu_s()
    await asyncio.gather(*map(paint, requests))
    return Run(time.perf_counter() - started_s, cpu_s() - started_cpu_s, len(captures), sum(captures))


def share_percent(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the share of a time that captures take, in percent: the median of ``pairs`` (with, without) and its range.

    The range is the 95 % confidence interval of a median: the k-th smallest and the k-th largest value.
    """
    shares = sorted(100.0 * (1.0 - without / with_captures) for with_captures, without in pairs)
    rank = max(0, math.floor(len(shares) / 2 - 0.98 * math.sqrt(len(shares))))
    return {"median": statistics.median(shares), "low": shares[rank], "high": shares[-1 - rank], "pairs": len(shares)}


def cost_of_capture(model: str, requests: list[GenerationRequest]) -> dict[str, float]:
    """Return the mean milliseconds that a capture takes in the tick and for its frame, with a capture at every tick."""
    engine = Engine.from_pretrained(model)
    captures, durations_s = engine.runners.captures, list[float]()
    capture_due = captures.capture_due

    def timed(live_requests: Any, now_s: float) -> list[Captured]:
        started_s = time.perf_counter()
        events = capture_due(live_requests, now_s)
        durations_s.append(time.perf_counter() - started_s)
        return events

    captures.capture_due = timed  # type: ignore[method-assign]
    for request in requests:
        engine.submit(replace(request, capture_every_s=1e-9))
    events = [event for event in engine.events() if isinstance(event, Captured)]
    started_s = time.perf_counter()
    for event in events:
        ipc.decode_report(ipc.frame(event)[ipc.HEADER.size :])
    frame_s = time.perf_counter() - started_s
    return {"in_tick_ms": 1e3 * sum(durations_s) / len(events), "frame_ms": 1e3 * frame_s / len(events)}


async def measure(model: str, every_s: float, num_images: int, num_steps: int, rounds: int) -> dict[str, Any]:
    """Run the pairs and return the document."""
    with tempfile.TemporaryDirectory() as data_dir:
        settings = load_settings(model=model, env={})
        serve = replace(settings.serve, data_dir=data_dir, spare_engine=False, checkpoint_every_s=every_s)
        client = EngineClient(replace(settings, serve=serve))
        client.start()
        while not client.is_ready:
            await asyncio.sleep(0.1)
        requests = make_requests(num_images, num_steps)
        runs: dict[bool, list[Run]] = {True: [], False: []}
        for index in range(-1, rounds):
            for is_captured in (True, False) if index % 2 else (False, True):
                named_requests = [
                    replace(request, request_id=f"{index}-{is_captured}-{request.seed}") for request in requests
                ]
                run = await run_once(client, named_requests, is_captured=is_captured)
                if index >= 0:  # the first pair warms up
                    runs[is_captured].append(run)
            print(f"pair {index + 1} of {rounds}", file=sys.stderr, flush=True)
        assert client.info is not None
        document = head("captures", Path(model).name, client.info)
        await client.stop()
    cost = cost_of_capture(model, requests)
    pairs = list(zip(runs[True], runs[False], strict=True))
    num_captures = sum(run.num_captures for run in runs[True])
    return document | {
        "checkpoint_every_s": every_s,
        "images": num_images,
        "steps": num_steps,
        "wall_s": {name: summary([run.wall_s for run in runs[key]]) for key, name in ((True, "on"), (False, "off"))},
        "captures_per_run": num_captures / rounds,
        "bytes_per_capture": sum(run.capture_bytes for run in runs[True]) / max(1, num_captures),
        "cost_of_capture": cost,
        "lost_throughput_percent": share_percent([(on.wall_s, off.wall_s) for on, off in pairs]),
        "share_of_cpu_time_percent": share_percent([(on.cpu_s, off.cpu_s) for on, off in pairs]),
    }


def main(
    model: Annotated[str, typer.Option(help="Model: embedded, or a diffusers directory.")] = "embedded",
    every_s: Annotated[float, typer.Option(help="Seconds between captures of an image.")] = 1.0,
    num_images: Annotated[int, typer.Option(help="Images of a run, all in progress at once.")] = 32,
    num_steps: Annotated[int, typer.Option(help="Steps of each image.")] = 50,
    rounds: Annotated[int, typer.Option(help="Pairs of runs, after one that warms up.")] = 12,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    document = asyncio.run(measure(model, every_s, num_images, num_steps, rounds))
    options = f"--every-s {every_s:g} --num-images {num_images} --num-steps {num_steps} --rounds {rounds}"
    document["command"] = f"python benchmarks/bench_captures.py --model {Path(model).name} {options}"
    info, day = document["model"], document["date"][:10]
    write(
        document, out or RESULTS / f"captures-{info['id']}-{info['device'].replace(':', '')}-{info['dtype']}-{day}.json"
    )
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

"""Fairness benchmark: the effect of one overloading API key on another key, and the accuracy of time-left estimates.

    python benchmarks/bench_fairness.py --model embedded

A server is started. In ``--rounds`` rounds, because the machine's speed may vary, a guest requests one image after
another: first alone, then together with a crowd of one key, which sends ``--times`` the server's capacity for that key
alone, whether or not it is answered. The result is the ratio of the 95th percentiles of the guest's times with and
without the crowd.

The guest's images are streamed. The remaining seconds in each event are compared with the actual ones, as in
``bench_time_left``; on a busy machine the errors reflect the other work too. Finally a mixed load without a crowd is
evaluated in the same way: Poisson arrivals of several keys, sizes and steps.

Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import httpx
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_overload import say, serving
from benchmarks.bench_time_left import spread
from benchmarks.open_loop import GENERATIONS, Answer, ask, flood, quantile, saturate
from benchmarks.report import RESULTS, hardware, versions, write

MIXED_STEPS: Final = (5, 10, 25, 40)
MIXED_SIZES: Final = ("128x128", "128x192")
MIXED_KEYS: Final = 4


class Watched(NamedTuple):
    """Streamed image: its seconds, and (has started, estimated, true) seconds left of each progress event."""

    seconds: float
    estimates: list[tuple[bool, float, float]]


class Load(NamedTuple):
    """Settings of the load."""

    url: str
    num_steps: int
    rounds: int
    part_s: float
    times: float


async def watch(http: httpx.AsyncClient, body: dict[str, Any], key: str) -> Watched | None:
    """Request a streamed image; ``None`` if it was rejected."""
    started_s, estimates = time.perf_counter(), list[tuple[bool, float, float]]()
    headers = {"authorization": f"Bearer {key}"}
    async with http.stream("POST", GENERATIONS, json=body | {"stream": True}, headers=headers) as response:
        if response.status_code != 200:
            return None
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event, now_s = json.loads(line[6:]), time.perf_counter()
            if event.get("seconds_left") is not None:
                estimates.append((bool(event["step"]), event["seconds_left"], now_s))
    ended_s = time.perf_counter()
    return Watched(
        ended_s - started_s, [(has_started, left_s, ended_s - at_s) for has_started, left_s, at_s in estimates]
    )


def errors_of(watched: Sequence[Watched], *, after_start: bool) -> dict[str, float]:
    """Summarize the errors of the estimates before or after the first step."""
    errors_s = [
        (estimate_s, true_s)
        for image in watched
        for has_started, estimate_s, true_s in image.estimates
        if has_started is after_start
    ]
    return spread(errors_s)


def times_left(watched: Sequence[Watched]) -> dict[str, Any]:
    """Summarize the errors of events with steps and of events with queue positions."""
    return {"steps": errors_of(watched, after_start=True), "queue": errors_of(watched, after_start=False)}


async def guests(load: Load, http: httpx.AsyncClient, seconds: float) -> list[Watched]:
    """Request one image after another; none may be rejected."""
    until_s, images = time.perf_counter() + seconds, list[Watched]()
    while time.perf_counter() < until_s:
        body = {"prompt": "a fox on the beach", "seed": len(images), "num_inference_steps": load.num_steps}
        watched = await watch(http, body, "guest")
        if watched is None:
            raise RuntimeError("the guest was refused")
        images.append(watched)
    return images


async def crowded(load: Load, http: httpx.AsyncClient) -> dict[str, Any]:
    """Run quiet and crowded rounds in turns."""

    async def send(seed: int) -> Answer:
        body = {"prompt": "a cat in the snow", "seed": seed, "num_inference_steps": load.num_steps}
        return await ask(load.url, body, key="crowd")

    started_s = time.perf_counter()
    answers = await saturate(send, num_workers=8, seconds=load.part_s)
    rate = sum(answer.status == 200 for answer in answers) / (time.perf_counter() - started_s)
    say(f"the crowd alone: {rate:.2f} pictures/s")
    quiet, busy, sent = list[Watched](), list[Watched](), list[Answer]()
    for number in range(load.rounds):
        quiet += await guests(load, http, load.part_s)
        flooding = asyncio.create_task(flood(send, rate_per_s=load.times * rate, seconds=load.part_s + 2.0))
        await asyncio.sleep(2.0)
        busy += await guests(load, http, load.part_s)
        sent += await flooding
        say(f"round {number}: guest alone {p95(quiet):.2f} s, beside the crowd {p95(busy):.2f} s (p95)")
    ratio = p95(busy) / p95(quiet)
    return {
        "crowd_alone_per_s": round(rate, 3),
        "crowd_statuses": {str(status): number for status, number in sorted(Counter(o.status for o in sent).items())},
        "guest_alone_s": seconds_of(quiet),
        "guest_beside_s": seconds_of(busy),
        "p95_ratio": round(ratio, 3),
        "goals": {"p95 beside the crowd within twice the quiet one": ratio <= 2.0},
        "time_left": {"alone": times_left(quiet), "beside_the_crowd": times_left(busy)},
    }


async def mixed(load: Load, http: httpx.AsyncClient, rate: float) -> dict[str, Any]:
    """Send Poisson arrivals at half of the server's capacity."""
    draw, tasks = random.Random(1), list[asyncio.Task[Watched | None]]()
    until_s = time.perf_counter() + load.rounds * load.part_s
    while time.perf_counter() < until_s:
        body = {
            "prompt": "a ship on a lake", "seed": len(tasks), "size": draw.choice(MIXED_SIZES),
            "num_inference_steps": draw.choice(MIXED_STEPS),
        }  # fmt: skip
        tasks.append(asyncio.create_task(watch(http, body, f"key {draw.randrange(MIXED_KEYS)}")))
        await asyncio.sleep(draw.expovariate(0.5 * rate))
    answers = await asyncio.gather(*tasks)
    finished = [answer for answer in answers if answer is not None]
    return {"requests": len(tasks), "refused": len(tasks) - len(finished), "time_left": times_left(finished)}


def p95(watched: Sequence[Watched]) -> float:
    """Return the 95th percentile in seconds."""
    return quantile([image.seconds for image in watched], 0.95)


def seconds_of(watched: Sequence[Watched]) -> dict[str, float]:
    """Return the number of images and quantiles of their seconds."""
    p50 = quantile([image.seconds for image in watched], 0.5)
    return {"pictures": len(watched), "p50": round(p50, 3), "p95": round(p95(watched), 3)}


async def measure(load: Load) -> dict[str, Any]:
    """Measure the crowd and the mixed load."""
    async with httpx.AsyncClient(base_url=load.url, timeout=600.0) as http:
        results = await crowded(load, http)
        say(json.dumps(results["time_left"]))
        results["mixed"] = await mixed(load, http, results["crowd_alone_per_s"])
    return results


def main(
    model: Annotated[str, typer.Option(help="Model that the server loads.")] = "embedded",
    num_steps: Annotated[int, typer.Option(help="Denoising steps per image, of guest and crowd.")] = 20,
    rounds: Annotated[int, typer.Option(help="Rounds of a quiet and a crowded part.")] = 3,
    part_s: Annotated[float, typer.Option(help="Seconds per part.")] = 20.0,
    times: Annotated[float, typer.Option(help="Load of the crowd as a multiple of the server's capacity.")] = 10.0,
    output: Annotated[Path | None, typer.Option(help="File for the JSON results; default: in results/.")] = None,
) -> None:
    """Overload a server and report the effect on a guest."""
    with serving(model, backlog_s=20.0) as (url, _):
        results = asyncio.run(measure(Load(url, num_steps, rounds, part_s, times)))
    now = datetime.datetime.now(datetime.UTC)
    document = {
        "benchmark": "fairness",
        "date": now.isoformat(timespec="seconds"),
        "model": Path(model).name,
        "settings": {"num_steps": num_steps, "rounds": rounds, "part_s": part_s, "times": times},
        "hardware": hardware("cpu") | {"load_average_at_end": [round(load, 2) for load in os.getloadavg()]},
        "versions": versions(),
        **results,
    }
    write(document, output or RESULTS / f"fairness-{Path(model).name}-{now:%Y-%m-%d}.json")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)

"""Accuracy of time-left estimates: every event of a mixed load against the time when its image was finished.

    OMP_NUM_THREADS=1 python benchmarks/bench_time_left.py --model embedded

The engine runs on the CPU time of its own thread (``painted_trace``), so that other work on the machine does not count.
Requests come from ``KEYS`` keys, some of batch priority, with 4 to 50 steps in two sizes. An error is (estimate - true)
/ true, for true times above ``LEAST_S``.

alone        each request arrives when the one before it is done
all at once  all requests arrive together, which matches the forecast's assumption
load         Poisson arrivals at ``--loads`` times the capacity. ``steps`` includes requests that arrive later and go
             first, which the forecast cannot know; ``until_next`` covers events without a later arrival before the
             image was finished

Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.open_loop import quantile
from benchmarks.painted_trace import WorkingTime, run
from benchmarks.report import RESULTS, head, write
from benchmarks.trace import Recorded, at_poisson_times, mixed
from diffserve.api.types import Accepted, Event, ImageFinished, Progress
from diffserve.engine import Engine
from diffserve.runtime import load_model
from diffserve.settings.config import EngineConfig

LEAST_S: Final = 0.2
WITHIN: Final = 0.2
KEYS: Final = 3
APART_S: Final = 1e4
BATCH_EVERY: Final = 6
SIZES: Final = ((128, 128), (192, 128))


def spread(estimates: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Summarize the errors of (estimate, true) seconds."""
    errors = [(estimate_s - true_s) / true_s for estimate_s, true_s in estimates if true_s > LEAST_S]
    if not errors:
        return {"events": 0}
    far = [abs(error) for error in errors]
    return {
        "events": len(errors),
        "median": round(statistics.median(errors), 3),
        "median_far": round(quantile(far, 0.5), 3),
        "p90_far": round(quantile(far, 0.9), 3),
        "within_20_percent": round(statistics.fmean(error <= WITHIN for error in far), 3),
    }


def measure(engine: Engine, clock: WorkingTime, trace: Sequence[Recorded]) -> dict[str, Any]:
    """Run ``trace`` and compare the estimates of its progress and admission events with the true times."""
    estimates: list[tuple[str, float, float]] = []
    num_silent, began_s = 0, clock()
    done: dict[str, float] = {}
    accepted: dict[str, float] = {}

    def watch(event: Event, now_s: float) -> None:
        nonlocal num_silent
        match event:
            case Accepted() if event.seconds_left is not None:
                accepted[event.request_id] = event.seconds_left
            case Progress() if event.seconds_left is not None:
                estimates.append((event.request_id, event.seconds_left, now_s))
            case Progress():
                num_silent += 1
            case ImageFinished():
                done[event.request_id] = now_s

    painted = run(engine, clock, trace, watch)
    latency_s = dict(zip(done, (0.0,) * len(done), strict=True))
    for place, request in enumerate(painted.served):
        name = next(name for name in latency_s if name.endswith(f" {place}"))
        latency_s[name] = request.latency_s or 0.0
    arrivals_s = [began_s + request.arrival_s for request in trace]
    quiet = [
        request
        for request in estimates
        if not any(request[2] < arrival_s < done[request[0]] for arrival_s in arrivals_s)
    ]
    return {
        "requests": len(trace),
        "without_a_time": num_silent,
        "steps": spread([(seconds, done[name] - at_s) for name, seconds, at_s in estimates]),
        "until_next": spread([(seconds, done[name] - at_s) for name, seconds, at_s in quiet]),
        "accepted": spread([(seconds, latency_s[name]) for name, seconds in accepted.items()]),
    }


def requests(count: int, seed: int) -> list[Recorded]:
    """Draw requests of several keys, some of batch priority."""
    drawn = mixed(count, SIZES, seed=seed)
    return [
        msgspec.structs.replace(
            request, client=f"key {place % KEYS}", priority="batch" if place % BATCH_EVERY == 0 else "interactive"
        )
        for place, request in enumerate(drawn)
    ]


def main(
    model: Annotated[str, typer.Option(help="Model.")] = "embedded",
    count: Annotated[int, typer.Option(help="Requests per part.")] = 40,
    loads: Annotated[str, typer.Option(help="Comma-separated loads as shares of the engine's capacity.")] = "0.4,0.8",
    dtype: Annotated[str, typer.Option(help="Precision.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="File for the JSON results; default: in results/.")] = None,
) -> None:
    """Run all parts, and report the errors of the estimates."""
    torch.set_num_threads(1)
    clock = WorkingTime()
    loaded = load_model(model, dtype=dtype)
    engine = Engine(loaded, EngineConfig(max_waiting=1000, compile="off"), clock=clock)
    engine.runners.warm_up(SIZES)
    document = head("time-left", model, loaded.info) | {"count": count, "parts": {}}
    run(engine, clock, requests(6, seed=5))
    apart = [
        msgspec.structs.replace(request, arrival_s=APART_S * place)
        for place, request in enumerate(requests(count, seed=1))
    ]
    parts = {"alone": measure(engine, clock, apart)}
    begun_s = clock()
    parts["all at once"] = measure(engine, clock, requests(count, seed=1))
    rate_per_s = count / (clock() - begun_s)
    print(parts, file=sys.stderr, flush=True)
    for load in map(float, loads.split(",")):
        arrivals = at_poisson_times(requests(count, seed=2), load * rate_per_s, seed=3)
        parts[f"load {load:g}"] = measure(engine, clock, arrivals)
        print(parts, file=sys.stderr, flush=True)
    document["parts"] = parts
    now = datetime.datetime.now(datetime.UTC)
    write(document, output or RESULTS / f"time-left-{Path(model).name}-{now:%Y-%m-%d}.json")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)

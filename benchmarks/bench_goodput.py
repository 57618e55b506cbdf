"""Goodput benchmark: how many requests are in time, open loop, under a policy of ours and as servers by request do it.

    python benchmarks/bench_goodput.py --minutes 10
    python benchmarks/bench_goodput.py --arms serial,same-key,latency,goodput --loads 0.3,0.7,0.95

Poisson arrivals of the mixed workload are painted for real, by one engine for each policy of ``--arms``, the last of
which is ours: the others paint with the same network, packages and precision, so that they differ in nothing else. A
load is a share of what ticks that are always full were measured to do here; good is within ``--slo-scale`` times what
requests of so many steps, guided or not, were measured to take alone. Every arm is given the same recorded traces, one
a round, and arms go there and back; a clock that skips idle time saves waiting for arrivals. As many requests are drawn
as ``--minutes`` have room for; a run that would begin later is named and left out. Pictures must be the same bytes
under every policy, and a sample of them as painted alone. Progress goes to stderr, one JSON document to stdout and to
results/, the traces beside it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import compiled_sizes, settle
from benchmarks.baseline_policies import ALL_POLICIES, configured, use
from benchmarks.bench_unet import say
from benchmarks.painted_trace import PaintedTrace, WallTime, run
from benchmarks.random_models import NAMES, directory_of
from benchmarks.report import default_path, head, write
from benchmarks.simulator import Served, summary
from benchmarks.trace import Recorded, at_poisson_times, mixed, save
from diffserve.api.types import TERMINAL
from diffserve.engine import Engine
from diffserve.runtime import load_model
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

GOALS = "at 0.95 at least 2 times serial and 1.3 times same-key; at 0.3 never more than 3 % slower than serial"
IN_FLIGHT = 16
LEAST_REQUESTS = 8
SAMPLED = 3

Kind = tuple[int, bool]
"""Steps, and whether guided: what decides how long a request takes alone."""


def kind_of(one: Recorded) -> Kind:
    """Of ``one``."""
    return one.num_steps, one.guidance_scale > 1.0


def rows_of(one: Recorded) -> int:
    """UNet rows of ``one``; every sampler of the workload evaluates once a step."""
    return one.num_steps * (1 + (one.guidance_scale > 1.0))


def shorter(requests: Sequence[Recorded], divisor: int) -> list[Recorded]:
    """``requests`` with so many times fewer steps, each with one at least."""
    return [msgspec.structs.replace(one, num_steps=max(1, one.num_steps // divisor)) for one in requests]


def capacity_per_s(engine: Engine, requests: Sequence[Recorded], seconds: float) -> float:
    """Requests like these a second, by the rows that always full ticks do in ``seconds``."""
    coming = itertools.cycle(requests)
    live: set[str] = set()
    names = (f"capacity {number}" for number in itertools.count())
    first_rows, started_s = engine.stats().num_rows, time.perf_counter()
    while time.perf_counter() < started_s + seconds:
        while len(live) < IN_FLIGHT:
            name = next(names)
            engine.submit(next(coming).request(name))
            live.add(name)
        live -= {event.request_id for event in engine.tick() if isinstance(event, TERMINAL)}
    rows_per_s = (engine.stats().num_rows - first_rows) / (time.perf_counter() - started_s)
    for name in live:
        engine.cancel(name)
    while engine.has_work:
        engine.tick()
    return rows_per_s / statistics.fmean(map(rows_of, requests))


def isolated_s(engine: Engine, clock: WallTime, requests: Sequence[Recorded]) -> dict[Kind, float]:
    """Seconds that a request of each kind among ``requests`` takes alone; the lesser of two."""
    examples = {kind_of(one): one for one in requests}
    found: dict[Kind, float] = {}
    for kind, one in examples.items():
        alone = msgspec.structs.replace(one, arrival_s=0.0)
        taken = [run(engine, clock, [alone]).served[0].latency_s for _ in range(2)]
        found[kind] = min(latency_s for latency_s in taken if latency_s is not None)
    return found


def num_requests(seconds: float, *, runs: int, num_arms: int, capacity: float, alone_s: float) -> int:
    """Of a trace, so that ``runs`` of it by every arm are done in ``seconds``: ours at capacity, others one by one."""
    each_s = 1.0 / capacity + (num_arms - 1) * max(alone_s, 1.0 / capacity)
    return max(LEAST_REQUESTS, int(seconds / (runs * each_s)))


def point_of(
    load: float, rounds: Sequence[dict[str, PaintedTrace]], alone: dict[Kind, float], scale: float
) -> dict[str, Any]:
    """The figures of a load: all rounds of an arm together, and the last arm's over the others'."""
    served: dict[str, list[Served]] = defaultdict(list)
    goodputs: dict[str, list[float]] = defaultdict(list)
    num_equal = num_all = 0
    for painted in rounds:
        for name, one in painted.items():
            these = [Served(each.latency_s or 0.0, alone[kind_of(each)]) for each in one.served]
            served[name] += these
            goodputs[name].append(summary(these, scale)["goodput"])
        equal = [len(set(digests)) == 1 for digests in zip(*(one.digests for one in painted.values()), strict=True)]
        num_equal, num_all = num_equal + sum(equal), num_all + len(equal)
    arms = {name: summary(these, scale) for name, these in served.items()}
    *others, ours = arms
    over = {
        name: {
            "goodput": round(arms[ours]["goodput"] / arms[name]["goodput"], 3) if arms[name]["goodput"] else None,
            "p50_s": round(arms[ours]["p50_s"] / arms[name]["p50_s"], 3),
            "mean_s": round(arms[ours]["mean_s"] / arms[name]["mean_s"], 3),
        }
        for name in others
    }
    return {
        "load": load,
        "arms": arms,
        "goodput_of_rounds": goodputs,
        "ours": ours,
        "ours_over": over,
        "pictures_equal_in_all_arms": f"{num_equal} of {num_all}",
    }


def equal_alone(engine: Engine, clock: WallTime, trace: Sequence[Recorded], painted: PaintedTrace) -> str:
    """How many of a sample are the same bytes when painted alone."""
    places = range(0, len(trace), max(1, len(trace) // SAMPLED))[:SAMPLED]
    alone = [run(engine, clock, [msgspec.structs.replace(trace[place], arrival_s=0.0)]).digests[0] for place in places]
    same = sum(digest == painted.digests[place] for digest, place in zip(alone, places, strict=True))
    return f"{same} of {len(places)}"


def main(
    model: Annotated[str, typer.Option(help=f"embedded, {', '.join(NAMES)}, or a diffusers directory.")] = "embedded",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    arms: Annotated[str, typer.Option(help=f"Two or more of {', '.join(ALL_POLICIES)}; the last is ours.")] = (
        "serial,same-key,goodput"
    ),
    loads: Annotated[str, typer.Option(help="With commas; 1 is all that full ticks can do.")] = "0.3,0.95",
    minutes: Annotated[float, typer.Option(help="For all runs, what is measured before them aside.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Traces of each load.")] = 2,
    slo_scale: Annotated[float, typer.Option(help="Good is within so many times what a request takes alone.")] = 3.0,
    capacity_s: Annotated[float, typer.Option(help="Seconds for which capacity is measured.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of the traces.")] = 5,
    divisor: Annotated[int, typer.Option(min=1, help="Divides the steps of every request.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    names = arms.split(",")
    if (unknown := set(names) - set(ALL_POLICIES)) or len(set(names)) < 2:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown)) or arms}: name two or more of {', '.join(ALL_POLICIES)}."
        )
    profile = load_settings(model=model, env={}).model if model == "embedded" else None
    with directory_of(model, device, dtype) as directory:
        path_or_name = model if model == "embedded" else directory
        network = load_model(path_or_name, dtype=dtype, device=device, profile=profile)
    clock = WallTime()
    engines: dict[str, Engine] = {}
    for name in dict.fromkeys(["latency", *names]):
        config = EngineConfig(policy=configured(name), slo_scale=slo_scale, max_waiting=100_000)
        engines[name] = Engine(network, config, profile=profile, clock=clock, trace_ticks=16)
        use(engines[name].scheduler, name)
        settle(engines[name])
    document = head("goodput", Path(model).name, network.info)
    path = out or default_path(document)
    sizes = [network.info.good_sizes[0]]
    kinds = shorter(mixed(200, sizes, seed=seed), divisor)
    reference = engines["latency"]
    alone = isolated_s(reference, clock, kinds)
    capacity = capacity_per_s(reference, kinds, capacity_s)
    mean_alone_s = statistics.fmean(alone[kind_of(one)] for one in kinds)
    parts = [float(part) for part in loads.split(",")]
    count = num_requests(
        60 * minutes, runs=rounds * len(parts), num_arms=len(names), capacity=capacity, alone_s=mean_alone_s
    )
    say(f"capacity {capacity:.3f} requests/s, alone {mean_alone_s:.2f} s on average, {count} requests a trace")
    document["settings"] = {
        "rounds": rounds,
        "slo_scale": slo_scale,
        "steps_divided_by": divisor,
        "requests_of_a_trace": count,
        "capacity_per_s": round(capacity, 4),
        "isolated_s": {f"{steps} steps{' guided' * guided}": round(s, 4) for (steps, guided), s in alone.items()},
        "compiled_sizes": compiled_sizes(reference),
        "deterministic": reference.is_deterministic,
        "goals": GOALS,
    }
    document["points"], document["left_out"] = [], []
    until_s = time.monotonic() + 60 * minutes
    done: dict[float, list[dict[str, PaintedTrace]]] = defaultdict(list)
    equal: dict[float, str] = {}
    for index, load in itertools.product(range(rounds), parts):
        if time.monotonic() >= until_s:
            document["left_out"].append(f"load {load:g}, round {index}")
            write(document, path)
            continue
        drawn = shorter(mixed(count, sizes, seed=seed + 100 * index), divisor)
        trace = at_poisson_times(drawn, load * capacity, seed=seed + 100 * index + 1)
        save(trace, path.with_name(f"{path.stem}-trace-{load:g}-{index}.jsonl"))
        painted: dict[str, PaintedTrace] = {}
        for name in names if index % 2 == 0 else reversed(names):
            painted[name] = run(engines[name], clock, trace)
            say(f"load {load:g} round {index} {name:10} done")
        done[load].append({name: painted[name] for name in names})
        equal.setdefault(load, equal_alone(reference, clock, trace, painted[names[-1]]))
        document["points"] = [
            {**point_of(each, done[each], alone, slo_scale), "sample_equal_alone": equal[each]} for each in done
        ]
        write(document, path)
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

"""Validation of the simulator: the engine runs recorded traces, and the simulator replays them with measured costs.

    OMP_NUM_THREADS=1 python benchmarks/validate_simulator.py --requests 100
    OMP_NUM_THREADS=1 python benchmarks/validate_simulator.py --policy goodput --loads 0.3,0.7,0.95

The engine's clock is the CPU time of its thread, which jumps to the next arrival when there is no work. So other work
on the machine does not count (except for cache effects), and there is only one thread: compiled calls, which use their
own threads, are not made. HTTP is not included. Least squares over the ticks of a run give the time of a call of each
size, of a new image and of decoding; the simulator gets only these costs, not the order of events.

Traces, costs and the comparison go to results/simulator-<model>/.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.baseline_policies import configured, use
from benchmarks.painted_trace import WorkingTime, run
from benchmarks.random_models import NAMES, save_random_model
from benchmarks.report import RESULTS, head, write
from benchmarks.simulator import Costs, Served, busy_for, isolated_times, replay, summary
from benchmarks.trace import Recorded, mixed, save
from diffserve.engine import Engine
from diffserve.engine.image.task import TickTrace
from diffserve.runtime import DiffusionModel, load_model
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

FIGURES = ("p50_s", "p99_s", "goodput")
SLO_SCALE = 3.0
LEAST_SEEN = 5
"""Calls of a size from which a run knows what it costs."""


def fit(ticks: Iterable[TickTrace], size: str, fixed_costs: Costs | None = None) -> Costs:
    """Fit the costs of calls by rows, of new images and of decoding to ``ticks`` by least squares.

    size   "128x128": of all images in ``ticks``
    known  supplies the calls that are rare in ``ticks``
    """
    ticks = list(ticks)
    rows = [[len(call.rows) + call.num_padded for call in tick.calls] for tick in ticks]
    sizes = sorted({size for sizes in rows for size in sizes})
    counts = np.array([[float(sizes_of.count(size)) for size in sizes] for sizes_of in rows])
    other_counts = np.array([[float(tick.num_prepared), float(tick.num_decoded)] for tick in ticks])
    seconds = np.array([tick.wall_s for tick in ticks])
    solution, *_ = np.linalg.lstsq(np.hstack([counts, other_counts]), seconds, rcond=None)
    least_s = 1e-5
    calls = dict(fixed_costs.calls[size]) if fixed_costs else {}
    for number, num_rows in enumerate(sizes):
        if num_rows not in calls or counts[:, number].sum() >= LEAST_SEEN:
            calls[num_rows] = max(least_s, float(solution[number]))
    prepare_s, decode_s = (max(least_s, float(value)) for value in solution[len(sizes) :])
    return Costs(calls={size: dict(sorted(calls.items()))}, prepare_s=prepare_s, decode_s=decode_s, tick_s=0.0)


def compare(real: Sequence[Recorded], costs: Costs, config: EngineConfig, policy: str = "") -> dict[str, Any]:
    """Return the figures of a run and of its replay, and the relative errors."""
    alone = isolated_times(real, costs, config)
    painted = [
        Served(math.nan if request.latency_s is None else request.latency_s, solo)
        for request, solo in zip(real, alone, strict=True)
    ]
    measured = summary(painted, SLO_SCALE)
    simulated = replay(real, costs, config, policy=policy).summary(SLO_SCALE)
    errors = {name: round(simulated[name] / measured[name] - 1.0, 4) if measured[name] else None for name in FIGURES}
    return {"measured": measured, "simulated": simulated, "relative_error": errors}


def main(
    model: Annotated[
        str, typer.Option(help=f"Model: embedded, {', '.join(NAMES)}, or a diffusers directory.")
    ] = "embedded",
    policy: Annotated[str, typer.Option(help="Comma-separated values of [engine] policy.")] = "latency",
    loads: Annotated[str, typer.Option(help="Comma-separated busy shares of the engine.")] = "0.3,0.7,0.95",
    requests: Annotated[int, typer.Option(min=4, help="Requests per trace.")] = 100,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: results/simulator-<model>.")
    ] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    torch.set_num_threads(1)
    network = open_network(model)
    profile = load_settings(model=model, env={}).model if model == "embedded" else None
    folder = out or RESULTS / f"simulator-{Path(model).name}"
    width_px, height_px = network.info.good_sizes[0]
    size = f"{width_px}x{height_px}"
    document: dict[str, Any] = head("simulator", Path(model).name, network.info)
    options = f"--policy {policy} --loads {loads} --requests {requests}"
    document["command"] = f"OMP_NUM_THREADS=1 python benchmarks/validate_simulator.py {options}"
    document["slo_scale"], document["points"] = SLO_SCALE, []
    first_costs: Costs | None = None
    for load in (float(part) for part in loads.split(",")):
        for name in policy.split(","):
            config = EngineConfig(
                policy=configured(name),
                slo_scale=SLO_SCALE,
                threads=1,
                max_waiting=100_000,
                compile="off",
            )
            clock = WorkingTime()
            engine = Engine(network, config, profile=profile, clock=clock, trace_ticks=100_000)
            use(engine.scheduler, name)
            engine.warm_up()
            if first_costs is None:
                _, ticks, _ = run(engine, clock, mixed(32, [(width_px, height_px)], seed=99))
                first_costs = fit(ticks, size)
                save_costs(first_costs, folder / "costs.json")
            trace = busy_for(
                mixed(requests, [(width_px, height_px)], seed=5), first_costs, load, config, seed=7, policy=name
            )
            real, ticks, _ = run(engine, clock, trace)
            save(real, folder / f"trace-{name}-{load:g}.jsonl")
            costs = fit(ticks, size, first_costs)
            point = {
                "policy": name,
                "load": load,
                "costs": msgspec.to_builtins(costs),
                **compare(real, costs, config, name),
            }
            document["points"].append(point)
            print(point, file=sys.stderr, flush=True)
            write(document, folder / "validation.json")
    print(json.dumps(document))


def open_network(model: str) -> DiffusionModel:
    """Load "embedded", a model of random weights, or a directory."""
    with tempfile.TemporaryDirectory() as scratch:
        if model in NAMES:
            model = str(save_random_model(model, Path(scratch), dtype=torch.float32))
        return load_model(model)


def save_costs(costs: Costs, path: Path) -> None:
    """Write the costs in the format of ``simulator.py --costs``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")


if __name__ == "__main__":
    typer.run(main)

"""Threads benchmark: an image on a busy machine with one thread, with all, and with the fastest measured number.

    python benchmarks/bench_threads.py
    python benchmarks/bench_threads.py --loads 0,2 --rounds 9 --model /models/sd15

The load is child processes that only compute; they end with this program, or after ten minutes. Each arm is a separate
process, because spinning is fixed when torch is loaded. ``today`` is torch's default: all cores, and the spinning of
the OpenMP library. The arms generate the same image in turns, so that other work on the machine affects all of them;
each ratio is the median of the rounds. The first image after the load has changed is reported separately. One JSON
document to stdout and to results/.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arm_process import ArmProcess

ARMS = ("one", "all", "auto", "today")
BURN_S = 600
BURNER = f"import time\nend = time.monotonic() + {BURN_S}\nwhile time.monotonic() < end:\n    sum(range(10000))\n"


def serve_arm(name: str, model: str, steps: int) -> None:
    """Run as an arm: load, warm up, and generate an image for every line of input."""
    import torch

    from diffserve.runtime.loading.library_imports import import_lean

    import_lean()  # as the engine's own process does
    from benchmarks.report import head
    from diffserve.api.types import DiffusionParams, GenerationRequest
    from diffserve.engine import Engine
    from diffserve.settings.config import EngineConfig

    threads = {"one": 1, "auto": None}.get(name, torch.get_num_threads())
    engine = Engine.from_pretrained(model, config=EngineConfig(threads=threads))
    engine.warm_up()
    print(json.dumps(head("threads", Path(model).name, engine.info)), flush=True)
    params = DiffusionParams(num_steps=steps, guidance_scale=3.0)
    for _ in sys.stdin:
        started_s = time.perf_counter()
        engine.generate(GenerationRequest(prompt="a fox next to a cactus", seed=1, diffusion=params))
        taken_s = time.perf_counter() - started_s
        print(json.dumps({"s": taken_s, "threads": engine.num_threads}), flush=True)


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Run ``count`` busy processes during the block."""
    burners = [subprocess.Popen([sys.executable, "-c", BURNER]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def measure(arms: dict[str, ArmProcess], load: int, rounds: int) -> dict[str, Any]:
    """Measure one point: all arms in turns under ``load`` processes; the slow arm ``today`` runs only once."""
    with burning(load):
        first = {name: arm.ask("paint") for name, arm in arms.items()}
        names = [name for name in arms if name != "today" or not load]
        turns: list[dict[str, dict[str, Any]]] = []
        for index in range(rounds):
            order = names[index % len(names) :] + names[: index % len(names)]
            turns.append({name: arms[name].ask("paint") for name in order})
    return {
        "neighbours": load,
        "load_average": round(os.getloadavg()[0], 2),
        "first_s": {name: round(result["s"], 3) for name, result in first.items()},
        "s": {name: summary([turn[name]["s"] for turn in turns]) for name in names},
        "threads_of_auto": [turn["auto"]["threads"] for turn in turns],
        "auto_over_better_of_one_and_all": ratio(turns, "auto", ("one", "all")),
        "auto_over_today": ratio(turns if "today" in names else [first], "auto", ("today",)),
    }


def ratio(turns: Sequence[dict[str, dict[str, Any]]], name: str, baselines: Sequence[str]) -> float:
    """Return the median ratio of ``name``'s seconds to those of the arm in ``others`` with the smallest median."""
    best = min(baselines, key=lambda other: statistics.median(turn[other]["s"] for turn in turns))
    return round(float(statistics.median(turn[name]["s"] / turn[best]["s"] for turn in turns)), 3)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def main(
    model: Annotated[str, typer.Option(help="Model: embedded, or a diffusers directory.")] = "embedded",
    loads: Annotated[str, typer.Option(help="Comma-separated numbers of other busy processes.")] = "0,1,2,9",
    rounds: Annotated[
        int, typer.Option(help="Images per arm and load, after a first one that is reported separately.")
    ] = 7,
    steps: Annotated[int, typer.Option(help="Denoising steps per image.")] = 25,
    arm: Annotated[str | None, typer.Option(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    if arm is not None:
        serve_arm(arm, model, steps)
        return
    from benchmarks.report import RESULTS, write

    with ExitStack() as stack:
        arms = {}
        for name in ARMS:
            arguments = [__file__, "--arm", name, "--model", model, "--steps", str(steps)]
            arms[name] = ArmProcess(arguments, bounds_spinning=name != "today")
            stack.callback(arms[name].close)
        document = dict(arms["auto"].about)
        options = f"--loads {loads} --rounds {rounds} --steps {steps}"
        document["command"] = f"python benchmarks/bench_threads.py --model {Path(model).name} {options}"
        document["points"] = []
        info = document["model"]
        name = f"threads-{info['id']}-{info['device'].replace(':', '')}-{info['dtype']}-{document['date'][:10]}.json"
        for load in (int(part) for part in loads.split(",")):
            point = measure(arms, load, rounds)
            document["points"].append(point)
            print(f"{load} neighbours: {point}", file=sys.stderr, flush=True)
            write(document, out or RESULTS / name)
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

"""Engine benchmark: the cost curve c(rows), and the heterogeneity ladder against diffusers' own pipeline.

    python benchmarks/bench_engine.py --model embedded
    python benchmarks/bench_engine.py --rungs same,+guidance --arms engine,serial,static --divisor 2
    python benchmarks/bench_engine.py --model sd15-random --device cuda --dtype bfloat16

Arms with equal weights and precision, saturated: diffusers behind a lock, diffusers in static batches of equal
requests, each also with ``torch.compile`` (compilation is not counted), and the engine on the shuffled mixture, as
served (with the packages of ``diffserve warm``, if any) and without them. Arms alternate (engine, serial, static,
static, serial, engine, ...), each ratio compares two runs of one round; a warm-up of every arm with every kind of
request in one step is not counted. Waiting threads spin as briefly as under diffserve's own commands, in all arms.
Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diffserve.processes import bound_spinning

bound_spinning(os.environ)  # before torch is loaded

import torch

from benchmarks.arms import ARMS, Paint, PipelineArm, Run, compiled_sizes, eager, exactness, make_arms, settle
from benchmarks.cost_curve import measure_cost_curve
from benchmarks.random_models import NAMES, directory_of
from benchmarks.report import default_path, head, summary, write
from benchmarks.workload import RUNGS, batches
from diffserve.engine import Engine
from diffserve.engine.image.task import GroupKey
from diffserve.runtime.unet.random_rows import random_rows
from diffserve.settings.config import EngineConfig

DEFAULT_ARMS = ARMS[:5]
ONE_STEP = 1 << 20
"""Divides every number of steps down to one."""


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def open_arms(model: str, device: str, dtype: str, max_rows: int) -> tuple[Engine, PipelineArm]:
    """Load the engine and diffusers' pipeline for "embedded", a model of random weights, or a directory."""
    config = EngineConfig(max_rows=max_rows or None, max_waiting=4096)
    say(f"loading {model}")
    with directory_of(model, device, dtype) as directory:
        path = model if model == "embedded" else directory
        engine = Engine.from_pretrained(path, device=device, dtype=dtype, config=config)
        return engine, PipelineArm.load(directory, engine.model)


def run_rung(
    arms: dict[str, Paint], engine: Engine, rung: str, *, rounds: int, copies: int, serial_copies: int, divisor: int
) -> dict[str, Any]:
    """Run one rung of the ladder: every arm ``rounds`` times in alternating order, after a warm-up of each."""
    sizes = engine.info.good_sizes
    runs: dict[str, list[Run]] = {name: [] for name in arms}

    def run(name: str, round_index: int, divisor: int) -> Run:
        number = serial_copies if name.startswith("serial") else copies
        groups = batches(rung, sizes, copies=number, round_index=round_index, step_divisor=divisor)
        return arms[name](groups, round_index)

    for name in arms:
        say(f"{rung:10} warm-up {name}")
        run(name, -1, ONE_STEP)
    for round_index in range(rounds):
        for name in arms if round_index % 2 == 0 else reversed(arms):
            runs[name].append(run(name, round_index, divisor))
            say(f"{rung:10} round {round_index} {name:15} {runs[name][-1].images_per_s:8.3f} images/s")
    rates = {name: [result.images_per_s for result in runs[name]] for name in arms}
    ratios = {
        f"engine_over_{name}": summary(
            [
                engine_rate / baseline_rate
                for engine_rate, baseline_rate in zip(rates["engine"], rates[name], strict=True)
            ]
        )
        for name in arms
        if name != "engine"
    }
    return {
        "rung": rung,
        "images_per_run": {name: runs[name][0].images for name in arms},
        "images_per_s": {name: summary(rates[name]) for name in arms},
        **ratios,
        "rows_per_call": mean_rows(engine),
    }


def mean_rows(engine: Engine) -> float:
    """Return the mean rows per UNet call without padding, over the engine's tick history."""
    calls = [call for tick in engine.trace for call in tick.calls]
    return round(sum(len(call.rows) for call in calls) / max(1, len(calls)), 2)


def main(
    model: Annotated[
        str, typer.Option(help=f"Model: embedded, {', '.join(NAMES)}, or a diffusers directory.")
    ] = "embedded",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32, bfloat16 or float16.")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Smoke test: few images, one round, first and last rung.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds per arm.")] = 3,
    copies: Annotated[
        int, typer.Option(help="Requests of each of the sixteen kinds; also the size of the static batch.")
    ] = 8,
    serial_copies: Annotated[
        int, typer.Option(help="Requests of each kind in the serial arm; its rate does not depend on them.")
    ] = 2,
    max_rows: Annotated[int, typer.Option(help="Rows per tick; 0: the engine chooses.")] = 0,
    divisor: Annotated[int, typer.Option(min=1, help="Divisor of the steps of every kind (4, 10, 20, 50).")] = 1,
    arms: Annotated[str, typer.Option(help=f"Comma-separated arms: {', '.join(ARMS)}.")] = ",".join(DEFAULT_ARMS),
    rungs: Annotated[str, typer.Option(help="Comma-separated rungs of the optimization ladder.")] = ",".join(RUNGS),
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    if quick:
        rounds, copies, serial_copies, divisor = 1, 2, 1, max(5, divisor)
    if unknown := [name for name in arms.split(",") if name not in ARMS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: no such arm; there are {', '.join(ARMS)}.")
    if unknown := [rung for rung in rungs.split(",") if rung not in RUNGS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: no such rung; there are {', '.join(RUNGS)}.")
    climbed = [rung for rung in rungs.split(",") if not quick or rung in ("same", "+guidance")]
    engine, arm = open_arms(model, device, dtype, max_rows)
    if not torch.cuda.is_available():
        say("no GPU on this machine: these are CPU figures")
    document = head("engine", Path(model).name, engine.info)
    path = out or default_path(document)
    settle(engine)
    width_px, height_px = engine.info.good_sizes[0]
    group = next(iter(engine.buckets))
    document["settings"] = {
        "rounds": rounds,
        "copies": copies,
        "steps_divided_by": divisor,
        "deterministic": engine.is_deterministic,
        "buckets": list(engine.buckets[group]),
        "native_size": [width_px, height_px],
        "compiled_sizes": compiled_sizes(engine),
    }
    painters = make_arms(list(dict.fromkeys(["engine", *arms.split(",")])), engine, arm, batch=copies)
    document["settings"]["left_out"] = [name for name in arms.split(",") if name not in painters]
    document["cost_curve"] = curve(engine, group, repeats=2 if quick else 7, most_rows=8 if quick else 32)
    write(document, path)
    document["ladder"] = []
    for rung in climbed:
        document["ladder"].append(
            run_rung(painters, engine, rung, rounds=rounds, copies=copies, serial_copies=serial_copies, divisor=divisor)
        )
        write(document, path)
    sample = [
        group[0]
        for group in batches("+guidance", engine.info.good_sizes, copies=1, round_index=99, step_divisor=divisor)
    ]
    document["exactness"] = exactness(engine, arm, sample[:4] if quick else sample[::2])
    if "engine-eager" in painters:
        document["exactness_eager"] = exactness(eager(engine), arm, sample[::4])
    write(document, path)
    print(json.dumps(document))


def curve(engine: Engine, group: GroupKey, *, repeats: int, most_rows: int) -> dict[str, Any]:
    """Measure the cost curve at the native size."""
    with torch.inference_mode():
        measured = measure_cost_curve(
            engine.model, random_rows(engine.model, group.shape, most_rows), repeats=repeats, most_rows=most_rows
        )
    for point in measured["points"]:
        say(f"{point['rows']:3} rows {point['ms']:9.2f} ms {point['ms_per_row']:8.2f} ms/row")
    return measured


if __name__ == "__main__":
    typer.run(main)

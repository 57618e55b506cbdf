"""Engine benchmark: the cost curve c(rows), and the heterogeneity ladder against diffusers' own pipeline.

    python benchmarks/bench_engine.py --model embedded
    python benchmarks/bench_engine.py --model sd15-random --device cuda --dtype bfloat16

Three arms with the same weights and precision: diffusers behind a lock, diffusers in static batches of equal requests,
and the engine on the shuffled mixture. Arms are interleaved (serial, static, engine, engine, static, serial, ...), each
ratio is of two runs of the same round; a small warm-up of every arm comes first and is not counted. Progress goes to
stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.arms import PipelineArm, Run, exactness, run_engine
from benchmarks.cost_curve import measure_cost_curve
from benchmarks.random_models import NAMES, save_random_model
from benchmarks.report import default_path, head, summary, write
from benchmarks.workload import RUNGS, batches, shuffled
from diffserve.config import EngineConfig
from diffserve.engine import Engine
from diffserve.engine.image.task import GroupKey
from diffserve.runtime import choose_device
from diffserve.runtime.model import EMBEDDED_DIRECTORY
from diffserve.runtime.unet.random_rows import random_rows

ARMS = ("serial", "static", "engine")


def say(text: str) -> None:
    """Progress for eyes."""
    print(text, file=sys.stderr, flush=True)


def open_arms(model: str, device: str, dtype: str, max_rows: int) -> tuple[Engine, PipelineArm]:
    """The engine and diffusers' pipeline on "embedded", a model of random weights, or a directory."""
    config = EngineConfig(max_rows=max_rows or None, max_waiting=4096)
    with tempfile.TemporaryDirectory() as scratch:
        directory = EMBEDDED_DIRECTORY if model == "embedded" else Path(model)
        if model in NAMES:
            say(f"making {model}")
            directory = save_random_model(model, Path(scratch), dtype=choose_device(device, dtype).compute_dtype)
        path = model if model == "embedded" else str(directory)
        engine = Engine.from_pretrained(path, device=device, dtype=dtype, config=config)
        return engine, PipelineArm(directory, engine.model)


def run_rung(
    engine: Engine, arm: PipelineArm, rung: str, *, rounds: int, copies: int, serial_copies: int, divisor: int
) -> dict[str, Any]:
    """One rung of the ladder: every arm ``rounds`` times, interleaved, after one small warm-up of each."""
    sizes = engine.info.good_sizes
    runs: dict[str, list[Run]] = {name: [] for name in ARMS}

    def run(name: str, round_index: int, few: int | None = None) -> Run:
        number = few or (serial_copies if name == "serial" else copies)
        groups = batches(rung, sizes, copies=number, round_index=round_index, step_divisor=divisor)
        if name == "serial":
            return arm.serial(shuffled(groups, round_index))
        return arm.static(groups, copies) if name == "static" else run_engine(engine, shuffled(groups, round_index))

    for name in ARMS:
        run(name, -1, few=1)
    for round_index in range(rounds):
        for name in ARMS if round_index % 2 == 0 else reversed(ARMS):
            runs[name].append(run(name, round_index))
            say(f"{rung:10} round {round_index} {name:7} {runs[name][-1].images_per_s:8.3f} images/s")
    rates = {name: [one.images_per_s for one in runs[name]] for name in ARMS}
    return {
        "rung": rung,
        "images_per_run": {name: runs[name][0].images for name in ARMS},
        "images_per_s": {name: summary(rates[name]) for name in ARMS},
        "engine_over_serial": summary(
            [ours / theirs for ours, theirs in zip(rates["engine"], rates["serial"], strict=True)]
        ),
        "engine_over_static": summary(
            [ours / theirs for ours, theirs in zip(rates["engine"], rates["static"], strict=True)]
        ),
        "rows_per_call": mean_rows(engine),
    }


def mean_rows(engine: Engine) -> float:
    """Rows in a UNet call, padding left out, over the ticks the engine remembers."""
    calls = [call for tick in engine.trace for call in tick.calls]
    return round(sum(len(call.rows) for call in calls) / max(1, len(calls)), 2)


def main(
    model: Annotated[str, typer.Option(help=f"embedded, {', '.join(NAMES)}, or a diffusers directory.")] = "embedded",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run: few images, one round, first and last rung.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of every arm.")] = 3,
    copies: Annotated[int, typer.Option(help="Requests of each of the sixteen kinds; also the static batch.")] = 8,
    serial_copies: Annotated[
        int, typer.Option(help="The same for the serial arm, whose rate does not depend on it.")
    ] = 2,
    max_rows: Annotated[int, typer.Option(help="Rows in a tick; 0: the engine's own choice.")] = 0,
    rungs: Annotated[str, typer.Option(help="Rungs of the ladder to climb, with commas.")] = ",".join(RUNGS),
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    divisor = 5 if quick else 1
    if quick:
        rounds, copies, serial_copies = 1, 2, 1
    if unknown := [rung for rung in rungs.split(",") if rung not in RUNGS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: no such rung; there are {', '.join(RUNGS)}.")
    climbed = [rung for rung in rungs.split(",") if not quick or rung in ("same", "+guidance")]
    engine, arm = open_arms(model, device, dtype, max_rows)
    if not torch.cuda.is_available():
        say("no GPU on this machine: these are CPU figures")
    document = head("engine", Path(model).name, engine.info)
    path = out or default_path(document)
    engine.warm_up()
    width_px, height_px = engine.info.good_sizes[0]
    group = next(iter(engine.buckets))
    document["settings"] = {
        "rounds": rounds,
        "copies": copies,
        "steps_divided_by": divisor,
        "deterministic": engine.is_deterministic,
        "buckets": list(engine.buckets[group]),
        "native_size": [width_px, height_px],
    }
    document["cost_curve"] = curve(engine, group, repeats=2 if quick else 7, most_rows=8 if quick else 32)
    write(document, path)
    document["ladder"] = []
    for rung in climbed:
        document["ladder"].append(
            run_rung(engine, arm, rung, rounds=rounds, copies=copies, serial_copies=serial_copies, divisor=divisor)
        )
        write(document, path)
    sample = [
        group[0]
        for group in batches("+guidance", engine.info.good_sizes, copies=1, round_index=99, step_divisor=divisor)
    ]
    document["exactness"] = exactness(engine, arm, sample[:4] if quick else sample[::2])
    write(document, path)
    print(json.dumps(document))


def curve(engine: Engine, group: GroupKey, *, repeats: int, most_rows: int) -> dict[str, Any]:
    """The cost curve at the native size."""
    with torch.inference_mode():
        measured = measure_cost_curve(
            engine.model, random_rows(engine.model, group.shape, most_rows), repeats=repeats, most_rows=most_rows
        )
    for point in measured["points"]:
        say(f"{point['rows']:3} rows {point['ms']:9.2f} ms {point['ms_per_row']:8.2f} ms/row")
    return measured


if __name__ == "__main__":
    typer.run(main)

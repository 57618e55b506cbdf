"""Everything that is owed by a CUDA GPU, in one run of nine minutes: what runs at all, how fast, and how exactly.

    python benchmarks/gpu_suite.py
    python benchmarks/gpu_suite.py --models embedded --device cpu --quick

Wants torch, diffserve's requirements and this tree, and nothing from anywhere else: weights are random, of the
published shapes. Points are made in order of worth until the time is up; each stands in the JSON as soon as it is made,
and one that fails stands there with its error while the next begins. For every model and precision: the cost curve
(D1), everything mixed against diffusers' own pipeline behind a lock and in static batches (D2, D4), exactness (D9),
recorded and compiled calls, what a tick leaves in memory (D8), and how long requests take that come by themselves at
0.9 of the rate of which the engine is capable (D3). On a Hopper float8 comes last, of our engine alone. The second
command is the dry run, on any machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.arms import PipelineArm, exactness, make_arms
from benchmarks.bench_engine import curve, open_arms, run_rung, say
from benchmarks.open_loop import quantile
from benchmarks.painted_trace import run
from benchmarks.random_models import directory_of
from benchmarks.report import RESULTS, hardware, versions, write
from benchmarks.trace import Recorded, at_poisson_times
from benchmarks.workload import batches
from diffserve.config import EngineConfig
from diffserve.disk_cache import DiskCache
from diffserve.engine import Engine
from diffserve.engine.image.compiling import compile_group
from diffserve.experiments import provenance
from diffserve.runtime.unet.compiled import CompiledUNet, Packages
from diffserve.runtime.unet.graphs import CallGraphs, CudaRecord
from diffserve.runtime.unet.random_rows import random_call, random_rows

MODELS = "sd15-random,sdxl-random"
DTYPES = "float16,bfloat16"
FLOAT8 = "float8"
HOPPER = (9, 0)
SERVED_STEPS = 20
SERVED_LOAD = 0.9
COMPILED_ROWS = (2, 8)
NO_GPU = 3
RAN_INTO_ERRORS = 1


class Suite:
    """The document, the clock, and what went wrong."""

    def __init__(self, path: Path, seconds: float, device: str) -> None:
        self.path = path
        self._until_s = time.monotonic() + seconds
        self.document: dict[str, Any] = {
            "benchmark": "gpu_suite",
            "date": provenance.now(),
            "command": " ".join(["python", "benchmarks/gpu_suite.py", *sys.argv[1:]]),
            "hardware": hardware(device),
            "versions": versions(),
            "points": [],
            "left_out": [],
        }

    def point(self, name: str, measure: Callable[[], Any]) -> Any:
        """What ``measure`` gives, which is kept as ``name``; ``None`` where it failed or the time was up before."""
        if time.monotonic() >= self._until_s:
            self.document["left_out"].append(name)
            write(self.document, self.path)
            return None
        say(f"{name} ...")
        started_s = time.monotonic()
        kept: dict[str, Any] = {"point": name}
        found = None
        try:
            found = measure()
            kept["found"] = found if isinstance(found, (dict, list, str, int, float)) else "done"
        except Exception as error:
            kept["error"] = "".join(traceback.format_exception(error))[-4000:]
            say(f"{name} failed: {type(error).__name__}: {error}")
        kept["wall_s"] = round(time.monotonic() - started_s, 1)
        self.document["points"].append(kept)
        write(self.document, self.path)
        return found

    @property
    def num_errors(self) -> int:
        """Points that failed."""
        return sum("error" in point for point in self.document["points"])


def measure_model(suite: Suite, model: str, device: str, dtype: str, *, quick: bool) -> None:
    """Every point of one model in one precision."""
    name = f"{Path(model).name} {dtype}"
    opened: tuple[Engine, PipelineArm] | None = suite.point(f"{name}: load", lambda: open_arms(model, device, dtype, 0))
    if opened is None:
        return
    engine, arm = opened
    if suite.point(f"{name}: warm-up", lambda: warmed(engine)) is None:
        return
    group = next(iter(engine.buckets))
    most_rows, repeats = (2, 1) if quick else (16, 5)
    suite.point(f"{name}: D1 cost curve", lambda: curve(engine, group, repeats=repeats, most_rows=most_rows))
    divisor, copies = (20, 1) if quick else (2, 2)
    arms = make_arms(("engine", "serial", "static"), engine, arm, batch=copies)
    rungs = ("+guidance",) if quick else ("+guidance", "same")
    for rung in rungs:
        suite.point(
            f"{name}: D4 {rung}",
            lambda: run_rung(arms, engine, rung, rounds=1, copies=copies, serial_copies=1, divisor=divisor),  # noqa: B023
        )
    sample = [
        kind[0] for kind in batches("+guidance", engine.info.good_sizes, copies=1, round_index=99, step_divisor=divisor)
    ]
    suite.point(f"{name}: D9 exactness", lambda: exactness(engine, arm, sample[: 2 if quick else 4]))
    suite.point(f"{name}: D3 served", lambda: served(engine, quick=quick))
    suite.point(f"{name}: D8 memory", lambda: memory(engine))
    if engine.model.device.type == "cuda":
        suite.point(f"{name}: recorded calls", lambda: recorded(engine, (1, most_rows), repeats=repeats))
    if not quick:  # it takes a minute a row count
        suite.point(f"{name}: compiled calls", lambda: compiled(engine, COMPILED_ROWS, repeats=repeats))


def measure_alone(suite: Suite, model: str, device: str, dtype: str, *, quick: bool) -> None:
    """What there is to measure in a precision that diffusers has not."""
    name = f"{Path(model).name} {dtype}"

    def load() -> Engine:
        with directory_of(model, device, dtype) as directory:
            path = model if model == "embedded" else directory
            return Engine.from_pretrained(path, device=device, dtype=dtype, config=EngineConfig(max_waiting=4096))

    engine: Engine | None = suite.point(f"{name}: load", load)
    if engine is None or suite.point(f"{name}: warm-up", lambda: warmed(engine)) is None:
        return
    group = next(iter(engine.buckets))
    most_rows, repeats = (2, 1) if quick else (16, 5)
    suite.point(f"{name}: D1 cost curve", lambda: curve(engine, group, repeats=repeats, most_rows=most_rows))
    suite.point(f"{name}: D3 served", lambda: served(engine, quick=quick))
    suite.point(f"{name}: D8 memory", lambda: memory(engine))


class RealTime:
    """The engine's own clock; where nothing is to do, time passes."""

    def __call__(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def skip_to(self, until_s: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, until_s - self()))


def served(engine: Engine, *, quick: bool) -> dict[str, Any]:
    """Guided pictures of the native size, all at once for the rate, then at Poisson times at ``SERVED_LOAD`` of it."""
    width_px, height_px = engine.info.good_sizes[0]
    count, num_steps = (3, 2) if quick else (32, SERVED_STEPS)
    requests = [
        Recorded(
            arrival_s=0.0,
            num_steps=num_steps,
            sampler="euler",
            guidance_scale=7.5,
            width_px=width_px,
            height_px=height_px,
            seed=seed,
        )
        for seed in range(count)
    ]
    clock = RealTime()
    began_s = clock()
    run(engine, clock, requests)
    rate_per_s = count / (clock() - began_s)
    found = run(engine, clock, at_poisson_times(requests, SERVED_LOAD * rate_per_s, seed=1))
    latencies = [one.latency_s for one in found.served if one.latency_s is not None]
    return {
        "images": count,
        "num_steps": num_steps,
        "offline_images_per_s": round(rate_per_s, 3),
        "load": SERVED_LOAD,
        "p50_s": round(quantile(latencies, 0.5), 3),
        "p99_s": round(quantile(latencies, 0.99), 3),
    }


def warmed(engine: Engine) -> dict[str, Any]:
    """Seconds until the first picture could be painted, and the sizes of call that are used."""
    started_s = time.monotonic()
    engine.warm_up()
    while engine.study():
        pass
    sizes = next(iter(engine.buckets.values()))
    return {"seconds": round(time.monotonic() - started_s, 2), "rows_of_calls": list(sizes)}


def memory(engine: Engine) -> dict[str, Any]:
    """Bytes of weights, and the most that the device held since the model was loaded."""
    on_gpu = engine.model.device.type == "cuda"
    return {
        "weights_bytes": engine.info.weights_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(engine.model.device) if on_gpu else None,
    }


def in_turns(
    arms: dict[str, Callable[[range], torch.Tensor]], num_rows: int, repeats: int
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The least ms a row of each arm, one call of each after the other, and what each gave before the clock ran."""
    rows = range(num_rows)
    outputs = {name: predict(rows) for name, predict in arms.items()}
    row_ms = dict.fromkeys(arms, float("inf"))
    for _ in range(repeats):
        for name, predict in arms.items():
            began_s = time.perf_counter()
            predict(rows)
            row_ms[name] = min(row_ms[name], round(1e3 * (time.perf_counter() - began_s) / num_rows, 3))
    return row_ms, outputs


def recorded(engine: Engine, sizes: tuple[int, ...], *, repeats: int) -> list[dict[str, Any]]:
    """The network's own calls against recordings of them (CUDA graphs), in turns: ms a row, bytes, and memory."""
    model, conditioner = engine.model, engine.runners.conditioner
    shape = next(iter(engine.buckets)).shape
    graphs = CallGraphs(CudaRecord(model.device))
    found = []
    for num_rows in sizes:
        arms = {
            "network": random_rows(model, shape, num_rows, conditioner),
            "recorded": random_rows(
                model,
                shape,
                num_rows,
                conditioner,
                compiled=lambda call: graphs.run(call, model.unet.plain, is_compiled=False),
            ),
        }
        row_ms, outputs = in_turns(arms, num_rows, repeats)
        found.append(
            {
                "rows": num_rows,
                "row_ms": row_ms,
                "network_over_recorded": round(row_ms["network"] / row_ms["recorded"], 3),
                "same_bytes": torch.equal(outputs["network"], outputs["recorded"]),
                "is_recorded": not graphs.is_off,
                "held_bytes": graphs.num_bytes,
            }
        )
    return found


@torch.inference_mode()
def compiled(engine: Engine, sizes: tuple[int, ...], *, repeats: int) -> list[dict[str, Any]]:
    """Compiled calls against the network's own, in turns: ms a row, and how far they are apart."""
    model, conditioner = engine.model, engine.runners.conditioner
    group = next(iter(engine.buckets))
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        packages = Packages(model, DiskCache(Path(scratch)))
        for num_rows in sizes:
            started_s = time.monotonic()
            compile_group(model, conditioner, packages, group, (num_rows,))
            compile_s = time.monotonic() - started_s
            calls = CompiledUNet(packages)
            calls.load(random_call(model, group.shape, 1, conditioner).kind, (num_rows,))
            arms = {
                "network": random_rows(model, group.shape, num_rows, conditioner),
                "compiled": random_rows(model, group.shape, num_rows, conditioner, compiled=calls.run),
            }
            row_ms, outputs = in_turns(arms, num_rows, repeats)
            difference = (outputs["compiled"] - outputs["network"]).norm() / outputs["network"].norm()
            found.append(
                {
                    "rows": num_rows,
                    "compile_s": round(compile_s, 1),
                    "row_ms": row_ms,
                    "network_over_compiled": round(row_ms["network"] / row_ms["compiled"], 3),
                    "relative_difference": float(difference),
                }
            )
    return found


def main(
    models: Annotated[str, typer.Option(help="sd15-random, sdxl-random, ..., embedded or a folder.")] = MODELS,
    dtypes: Annotated[str, typer.Option(help="Precisions, with commas.")] = DTYPES,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu for a dry run.")] = "cuda",
    minutes: Annotated[float, typer.Option(help="After so long no further point begins.")] = 9.0,
    quick: Annotated[bool, typer.Option("--quick", help="Few rows, few steps, nothing compiled: does it run?")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Measure; the last line of stdout is the document. Exit code 1 where a point failed, 3 where there is no GPU."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        say("there is no CUDA GPU on this machine, so nothing was measured; --device cpu --quick is a dry run.")
        raise typer.Exit(NO_GPU)
    path = out or RESULTS / f"gpu-suite-{device.replace(':', '')}-{provenance.now()[:10]}.json"
    suite = Suite(path, 60.0 * minutes, device)
    if device.startswith("cuda") and dtypes == DTYPES and torch.cuda.get_device_capability(device) >= HOPPER:
        dtypes += f",{FLOAT8}"
    for model in models.split(","):
        for dtype in dtypes.split(","):
            measure = measure_alone if dtype == FLOAT8 else measure_model
            measure(suite, model, device, dtype, quick=quick)
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    write(suite.document, suite.path)
    print(json.dumps(suite.document))
    raise typer.Exit(RAN_INTO_ERRORS if suite.num_errors else 0)


if __name__ == "__main__":
    typer.run(main)

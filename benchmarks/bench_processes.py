"""Processes benchmark: one single-threaded engine per core, against one engine on all cores.

    python benchmarks/bench_processes.py
    python benchmarks/bench_processes.py --rounds 3 --requests 8 --model /models/sd15

Two arms of processes that load, warm up and wait: ``one`` engine with a thread per core, and ``many`` engines of one
thread. They alternate on the same mixed requests, sent at once and split evenly (images per second until the last is
done), and on a single image, which one engine of ``many`` generates while the others wait. Each ratio compares two runs
of one round. Requests are split differently every round, and images must have the same bytes on every engine of an arm;
one thread and several may round differently, so the number of equal images between arms is reported. Progress goes to
stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arm_process import ArmProcess

PROMPT = "a fox next to a cactus"


def serve(model: str, threads: int, steps: int, compile_: str) -> None:
    """Run as an engine process: each line of input lists request numbers, or is ``null`` for a single image."""
    import torch

    from diffserve.runtime.loading.library_imports import import_lean

    import_lean()  # as the engine's own process does
    from benchmarks.arms import compiled_sizes, settle
    from benchmarks.report import head
    from benchmarks.trace import mixed
    from diffserve.api.types import DiffusionParams, GenerationRequest
    from diffserve.engine import Engine
    from diffserve.settings.config import EngineConfig

    torch.set_num_threads(threads)
    config = EngineConfig(threads=threads, max_waiting=4096, compile=compile_)  # type: ignore[arg-type]
    engine = Engine.from_pretrained(model, config=config)
    settle(engine)
    alone = GenerationRequest(prompt=PROMPT, seed=1, diffusion=DiffusionParams(num_steps=steps, guidance_scale=3.0))
    engine.generate(alone)
    about = {"compiled": bool(compiled_sizes(engine)), "weights_bytes": engine.info.weights_bytes}
    print(json.dumps(head("processes", Path(model).name, engine.info) | {"engine": about}), flush=True)
    for line in sys.stdin:
        numbers: list[int] | None = json.loads(line)
        if numbers is None:
            requests = [alone]
        else:
            drawn = mixed(max(numbers, default=0) + 1, engine.info.good_sizes[:1], seed=3)
            requests = [drawn[number].request(f"{number} {time.monotonic_ns()}") for number in numbers]
        started_s = time.perf_counter()
        results = engine.generate(requests)
        taken_s = time.perf_counter() - started_s
        digests = [hashlib.sha256(result.picture.data).hexdigest() for result in results]
        print(json.dumps({"s": taken_s, "digests": digests}), flush=True)


def saturated(processes: Sequence[ArmProcess], num_requests: int, dealer: int) -> tuple[float, list[str]]:
    """Run requests 0 to ``num_requests``, split from ``dealer`` on; return images per second and ordered digests."""
    hands = [
        list(range((dealer + place) % len(processes), num_requests, len(processes))) for place in range(len(processes))
    ]
    started_s = time.perf_counter()
    for process, hand in zip(processes, hands, strict=True):
        process.say(hand)
    digests = [""] * num_requests
    for process, hand in zip(processes, hands, strict=True):
        for number, digest in zip(hand, process.answer()["digests"], strict=True):
            digests[number] = digest
    return num_requests / (time.perf_counter() - started_s), digests


def measure(arms: dict[str, list[ArmProcess]], rounds: int, num_requests: int) -> dict[str, Any]:
    """Measure both arms in turns, after an uncounted turn of each."""
    from benchmarks.report import summary

    rates: dict[str, list[float]] = {name: [] for name in arms}
    alone_s: dict[str, list[float]] = {name: [] for name in arms}
    painted: dict[str, list[list[str]]] = {name: [] for name in arms}
    for number in range(-1, rounds):
        for name in arms if number % 2 == 0 else reversed(arms):
            rate, digests = saturated(arms[name], num_requests if number >= 0 else len(arms["many"]), number)
            single = arms[name][number % len(arms[name])].ask(None)
            if number < 0:
                continue
            rates[name].append(rate)
            alone_s[name].append(single["s"])
            painted[name].append([*digests, *single["digests"]])
            print(f"{number} {name:5} {rate:.3f} pictures/s, alone {single['s']:.2f} s", file=sys.stderr, flush=True)
    return {
        "pictures_per_s": {name: summary(each) for name, each in rates.items()},
        "alone_s": {name: summary(each) for name, each in alone_s.items()},
        "many_over_one": {
            "pictures_per_s": summary([a / b for a, b in zip(rates["many"], rates["one"], strict=True)]),
            "alone_s": summary([a / b for a, b in zip(alone_s["many"], alone_s["one"], strict=True)]),
        },
        "pictures_equal_in_all_rounds": {name: equal(*each) for name, each in painted.items()},
        "pictures_equal_in_both_arms": equal(painted["one"][0], painted["many"][0]),
    }


def equal(*runs: Sequence[str]) -> str:
    """Count the digests that are equal in all ``runs``."""
    same = [len(set(digests)) == 1 for digests in zip(*runs, strict=True)]
    return f"{sum(same)} of {len(same)}"


def main(
    model: Annotated[str, typer.Option(help="Model: embedded, or a diffusers directory.")] = "embedded",
    cores: Annotated[
        int, typer.Option(help="Threads of the single engine, and number of engines; 0: number of cores.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per arm.")] = 3,
    requests: Annotated[int, typer.Option(min=2, help="Mixed requests per round.")] = 24,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps of the single image.")] = 25,
    compile_: Annotated[str, typer.Option("--compile", help="[engine] compile: warm or off.")] = "warm",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
    serve_threads: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    if serve_threads:
        serve(model, serve_threads, steps, compile_)
        return
    from benchmarks.report import default_path, write

    num_cores = cores or os.cpu_count() or 1
    arms: dict[str, list[ArmProcess]] = {"one": [], "many": []}
    with ExitStack() as stack:
        for name, threads in [("one", num_cores)] + [("many", 1)] * num_cores:
            options = ["--model", model, "--steps", str(steps), "--compile", compile_, "--serve-threads", str(threads)]
            arms[name].append(ArmProcess([__file__, *options]))
            stack.callback(arms[name][-1].close)
        document = dict(arms["one"][0].about)
        document["command"] = " ".join(
            f"python benchmarks/bench_processes.py --model {Path(model).name} --cores {num_cores} --rounds {rounds} "
            f"--requests {requests} --steps {steps} --compile {compile_}".split()
        )
        document["engines"] = {name: [process.about["engine"] for process in each] for name, each in arms.items()}
        del document["engine"]
        document.update(measure(arms, rounds, requests))
        write(document, out or default_path(document))
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

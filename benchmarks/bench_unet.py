"""UNet benchmark: ms per row by number of rows, for the served package, eager torch, Inductor, OpenVINO, onnxruntime.

    python benchmarks/bench_unet.py
    python benchmarks/bench_unet.py --rows 1,2 --arms torch,ours,openvino-bf16 --rounds 2

The arms alternate and reverse their order in every second round, so that other work on the machine affects all of them;
a turn is one uncounted call and the median of ``--calls``. Every figure comes with the largest relative error of a row
(2-norm) against the network in float32, and with whether a row has the same bytes as in the smallest call. An arm that
cannot run is reported with the reason; build times are reported separately. The engine uses the packages of
``diffserve warm``. Progress goes to stderr, one JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.random_models import NAMES, directory_of
from benchmarks.report import default_path, head, summary, write
from benchmarks.unet_peers import ARMS, OURS, Absent, Peers, Predict
from diffserve.engine import Engine
from diffserve.runtime.threads import computing_on
from diffserve.settings.config import EngineConfig

GOAL = "ours at most 1.1 of openvino-bf16"


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def relative_error(output: Tensor, reference: Tensor) -> float:
    """Return the largest relative error of a row, the 2-norm of the difference over that of ``reference``."""
    difference = (output - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
    return float(difference.max())


def in_turns(arms: dict[str, Predict], num_rows: int, *, rounds: int, calls: int) -> dict[str, list[float]]:
    """Measure the milliseconds per row of every arm, one reading a round."""
    row_ms: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in arms if number % 2 == 0 else reversed(arms):
            arms[name]()  # what the arm before left in the caches is its own affair
            taken = []
            for _ in range(calls):
                started_s = time.perf_counter()
                arms[name]()
                taken.append(1e3 * (time.perf_counter() - started_s) / num_rows)
            row_ms[name].append(statistics.median(taken))
    return row_ms


def measure(peers: Peers, names: list[str], num_rows: int, first: dict[str, Tensor], **turns: int) -> dict[str, Any]:
    """Measure one point: every arm that runs with ``num_rows`` rows; ``first`` is their output of the smallest call."""
    arms: dict[str, Predict] = {}
    point: dict[str, Any] = {"rows": num_rows, "arms": {}, "left_out": {}}
    reference = peers.reference(num_rows)
    for name in names:
        started_s = time.perf_counter()
        try:
            arms[name] = peers.make(name, num_rows)
            output = arms[name]()
        except Exception as error:  # a compiler of others, say: the rest is measured all the same
            arms.pop(name, None)
            reason = str(error) if isinstance(error, Absent) else f"{type(error).__name__}: {error}".splitlines()[0]
            point["left_out"][name] = reason
            say(f"{num_rows:3} rows {name:16} left out: {reason}")
            continue
        made_s = time.perf_counter() - started_s
        first.setdefault(name, output)
        point["arms"][name] = {
            "precision": ARMS[name].precision or str(peers.model.dtype).removeprefix("torch."),
            "calls_of": peers.calls(name, num_rows),
            "made_in_s": round(made_s, 1),
            "relative_error": relative_error(output, reference),
            "bytes_equal_to_smallest_call": torch.equal(output[: len(first[name])], first[name]),
        }
        say(f"{num_rows:3} rows {name:16} made in {made_s:.1f} s")
    row_ms = in_turns(arms, num_rows, **turns)
    engine_arm = next((name for name in OURS if name in row_ms), None)
    for name, arm in point["arms"].items():
        arm["row_ms"] = summary(row_ms[name])
        if engine_arm is not None and name not in OURS:
            arm["ours_over_it"] = summary([a / b for a, b in zip(row_ms[engine_arm], row_ms[name], strict=True)])
        say(f"{num_rows:3} rows {name:16} {arm['row_ms']['median']:8.2f} ms a row")
    return {**point, "ours": engine_arm}


def main(
    model: Annotated[
        str, typer.Option(help=f"Model: embedded, {', '.join(NAMES)}, or a diffusers directory.")
    ] = "embedded",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision of all arms: auto, float32, bfloat16 or float16.")] = "auto",
    rows: Annotated[str, typer.Option(help="Comma-separated rows per call.")] = "1,2,4,8,16",
    arms: Annotated[str, typer.Option(help="Comma-separated arms.")] = ",".join(ARMS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per arm.")] = 5,
    calls: Annotated[int, typer.Option(min=1, help="Measured calls per round.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads per call in every arm; 0: the default of torch.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    names, numbers = arms.split(","), sorted(map(int, rows.split(",")))
    if unknown := [name for name in names if name not in ARMS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: no such arm; there are {', '.join(ARMS)}.")
    num_threads = threads or torch.get_num_threads()
    with computing_on(num_threads), directory_of(model, device, dtype) as directory:
        name = model if model == "embedded" else directory
        engine = Engine.from_pretrained(name, device=device, dtype=dtype, config=EngineConfig())
        engine.warm_up()
        torch.set_num_threads(num_threads)
        document = head("unet", Path(model).name, engine.info)
        path = out or default_path(document)
        peers = Peers(engine, directory, num_threads=num_threads, most_rows=numbers[-1])
        document["settings"] = {"rounds": rounds, "calls": calls, "threads": num_threads}
        document["settings"]["pixels_and_tokens"] = list(peers.group.shape)
        document["goal"] = GOAL
        document["points"] = []
        first: dict[str, Tensor] = {}
        for num_rows in numbers:
            document["points"].append(measure(peers, names, num_rows, first, rounds=rounds, calls=calls))
            write(document, path)
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

"""Split guidance: one guided picture by two processes against the same picture by one, on as many threads each.

    python benchmarks/bench_split_guidance.py
    python benchmarks/bench_split_guidance.py --model tiny-random --side-px 64 --dtype float32 --pairs 2

In turns (ABBA), on ``threads`` of the processor each: two devices of a kind, where there are cores enough for both.
Told are milliseconds a step of either, bytes that went to the second device in the first step of a picture (texts among
them) and in each of the others, and whether the pictures are the same bytes. One JSON document to stdout and to
results/.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.random_models import NAMES, save_random_model
from benchmarks.report import RESULTS, head, summary, write
from diffserve.config import EngineConfig
from diffserve.engine import Engine
from diffserve.runtime import load_model
from diffserve.types import DiffusionParams, GenerationRequest, Painted, Progress


def paint(engine: Engine, seed: int, steps: int, side_px: int) -> tuple[dict[str, float], bytes]:
    """A guided picture of a text that is new: what was measured, and its bytes."""
    second = engine.runners.second
    params = DiffusionParams(sampler="ddim", num_steps=steps, guidance_scale=5.0)
    request = GenerationRequest(
        prompt=f"a fox {seed}", seed=seed, width_px=side_px, height_px=side_px, diffusion=params
    )
    times_s, sent, picture = list[float](), [0 if second is None else second.sent_bytes], b""
    for event in engine.stream(request):
        if isinstance(event, Progress):
            times_s.append(time.perf_counter())
            sent.append(0 if second is None else second.sent_bytes)
        elif isinstance(event, Painted):
            picture = event.result.picture.data
    step_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    first, *later = (after - before for before, after in pairwise(sent))
    # of most steps: texts go again where the rows are told to fill a call of another size
    return {"ms_per_step": 1e3 * step_s, "first_bytes": first, "later_bytes": median_low(later)}, picture


def main(
    model: Annotated[str, typer.Option(help=f"{', '.join(NAMES)}, embedded or a directory.")] = "embedded",
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "auto",
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    second: Annotated[str, typer.Option(help="The other one.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Of the processor, of each process.")] = 1,
    side_px: Annotated[int, typer.Option(help="Side of the pictures.")] = 128,
    steps: Annotated[int, typer.Option(help="Of every picture.")] = 10,
    pairs: Annotated[int, typer.Option(help="Runs of each arm.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_random_model(model, Path(folder), dtype=torch.float32)) if model in NAMES else model
        loaded = load_model(path, dtype=dtype, device=device)
        configs = {
            name: EngineConfig(threads=threads, split_guidance=two) for name, two in (("one", ""), ("two", second))
        }
        engines = {name: Engine(loaded, config) for name, config in configs.items()}
        for engine in engines.values():
            group = engine.runners.group_of_short_prompts(side_px, side_px)
            engine.runners.groups.learn(group)
            while engine.study():  # else calls are tried between the steps, and counted among them
                pass
        found: dict[str, list[dict[str, float]]] = {"one": [], "two": []}
        num_equal = 0
        for turn in range(-1, pairs):
            pictures = {}
            for name in ("one", "two") if turn % 2 == 0 else ("two", "one"):
                told, pictures[name] = paint(engines[name], turn + 1, steps, side_px)
                found[name] += [told] if turn >= 0 else []
                print(f"{name} {turn}: {told}", file=sys.stderr, flush=True)
            num_equal += turn >= 0 and pictures["one"] == pictures["two"]
        for engine in engines.values():
            engine.close()
    ratios = [two["ms_per_step"] / one["ms_per_step"] for one, two in zip(found["one"], found["two"], strict=True)]
    document: dict[str, Any] = head("split-guidance", Path(model).name, loaded.info)
    document |= {"threads": threads, "second": second, "side_px": side_px, "steps": steps}
    document["ms_per_step"] = {name: summary([run["ms_per_step"] for run in runs]) for name, runs in found.items()}
    document["two_over_one"] = summary(ratios)
    document |= {name: found["two"][-1][name] for name in ("first_bytes", "later_bytes")}
    document["same_bytes"] = [num_equal, pairs]
    info = document["model"]
    name = f"split-guidance-{info['id']}-{info['device'].replace(':', '')}-{info['dtype']}-{document['date'][:10]}"
    write(document, out or RESULTS / f"{name}.json")
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

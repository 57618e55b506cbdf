"""Precision benchmark: the cost of a UNet row and the size of the weights in each precision.

    python benchmarks/bench_precision.py
    python benchmarks/bench_precision.py --names float32,int8_static --rows 2,8 --rounds 9

Arms alternate call by call, so that other work on the machine affects all of them; results are the median of the
rounds, with minimum and maximum. ``diffserve sweep --gate`` measures image quality. The last line of stdout is one JSON
document.
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

from diffserve.experiments import provenance
from diffserve.runtime import load_model
from diffserve.runtime.unet.random_rows import random_inputs

NAMES = "float32,bfloat16,int8,int8_dynamic,int8_static"


def main(
    model: Annotated[str, typer.Option(help="model: embedded, or a diffusers directory")] = "embedded",
    names: Annotated[str, typer.Option(help="comma-separated precisions")] = NAMES,
    rows: Annotated[str, typer.Option(help="comma-separated rows per call")] = "2,8",
    rounds: int = 7,
    threads: Annotated[int, typer.Option(help="threads; 0: the default of torch")] = 0,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    if threads:
        torch.set_num_threads(threads)
    models = {name: load_model(model, dtype=name) for name in names.split(",")}
    readings = []
    for num_rows in map(int, rows.split(",")):
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for number in range(rounds + 1):  # the first warms up
            for name, loaded in models.items():
                size = (*loaded.info.good_sizes[0][::-1], loaded.text.window_tokens)
                inputs: dict[str, Any] = random_inputs(loaded, size, num_rows)
                started_s = time.perf_counter()
                loaded.unet.predict(**inputs).cpu()  # a device is done when it is there
                if number:
                    seconds[name].append(1000 * (time.perf_counter() - started_s) / num_rows)
        for name, each in seconds.items():
            reading = {"precision": name, "rows": num_rows, "row_ms": statistics.median(each)}
            readings.append(reading | {"least_ms": min(each), "most_ms": max(each)})
            spread = f"{min(each):.2f} to {max(each):.2f}"
            print(f"{name:>14}  {num_rows:>3} rows  {statistics.median(each):7.2f} ms a row ({spread})")
    unets = {
        name: next(part.weights_bytes for part in loaded.memory_report() if part.component == "unet")
        for name, loaded in models.items()
    }
    about = {"machine": provenance.machine(), "versions": provenance.versions(), "threads": torch.get_num_threads()}
    print(json.dumps({"model": model, "unet_bytes": unets, "readings": readings, **about, "date": provenance.now()}))


if __name__ == "__main__":
    typer.run(main)

"""Preview benchmark: the cost of a live preview against the VAE's decode of the same latents, and its fidelity.

    python benchmarks/bench_preview.py --model embedded
    python benchmarks/bench_preview.py --model /models/sd15 --device cuda

Both run from latents on the device to pixels on the CPU, in turns, so that other work on the machine affects both; each
time is a median, and a ratio is of two medians. Fidelity is measured on the embedded model's held-out scenes for every
model. One JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.report import RESULTS, head, summary, write
from diffserve.runtime import DiffusionModel, load_model
from diffserve.training.eval.parts import giga_operations, preview_db

BATCHES = (1, 8)
Call = Callable[[], Any]


def in_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Measure the milliseconds of every call in each of ``rounds``, after one warm-up, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(-1, rounds):
        for name in list(calls)[:: 1 if index % 2 else -1]:
            started_s = time.perf_counter()
            calls[name]()
            if index >= 0:
                times[name].append(1e3 * (time.perf_counter() - started_s))
    return times


def cost(model: DiffusionModel, latents: Tensor, rounds: int) -> dict[str, Any]:
    """Measure the cost of decodes and previews of ``latents`` (B, C, h, w), and their ratio."""
    calls: dict[str, Call] = {"vae": lambda: model.vae.decode(latents), "preview": lambda: model.preview(latents)}
    times = in_turns(calls, rounds)
    work = {name: giga_operations(call) for name, call in calls.items()}
    return {
        "pictures": len(latents),
        "ms": {name: summary(values) for name, values in times.items()},
        "gflop": work,
        "times_cheaper": round(statistics.median(times["vae"]) / statistics.median(times["preview"]), 1),
        "times_fewer_operations": round(work["vae"] / work["preview"], 1),
    }


def closeness_db(model: DiffusionModel, num_scenes: int) -> dict[str, float]:
    """Compute the PSNR in dB of previews against the VAE's decodes on held-out scenes."""
    values = preview_db(model, num_scenes)
    return {"mean": round(statistics.mean(values), 2), **summary(values)}


def main(
    model: Annotated[
        str, typer.Option(help="Model: embedded, or a diffusers directory with a preview decoder.")
    ] = "embedded",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision: auto, float32, bfloat16 or float16.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds of both decoders, after a warm-up round.")] = 21,
    num_scenes: Annotated[int, typer.Option(help="Number of held-out scenes for the error of the previews.")] = 64,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    loaded = load_model(model, device=device, dtype=dtype)
    if loaded.previewer is None:
        raise typer.BadParameter(f"{model} has no preview decoder: put one into preview/ in the model's directory.")
    info = loaded.info
    document = head("preview", Path(model).name, info)
    options = f"--device {info.device} --dtype {info.dtype} --rounds {rounds} --num-scenes {num_scenes}"
    document["command"] = f"python benchmarks/bench_preview.py --model {Path(model).name} {options}"
    width_px, height_px = info.good_sizes[0]
    shape = (info.latent_channels, height_px // info.vae_factor, width_px // info.vae_factor)
    document["size"] = [width_px, height_px]
    is_full_size = loaded.previewer.factor == info.vae_factor
    document["preview_parameters"] = sum(parameter.numel() for parameter in loaded.previewer.network.parameters())
    document["cost"] = []
    for count in BATCHES:
        latents = torch.randn((count, *shape), generator=torch.Generator().manual_seed(0)).to(loaded.device)
        document["cost"].append(cost(loaded, latents, rounds))
        print(f"{count} pictures: {document['cost'][-1]['times_cheaper']} times cheaper", file=sys.stderr, flush=True)
    document["closeness_db"] = closeness_db(loaded, num_scenes) if is_full_size else None
    day = document["date"][:10]
    name = f"preview-{document['model']['id']}-{info.device.replace(':', '')}-{info.dtype}-{day}.json"
    write(document, out or RESULTS / name)
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

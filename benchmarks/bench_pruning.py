"""What pruning the UNet costs in pictures, and what it leaves out, on the embedded model or another.

    python benchmarks/bench_pruning.py
    python benchmarks/bench_pruning.py --prompts 96 --cuts 0.17:0,0:0.25,0.34:0.5
    python benchmarks/bench_pruning.py --model /models/sd15

Each cut is heads:channels as ``diffserve prune`` takes them, written to a folder and loaded from it. Parameters, bytes
and work of a row are of a dry run. The whole model and every pruned one paint the same captions from the same seeds;
they are judged as a gate judges precisions: exact prompt match (of the embedded model), PSNR and Frechet distance to
the whole one's pictures. One JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import RESULTS, head, write
from diffserve.disk_cache import DiskCache
from diffserve.engine import Engine
from diffserve.experiments.axes import MODEL
from diffserve.experiments.gate import GateLimits, PrecisionGate, run_gate
from diffserve.experiments.plan import EngineKey, SweepPlan
from diffserve.experiments.prompts import held_out_prompts
from diffserve.runtime import load_model
from diffserve.runtime.footprint import footprint_of
from diffserve.runtime.loading.pruned import prune_directory
from diffserve.runtime.unet.pruning import Shares
from diffserve.settings.config import Settings
from diffserve.settings.layers import load_settings

WHOLE = "whole"


def cost(path: str, dtype: str, settings: Settings) -> dict[str, Any]:
    """Measure the size of the UNet at ``path`` and the time of a row at the native size."""
    footprint = footprint_of(path, dtype=dtype, config=settings.engine, profile=settings.model, rows=(1,))
    unet = next(part for part in footprint.model.memory_report() if part.component == "unet")
    return {
        "parameters": unet.num_parameters,
        "unet_bytes": unet.weights_bytes,
        "flops_a_row": footprint.steps[1].flops,
    }


def main(
    model: Annotated[str, typer.Option(help="Model: embedded, or a diffusers directory.")] = "embedded",
    prompts: Annotated[int, typer.Option(help="Number of held-out captions.")] = 48,
    cuts: Annotated[
        str, typer.Option(help="Comma-separated shares heads:channels to remove.")
    ] = "0:0.125,0.17:0,0.17:0.25,0.34:0.5",
    dtype: Annotated[str, typer.Option(help="Precision of the networks.")] = "bfloat16",
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 10,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    settings = load_settings(model=model, config=None, flags={})
    profile, name = settings.model, Path(model).name
    plan = SweepPlan(
        samplers=(profile.sampler,),
        steps=(steps,),
        guidance=(profile.guidance_scale,),
        prompts=held_out_prompts(prompts),
        num_seeds=1,
        first_seed=0,
        reference_steps=None,
    )
    with TemporaryDirectory() as folder:
        paths = {WHOLE: model}
        for cut in cuts.split(","):
            heads, channels = map(float, cut.split(":"))
            paths[cut] = str(Path(folder) / cut.replace(":", "-"))
            prune_directory(model, Path(paths[cut]), Shares(heads=heads, channels=channels))

        def open_engine(key: EngineKey) -> Engine:
            which = str(dict(key)[MODEL])
            loaded = load_model(paths[which], dtype=dtype, device="cpu", profile=profile, cache=DiskCache(None))
            print(which, file=sys.stderr, flush=True)
            return Engine(loaded)

        document = head("pruning", name, open_engine(((MODEL, WHOLE),)).info)
        document["command"] = (
            f"python benchmarks/bench_pruning.py --model {name} --prompts {prompts} --cuts {cuts} --dtype {dtype} "
            f"--steps {steps}"
        )
        gate = PrecisionGate(WHOLE, tuple(which for which in paths if which != WHOLE), axis=MODEL)
        report = run_gate(gate, plan, GateLimits(), Path(folder) / "gate", open_engine)
        document["models"] = {
            row.precision: {**cost(paths[row.precision], dtype, settings), **msgspec.to_builtins(row)}
            for row in report.rows
        }
    for result in document["models"].values():
        result.pop("engine_s")  # the models painted one after the other, not in turns
    info = document["model"]
    write(document, out or RESULTS / f"pruning-{name}-{info['device']}-{info['dtype']}-{document['date'][:10]}.json")
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

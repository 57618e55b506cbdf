"""LoRA benchmark: rows with a different adapter each against plain rows, in calls of equal size.

    python benchmarks/bench_lora.py
    python benchmarks/bench_lora.py --layers everything --rank 64
    python benchmarks/bench_lora.py --model sd15-random --side-px 128 --dtype float32 --pairs 3 --calls-alone

Requests without guidance, a row each, painted together by one engine: with as many different adapters, and with none,
in turns (ABBA), by calls that are not compiled. Seconds are those of their UNet calls, which have all rows where bytes
allow it, so that one arm is not cut up otherwise than the other; with --calls-alone those of the network's own calls.
Either way, how many of the pictures with adapters have the bytes that they have alone. One JSON document to stdout and
to results/.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any, Final

import torch
import typer
from msgspec.structs import replace
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.random_models import NAMES, lora_tensors, save_random_model
from benchmarks.report import RESULTS, head, summary, write
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.engine.image.buckets import CostCurve
from diffserve.engine.image.task import GroupKey
from diffserve.models.loras import Lora
from diffserve.runtime.low_rank import RowLoRAs, adapting
from diffserve.runtime.unet.call import UNetArguments
from diffserve.runtime.unet.random_rows import random_call
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

LAYERS: Final = {"attention": (".to_q", ".to_k", ".to_v", ".to_out.0"), "everything": ("",)}
"""What adapters change of the UNet, by the ends of its layers' names: what most trainers take, and all there is."""


def requests(count: int, steps: int, side_px: int, num_round: int, *, has_loras: bool) -> list[GenerationRequest]:
    """Return ``count`` requests of one row each; seeds depend on the round and are equal for both arms."""
    return [
        GenerationRequest(
            prompt=f"a fox {place}",
            seed=100 * num_round + place,
            width_px=side_px,
            height_px=side_px,
            diffusion=DiffusionParams(
                sampler="ddim",
                num_steps=steps,
                guidance_scale=1.0,
                loras=(Lora(f"lora{place}", 0.8),) if has_loras else (),
            ),
        )
        for place in range(count)
    ]


def run(engine: Engine, requests_to_run: Sequence[GenerationRequest]) -> dict[str, Any]:
    """Run requests together; return milliseconds a row, wall seconds, and calls by number of rows."""
    for request in requests_to_run:
        engine.submit(request)
    seconds, calls, started_s = 0.0, Counter[int](), time.perf_counter()
    while engine.has_work:
        engine.tick()
        tick = engine.last_tick
        for call in () if tick is None else tick.calls:
            seconds += call.wall_s
            calls[len(call.rows)] += 1
    num_rows = sum(size * count for size, count in calls.items())
    return {"ms_per_row": 1e3 * seconds / num_rows, "wall_s": time.perf_counter() - started_s, "calls": dict(calls)}


def measure(engine: Engine, rows: int, steps: int, side_px: int, pairs: int) -> dict[str, Any]:
    """Measure both arms in turns, ``pairs`` times each, after an uncounted run of each."""
    arms: dict[str, list[dict[str, Any]]] = {"plain": [], "loras": []}
    for turn in range(-1, pairs):
        for name in ("plain", "loras") if turn % 2 == 0 else ("loras", "plain"):
            result = run(engine, requests(rows, steps, side_px, turn + 1, has_loras=name == "loras"))
            if turn >= 0:
                arms[name].append(result)
            print(f"{name} {turn}: {result}", file=sys.stderr, flush=True)
    ratios = [
        run_result["ms_per_row"] / plain["ms_per_row"]
        for run_result, plain in zip(arms["loras"], arms["plain"], strict=True)
    ]
    return {
        "calls": {name: runs[-1]["calls"] for name, runs in arms.items()},
        "ms_per_row": {name: summary([run_result["ms_per_row"] for run_result in runs]) for name, runs in arms.items()},
        "wall_s": {name: summary([run_result["wall_s"] for run_result in runs]) for name, runs in arms.items()},
        "loras_over_plain": of_pairs(ratios),
    }


def of_pairs(ratios: Sequence[float]) -> dict[str, float]:
    """Summarize ratios, with their quartiles."""
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
    return summary(ratios) | {"lower_quartile": round(low, 4), "upper_quartile": round(high, 4)}


def measure_calls(engine: Engine, group: GroupKey, rows: int, pairs: int) -> dict[str, Any]:
    """Measure the network's own calls of ``rows`` random rows of ``group`` with and without adapters, in turns."""
    call = random_call(engine.model, group.shape, rows, engine.runners.conditioner)
    loras = RowLoRAs([engine.runners.loras.take([Lora(f"lora{place}", 0.8)]) for place in range(rows)])

    arms = {
        name: partial(call_network, engine, call, rows_loras)
        for name, rows_loras in (("plain", None), ("loras", loras))
    }
    return {"stacked_bytes": loras.num_bytes, **compare_calls(arms, rows, pairs)}


def call_network(engine: Engine, call: UNetArguments, loras: RowLoRAs | None = None) -> None:
    """Make one call of the network, with adapters if there are any."""
    with torch.inference_mode(), adapting(loras):
        engine.model.unet.plain(call)
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)


def compare_calls(arms: Mapping[str, Callable[[], object]], rows: int, pairs: int) -> dict[str, Any]:
    """Time calls of ``rows`` rows in turns, those of the arm "plain" and of another one.

    CPU time is reported in addition to wall time, for shared machines.
    """
    [other] = set(arms) - {"plain"}
    ms_by_arm: dict[str, list[list[float]]] = {"plain": [], other: []}
    for turn in range(-1, pairs):
        for name in ("plain", other) if turn % 2 == 0 else (other, "plain"):
            started_s = time.perf_counter(), time.process_time()
            arms[name]()
            taken_s = [time.perf_counter() - started_s[0], time.process_time() - started_s[1]]
            if turn >= 0:
                ms_by_arm[name].append([1e3 * each / rows for each in taken_s])
            print(f"{name} {turn}: {taken_s} s", file=sys.stderr, flush=True)
    document: dict[str, Any] = {}
    for place, suffix in enumerate(("", "_cpu_time")):
        plain, adapted = ([milliseconds[place] for milliseconds in ms_by_arm[name]] for name in ("plain", other))
        document[f"ms_per_row{suffix}"] = {"plain": summary(plain), other: summary(adapted)}
        ratios = [milliseconds / plain_ms for milliseconds, plain_ms in zip(adapted, plain, strict=True)]
        document[f"{other}_over_plain{suffix}"] = of_pairs(ratios)
    return document


def same_bytes(engine: Engine, rows: int, side_px: int) -> int:
    """Count the images with adapters that have the same bytes as when generated alone."""
    batch = requests(rows, 2, side_px, 50, has_loras=True)
    alone = [engine.generate(replace(request, request_id=f"alone-{request.seed}"))[0] for request in batch]
    return sum(result.picture == other.picture for result, other in zip(engine.generate(batch), alone, strict=True))


def pin(engine: Engine, group: GroupKey, size: int) -> None:
    """Force calls of ``group`` to ``size`` rows where batch invariance allows, regardless of measured costs."""
    groups = engine.runners.groups
    if size in groups.facts_of(group).curve.buckets:
        groups._facts_by_group[group] = groups.facts_of(group)._replace(curve=CostCurve((size,)))


def learn_sizes(engine: Engine, groups: dict[str, GroupKey], rows: int) -> dict[str, tuple[int, ...]]:
    """Sizes of calls that bytes allow, by the names of ``groups``; from then on they are called with ``rows``."""
    buckets = {}
    for name, group in groups.items():
        engine.runners.groups.learn(group)
        buckets[name] = engine.buckets[group]
        pin(engine, group, rows)
    return buckets


def main(
    model: Annotated[str, typer.Option(help=f"Model: {', '.join(NAMES)}, embedded or a directory.")] = "embedded",
    dtype: Annotated[str, typer.Option(help="Precision of the model.")] = "auto",
    device: Annotated[str, typer.Option(help="Torch device.")] = "auto",
    side_px: Annotated[int, typer.Option(help="Image side in pixels.")] = 128,
    rows: Annotated[int, typer.Option(help="Number of requests, each with its own adapter.")] = 8,
    rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 16,
    layers: Annotated[str, typer.Option(help=f"Layers that the adapters change: {' or '.join(LAYERS)}.")] = "attention",
    steps: Annotated[int, typer.Option(help="Denoising steps per image.")] = 10,
    pairs: Annotated[int, typer.Option(help="Runs per arm.")] = 5,
    calls_alone: Annotated[
        bool, typer.Option(help="Only measure UNet calls; engines on a CPU run large UNets row by row.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_random_model(model, Path(folder), dtype=torch.float32)) if model in NAMES else model
        adapters = Path(folder) / "loras"
        adapters.mkdir()
        profile = replace(
            load_settings(model=path, env={}).model, lora_dir=str(adapters), model_id=Path(model).name, probe=False
        )
        engine = Engine.from_pretrained(
            path, dtype=dtype, device=device, config=EngineConfig(compile="off"), profile=profile
        )
        for place in range(rows):
            tensors = lora_tensors(engine.model, LAYERS[layers], place, rank, of_texts=False)
            save_file(tensors, adapters / f"lora{place}.safetensors")
        group = engine.runners.group_of_short_prompts(side_px, side_px)
        document = head("lora", Path(model).name, engine.info)
        document |= {"rows": rows, "rank": rank, "layers": layers, "side_px": side_px}
        document["adapter_bytes"] = (adapters / "lora0.safetensors").stat().st_size
        [checked] = {engine.runners.loras.check([Lora(f"lora{place}")]).rank for place in range(rows)}
        document["padded_rank"] = checked
        if not calls_alone:
            document["buckets"] = learn_sizes(
                engine, {"plain": group, "loras": group._replace(lora_rank=checked)}, rows
            )
        document["same_bytes_as_alone"] = [same_bytes(engine, rows, side_px), rows]
        if calls_alone:
            document |= measure_calls(engine, group, rows, pairs)
        else:
            document |= measure(engine, rows, steps, side_px, pairs)
        info = document["model"]
        name = f"lora-{info['id']}-{info['device'].replace(':', '')}-{info['dtype']}-{layers}-{rank}"
        name += "-calls" * calls_alone
        write(document, out or RESULTS / f"{name}-{document['date'][:10]}.json")
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

"""Reference benchmark: rows with a different reference image each against plain rows, in calls of equal size.

    python benchmarks/bench_references.py
    python benchmarks/bench_references.py --kind base --dtype float32

Calls of the network with as many rows as references, each row with another one, and calls with none, in turns (ABBA),
in wall and CPU time. They are not compiled; calls with references never are. Then requests without guidance, a row
each, painted together by one engine, the same way. Also counted: images with references that have the bytes of solo
runs. The IP-Adapter and its small image encoder have random weights. One JSON document to stdout and to results/.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from msgspec.structs import replace
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_lora import call_network, compare_calls, learn_sizes, of_pairs, run
from benchmarks.random_models import NAMES, adapter_tensors, save_image_encoder, save_random_model
from benchmarks.report import RESULTS, head, summary, write
from diffserve.api.types import DiffusionParams, GenerationRequest, Picture
from diffserve.engine import Engine
from diffserve.engine.image.task import GroupKey
from diffserve.models.references import Reference
from diffserve.runtime.unet.cross_attention import KeysValues
from diffserve.runtime.unet.random_rows import random_call
from diffserve.settings.config import EngineConfig
from diffserve.settings.layers import load_settings

TOKENS: Final = {"base": 4, "plus": 16}
"""Image tokens of the published adapters, by kind."""


def requests(count: int, steps: int, side_px: int, num_round: int, *, has_references: bool) -> list[GenerationRequest]:
    """Return ``count`` requests of one row each; seeds depend on the round and are equal for both arms."""
    return [
        GenerationRequest(
            prompt=f"a fox {place}",
            seed=100 * num_round + place,
            width_px=side_px,
            height_px=side_px,
            reference_images=(image(place),) if has_references else (),
            diffusion=DiffusionParams(
                sampler="ddim",
                num_steps=steps,
                guidance_scale=1.0,
                references=(Reference("adapter", 0.8),) if has_references else (),
            ),
        )
        for place in range(count)
    ]


def image(seed: int) -> Picture:
    """Return large squares of random colors, 64 x 64 pixels."""
    squares = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Picture.from_array(squares.repeat(8, 0).repeat(8, 1))


def measure(engine: Engine, rows: int, steps: int, side_px: int, pairs: int) -> dict[str, Any]:
    """Measure both arms in turns, ``pairs`` times each, after an uncounted run of each."""
    arms: dict[str, list[dict[str, Any]]] = {"plain": [], "references": []}
    for turn in range(-1, pairs):
        for name in sorted(arms, reverse=turn % 2 == 1):
            result = run(engine, requests(rows, steps, side_px, turn + 1, has_references=name == "references"))
            if turn >= 0:
                arms[name].append(result)
            print(f"{name} {turn}: {result}", file=sys.stderr, flush=True)
    document: dict[str, Any] = {"calls": {name: runs[-1]["calls"] for name, runs in arms.items()}}
    for key in ("ms_per_row", "wall_s"):
        document[key] = {name: summary([each[key] for each in runs]) for name, runs in arms.items()}
    pairs_of_runs = zip(arms["references"], arms["plain"], strict=True)
    ratios = [referenced["ms_per_row"] / plain["ms_per_row"] for referenced, plain in pairs_of_runs]
    return document | {"references_over_plain": of_pairs(ratios)}


def measure_calls(engine: Engine, group: GroupKey, rows: int, pairs: int) -> dict[str, Any]:
    """Measure the network's own calls of ``rows`` random rows of ``group`` with and without references, in turns."""
    conditioner, batch = engine.runners.conditioner, requests(rows, 1, 64, 0, has_references=True)
    references = [request.diffusion.references[0] for request in batch]
    read = engine.runners.references.begin(references, [request.reference_images[0] for request in batch]).result()
    conditioning = conditioner.condition("a", None, width_px=group.width_px, height_px=group.height_px)
    opened = conditioner.open_references([(each, 0.8) for each in read], conditioning, is_guided=False)
    images = conditioner.image_parts([[reference.row(is_uncond=False)] for reference in opened])
    call = random_call(engine.model, group.shape, rows, conditioner)
    assert isinstance(call.contexts, KeysValues)
    with_images = call._replace(contexts=dataclasses.replace(call.contexts, images=images))
    arms = {name: partial(call_network, engine, each) for name, each in (("plain", call), ("references", with_images))}
    document = compare_calls(arms, rows, pairs)
    for part in (conditioning, *opened):
        part.close()
    return document


def same_bytes(engine: Engine, rows: int, side_px: int) -> int:
    """Count the images with references that have the same bytes as when generated alone."""
    batch = requests(rows, 2, side_px, 50, has_references=True)
    alone = [engine.generate(replace(request, request_id=f"alone-{request.seed}"))[0] for request in batch]
    return sum(result.picture == other.picture for result, other in zip(engine.generate(batch), alone, strict=True))


def main(
    model: Annotated[str, typer.Option(help=f"Model: {', '.join(NAMES)}, embedded or a directory.")] = "embedded",
    dtype: Annotated[str, typer.Option(help="Precision of the model.")] = "auto",
    device: Annotated[str, typer.Option(help="Torch device.")] = "auto",
    side_px: Annotated[int, typer.Option(help="Image side in pixels.")] = 128,
    rows: Annotated[int, typer.Option(help="Number of requests, each with its own reference.")] = 8,
    kind: Annotated[str, typer.Option(help=f"Kind of the IP-Adapter: {' or '.join(TOKENS)}.")] = "plus",
    steps: Annotated[int, typer.Option(help="Denoising steps per image.")] = 10,
    pairs: Annotated[int, typer.Option(help="Runs per arm.")] = 5,
    calls: Annotated[int, typer.Option(help="Calls of the network per arm.")] = 40,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_random_model(model, Path(folder), dtype=torch.float32)) if model in NAMES else model
        adapters = Path(folder) / "references"
        save_image_encoder(adapters / "image_encoder")
        profile = replace(
            load_settings(model=path, env={}).model, reference_dir=str(adapters), model_id=Path(model).name, probe=False
        )
        engine = Engine.from_pretrained(
            path, dtype=dtype, device=device, config=EngineConfig(compile="off"), profile=profile
        )
        tensors = adapter_tensors(engine.model.unet.network, kind, 1, TOKENS[kind])
        save_file(tensors, adapters / "adapter.safetensors")
        document = head("references", Path(model).name, engine.info)
        document |= {"rows": rows, "kind": kind, "num_tokens": TOKENS[kind], "side_px": side_px}
        group = engine.runners.group_of_short_prompts(side_px, side_px)
        document["buckets"] = learn_sizes(engine, {"plain": group}, rows)
        document["same_bytes_as_alone"] = [same_bytes(engine, rows, side_px), rows]
        document["call"] = measure_calls(engine, group, rows, calls)
        document |= measure(engine, rows, steps, side_px, pairs)
        info = document["model"]
        name = f"references-{info['id']}-{info['device'].replace(':', '')}-{info['dtype']}-{kind}"
        write(document, out or RESULTS / f"{name}-{document['date'][:10]}.json")
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

"""DeepCache benchmark: steps per second of a mixed batch with and without ``cache_interval``, and its quality cost.

    python benchmarks/bench_deep_cache.py
    python benchmarks/bench_deep_cache.py --model sdxl-random --side-px 512 --dtype float32 --pairs 3
    python benchmarks/bench_deep_cache.py --prompts 0                        # speed alone
    python benchmarks/bench_deep_cache.py --model embedded --pairs 0         # quality alone

Speed: ``images`` requests of different samplers, guidance and step counts, the same in both arms, painted with
``cache_interval`` N and with 1 in turns (ABBA), by one engine. Steps a second are steps of all images over the seconds
of their UNet calls; ``wall_s`` is all of it, with texts and decoding, which are the same in both arms. Rows are counted
by kind of call. Quality: the embedded model paints held-out captions from fixed seeds with every interval;
the checker says how many are right in everything, and PSNR is to the picture that the same seed gives without. One JSON
document to stdout and to results/.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.random_models import NAMES, save_random_model
from benchmarks.report import RESULTS, head, summary, write
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageFinished
from diffserve.engine import Engine
from diffserve.experiments.metrics.fidelity import psnr_db
from diffserve.experiments.prompts import match_prompts
from diffserve.settings.config import EngineConfig
from diffserve.training.eval.captions import TEACHER, paint
from diffserve.world.captions import held_out

KINDS = (("ddim", 5.0, 0), ("dpmpp_2m", 7.5, 1), ("euler_a", 1.0, 2), ("unipc", 5.0, 3))
"""Sampler, guidance scale, and how many steps more than the least."""

QUALITY_SEED = 9_000


def requests(count: int, steps: int, side_px: int, interval: int, num_round: int) -> list[GenerationRequest]:
    """Return ``count`` requests that share only their size; seeds depend on the round and are equal for both arms."""
    result = []
    for place in range(count):
        sampler, scale, further = KINDS[place % len(KINDS)]
        params = DiffusionParams(
            sampler=sampler, num_steps=steps + further, guidance_scale=scale, cache_interval=interval
        )
        result.append(
            GenerationRequest(
                prompt=f"a fox {place}",
                seed=100 * num_round + place,
                width_px=side_px,
                height_px=side_px,
                diffusion=params,
            )
        )
    return result


def run(engine: Engine, requests_to_run: Sequence[GenerationRequest]) -> dict[str, Any]:
    """Run requests together; return steps per second, seconds of UNet ticks, and rows by kind of call."""
    ids = [engine.submit(request) for request in requests_to_run]
    events = []
    seconds, rows, started_s = 0.0, Counter[str](), time.perf_counter()
    while engine.has_work:
        events += engine.tick()
        tick = engine.last_tick
        if tick is None:
            continue
        seconds += sum(call.wall_s for call in tick.calls)
        for call in tick.calls:
            rows["shallow" if call.is_shallow else "full"] += len(call.rows)
    painted = [event for event in events if isinstance(event, ImageFinished)]
    if len(painted) != len(ids):
        raise RuntimeError(f"{len(painted)} of {len(ids)} images were painted")
    wall_s = time.perf_counter() - started_s
    steps = sum(request.diffusion.num_steps or 0 for request in requests_to_run)
    return {"steps_per_s": steps / seconds, "unet_s": seconds, "wall_s": wall_s, "rows": dict(rows)}


def measure_speed(engine: Engine, images: int, steps: int, side_px: int, interval: int, pairs: int) -> dict[str, Any]:
    """Measure both arms in turns, ``pairs`` times each, after an uncounted run of each."""
    arms: dict[str, list[dict[str, Any]]] = {"off": [], "cached": []}
    intervals = {"off": 1, "cached": interval}
    for name in arms:
        run(engine, requests(1, 2, side_px, intervals[name], 0))
    for turn in range(pairs):
        for name in ("off", "cached") if turn % 2 == 0 else ("cached", "off"):
            arms[name].append(run(engine, requests(images, steps, side_px, intervals[name], turn + 1)))
            print(f"{name} {turn}: {arms[name][-1]}", file=sys.stderr, flush=True)
    ratios = [
        cached["steps_per_s"] / off["steps_per_s"] for cached, off in zip(arms["cached"], arms["off"], strict=True)
    ]
    return {
        "cache_interval": interval,
        "images": images,
        "least_steps": steps,
        "side_px": side_px,
        "shallow_share_by_weights": engine.info.shallow_share,
        "rows": {name: runs[0]["rows"] for name, runs in arms.items()},
        "steps_per_s": {name: summary([result["steps_per_s"] for result in runs]) for name, runs in arms.items()},
        "wall_s": {name: summary([result["wall_s"] for result in runs]) for name, runs in arms.items()},
        "cached_over_off": summary(ratios),
    }


def same_bytes(engine: Engine, images: int, side_px: int, interval: int) -> int:
    """Count the images of a mixed batch that have equal bytes in reverse order of arrival."""
    forwards = engine.generate(requests(images, 2, side_px, interval, 50))
    backwards = engine.generate(requests(images, 2, side_px, interval, 50)[::-1])[::-1]
    return sum(first.picture == second.picture for first, second in zip(forwards, backwards, strict=True))


def measure_quality(engine: Engine, num_prompts: int, intervals: Sequence[int]) -> list[dict[str, Any]]:
    """Measure the quality at each interval; the first row is without the cache."""
    scenes, prompts = zip(*held_out(num_prompts), strict=True)
    exact_pictures = None
    lines = []
    ways: list[dict[str, Any]] = [{"cache_interval": interval} for interval in (1, *intervals)]
    for way in ways:
        pictures = paint(engine, prompts, replace(TEACHER, **way), first_seed=QUALITY_SEED)
        exact_pictures = pictures if exact_pictures is None else exact_pictures
        matches = match_prompts(pictures, scenes).exact
        distances = [psnr_db(image, reference) for image, reference in zip(pictures, exact_pictures, strict=True)]
        line: dict[str, Any] = {**way, "pictures": matches.count, "exact": matches.hits}
        line["exact_from_to"] = [round(matches.low, 4), round(matches.high, 4)]
        if way != ways[0]:
            line["psnr_db_to_off"] = summary(distances)
        print(line, file=sys.stderr, flush=True)
        lines.append(line)
    return lines


def main(
    model: Annotated[
        str, typer.Option(help=f"Model for speed: {', '.join(NAMES)}, embedded or a directory.")
    ] = "sd15-random",
    dtype: Annotated[str, typer.Option(help="Precision of the model for speed.")] = "float32",
    device: Annotated[str, typer.Option(help="Torch device.")] = "auto",
    side_px: Annotated[int, typer.Option(help="Image side in pixels.")] = 128,
    images: Annotated[int, typer.Option(help="Requests in a mixed batch.")] = 2,
    steps: Annotated[int, typer.Option(help="Smallest number of steps.")] = 6,
    interval: Annotated[int, typer.Option(help="cache_interval of the faster arm.")] = 3,
    pairs: Annotated[int, typer.Option(help="Runs per arm; 0: do not measure speed.")] = 3,
    prompts: Annotated[
        int, typer.Option(help="Number of held-out captions for quality; 0: do not measure quality.")
    ] = 128,
    intervals: Annotated[str, typer.Option(help="Comma-separated values of cache_interval for quality.")] = "2,3,5",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    selected_intervals = [int(part) for part in intervals.split(",") if part]
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_random_model(model, Path(folder), dtype=getattr(torch, dtype))) if model in NAMES else model
        engine = Engine.from_pretrained(path, dtype=dtype, device=device, config=EngineConfig())
        document = head("deep_cache", Path(model).name, engine.info)
        options = f"--model {Path(model).name} --dtype {dtype} --side-px {side_px} --images {images} --steps {steps}"
        options += f" --interval {interval} --pairs {pairs} --prompts {prompts} --intervals {intervals!r}"
        document["command"] = f"python benchmarks/bench_deep_cache.py {options}"
        if pairs:
            document["speed"] = measure_speed(engine, images, steps, side_px, interval, pairs)
            document["same_bytes_in_reverse_order"] = [same_bytes(engine, images, side_px, interval), images]
        info = document["model"]
        name = f"deep-cache-{info['id']}-{info['device'].replace(':', '')}-{info['dtype']}-{document['date'][:10]}.json"
        write(document, out or RESULTS / name)
        del engine
    if prompts:
        document["quality"] = measure_quality(Engine.from_pretrained("embedded"), prompts, selected_intervals)
        write(document, out or RESULTS / name)
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

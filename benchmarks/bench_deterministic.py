"""Cost of batch invariance: an engine with it, an engine without it, and diffusers' pipeline, in turns.

    python benchmarks/bench_deterministic.py
    python benchmarks/bench_deterministic.py --model embedded --side-px 128 --images 4 --rounds 5

All arms compute with the same weights and precision. ``images`` guided pictures of equal settings, so that diffusers
may paint them in one call: seconds of each arm, texts and decoding included, and ratios within a round (ABC, CBA, ...).
A call of every arm comes first, in which the engines find out what they need, and is not counted. One JSON document to
stdout and to results/.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.arms import PipelineArm
from benchmarks.random_models import NAMES, directory_of
from benchmarks.report import default_path, head, summary, write
from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.settings.config import EngineConfig

Paint = Callable[[Sequence[GenerationRequest]], Any]


def requests(images: int, steps: int, side_px: int, num_round: int) -> list[GenerationRequest]:
    """Return ``images`` requests with equal settings; seeds depend on the round."""
    params = DiffusionParams(sampler="ddim", num_steps=steps, guidance_scale=5.0, spacing="leading")
    return [
        GenerationRequest(
            prompt=f"a fox {place}",
            seed=100 * num_round + place,
            width_px=side_px,
            height_px=side_px,
            diffusion=params,
        )
        for place in range(images)
    ]


def seconds_of(paint: Paint, requests_to_run: Sequence[GenerationRequest]) -> float:
    """Measure the seconds that ``paint`` takes for the requests."""
    started_s = time.perf_counter()
    paint(requests_to_run)
    return time.perf_counter() - started_s


def measure(paints: dict[str, Paint], images: int, steps: int, side_px: int, rounds: int) -> dict[str, Any]:
    """Measure the seconds by arm, and the ratios of the first arm to the others."""
    seconds: dict[str, list[float]] = {name: [] for name in paints}
    for name, paint in paints.items():
        print(f"{name}: {seconds_of(paint, requests(images, 2, side_px, 0)):.2f} s to begin with", file=sys.stderr)
    for turn in range(rounds):
        for name in list(paints)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(seconds_of(paints[name], requests(images, steps, side_px, turn + 1)))
            print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    first, *baselines = seconds
    ratios = {
        f"{first}_over_{name}": summary([a / b for a, b in zip(seconds[first], seconds[name], strict=True)])
        for name in baselines
    }
    return {"seconds": {name: summary(values) for name, values in seconds.items()}, **ratios}


def same_alone(engine: Engine, images: int, side_px: int) -> bool:
    """Whether the first of ``images`` images has the same bytes as when generated alone."""
    together, [alone] = (engine.generate(requests(count, 2, side_px, 99)) for count in (images, 1))
    return bool(together[0].picture == alone.picture)


def main(
    model: Annotated[
        str, typer.Option(help=f"Model: embedded, {', '.join(NAMES)}, or a diffusers directory.")
    ] = "sd15-random",
    device: str = "cpu",
    dtype: str = "bfloat16",
    side_px: int = 256,
    images: int = 2,
    steps: int = 3,
    rounds: int = 3,
    out: Path | None = None,
) -> None:
    """Measure, and write what was found."""
    with directory_of(model, device, dtype) as directory:
        path = model if model == "embedded" else directory
        exact = Engine.from_pretrained(path, device=device, dtype=dtype, config=EngineConfig(deterministic=True))
        free = Engine(exact.model, EngineConfig(deterministic=False))
        pipeline = PipelineArm.load(directory, exact.model)
    paints: dict[str, Paint] = {"deterministic": exact.generate, "free": free.generate, "diffusers": pipeline.paint}
    document = {
        **head("deterministic", model, exact.info),
        "side_px": side_px,
        "images": images,
        "steps": steps,
        "found": measure(paints, images, steps, side_px, rounds),
        "same_bytes_alone": {
            "deterministic": same_alone(exact, images, side_px),
            "free": same_alone(free, images, side_px),
        },
        "calls_of_rows": {" x ".join(map(str, group[:2])): sizes for group, sizes in exact.buckets.items()},
    }
    write(document, out or default_path(document))
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

"""Quality cost of the semantic cache and the steps it saves, on the embedded model.

    python benchmarks/bench_latent_cache.py
    python benchmarks/bench_latent_cache.py --prompts 96 --thresholds 0.95,0.9,0.8

Held-out captions are generated from noise, and with every threshold from a cache that holds one related image of each:
in turns the same scene in other words, the scene with another object, the scene on another background. The checker
counts the exact images in total, among results that started from a cached image, and for the same captions from noise;
by relation and by skipped steps. One JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import replace as with_fields

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import RESULTS, head, write
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageResult
from diffserve.engine import Engine
from diffserve.engine.image.caches import LatentCache
from diffserve.settings.config import EngineConfig
from diffserve.training.eval.captions import TEACHER
from diffserve.world.captions import caption, held_out
from diffserve.world.checker import check
from diffserve.world.scenes import BACKGROUNDS, OBJECTS, Scene

RELATIVES = ("other words", "other object", "other background")
FIRST_SEED, RELATIVES_SEED = 9_000, 500
ROOM = 1 << 28


class Case(NamedTuple):
    """Caption with its scene, and a related caption."""

    scene: Scene
    prompt: str
    relative: str
    relation: str


def cases(count: int) -> list[Case]:
    """Return the first ``count`` held-out captions, each with a related caption."""
    rng = random.Random(RELATIVES_SEED)
    result = []
    for place, (scene, prompt) in enumerate(held_out(count)):
        relation = RELATIVES[place % len(RELATIVES)]
        result.append(Case(scene, prompt, caption(_relative(scene, relation, rng), rng), relation))
    return result


def _relative(scene: Scene, relation: str, rng: random.Random) -> Scene:
    if relation == "other background":
        return replace(scene, background=rng.choice([name for name in BACKGROUNDS if name != scene.background]))
    if relation == "other object":
        old, new = scene.names[0], rng.choice([name for name in OBJECTS if name not in scene.names])
        replaced = (replace(placed, name=new if placed.name == old else placed.name) for placed in scene.objects)
        return replace(scene, objects=tuple(replaced))
    return scene


def paint(engine: Engine, prompts: Sequence[str], how: DiffusionParams, first_seed: int) -> list[ImageResult]:
    """Generate prompt i with seed ``first_seed`` + i."""
    return engine.generate(
        [
            GenerationRequest(prompt=prompt, seed=first_seed + place, diffusion=how)
            for place, prompt in enumerate(prompts)
        ]
    )


def filled(engine: Engine, relatives: LatentCache) -> Engine:
    """Return a new engine on the same model with the content of ``relatives``."""
    fresh = Engine(engine.model, engine.config)
    for key, entry in relatives.items():
        fresh.runners.latent_cache.put(key, entry)
    return fresh


def tally(results: Sequence[tuple[bool, bool, ImageResult]]) -> dict[str, Any]:
    """Count (correct, correct from noise, result) in total and for results that started from a cached image."""
    continued = [result for result in results if result[2].similarity is not None]
    steps = sum(result.num_steps for _, _, result in results)
    return {
        "pictures": len(results),
        "exact": sum(right for right, _, _ in results),
        "exact_from_noise": sum(right for _, right, _ in results),
        "begun": len(continued),
        "begun_exact": sum(right for right, _, _ in continued),
        "begun_exact_from_noise": sum(right for _, right, _ in continued),
        "steps_left_out": round(sum(result.skipped_steps for _, _, result in results) / steps, 4) if steps else 0.0,
    }


def main(
    prompts: Annotated[int, typer.Option(help="Number of held-out captions.")] = 48,
    thresholds: Annotated[str, typer.Option(help="Comma-separated similarity thresholds.")] = "0.95,0.9,0.8",
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    engine = Engine.from_pretrained("embedded", config=EngineConfig(latent_cache_bytes=ROOM))
    document = head("latent_cache", "embedded", engine.info)
    document["command"] = f"python benchmarks/bench_latent_cache.py --prompts {prompts} --thresholds {thresholds}"
    selected_cases = cases(prompts)
    plain = paint(engine, [case.prompt for case in selected_cases], TEACHER, FIRST_SEED)
    right = [check(result.pixels, case.scene).exact for result, case in zip(plain, selected_cases, strict=True)]
    caching = with_fields(TEACHER, similarity_threshold=1.0)
    paint(engine, [case.relative for case in selected_cases], caching, RELATIVES_SEED)
    document["exact_from_noise"] = [sum(right), len(right)]
    document["thresholds"] = {}
    for threshold in map(float, thresholds.split(",")):
        how = with_fields(TEACHER, similarity_threshold=threshold)
        results = paint(
            filled(engine, engine.runners.latent_cache), [case.prompt for case in selected_cases], how, FIRST_SEED
        )
        verdicts = [
            check(result.pixels, case.scene).exact for result, case in zip(results, selected_cases, strict=True)
        ]
        outcomes = list(zip(verdicts, right, results, strict=True))
        skips = sorted({result.skipped_steps for result in results})
        document["thresholds"][str(threshold)] = {
            "all": tally(outcomes),
            "by_relative": {
                name: tally(
                    [outcome for outcome, case in zip(outcomes, selected_cases, strict=True) if case.relation == name]
                )
                for name in RELATIVES
            },
            "by_steps_left_out": {
                str(count): tally([outcome for outcome in outcomes if outcome[2].skipped_steps == count])
                for count in skips
            },
            "similarity": [result.similarity for result in results],
        }
        print(threshold, document["thresholds"][str(threshold)]["all"], file=sys.stderr, flush=True)
        info = document["model"]
        name = f"latent-cache-embedded-{info['device']}-{info['dtype']}-{document['date'][:10]}.json"
        write(document, out or RESULTS / name)
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

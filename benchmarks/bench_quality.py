"""Quality words of a profile, compared with ``max`` on prompts that its calibration did not use.

    python benchmarks/bench_quality.py
    python benchmarks/bench_quality.py --words auto --prompts 64 --seeds 4 --rounds 20

Requests take their settings from the profile as on a server. Exact match is paired by prompt and seed, with bootstrap
intervals of 95 % over prompts. Times are of images alone: in each round every word generates the same prompt, one word
after the other, and the ratio is that of the round. One JSON document to stdout and to results/.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import default_path, head, summary, write
from diffserve.api.types import GenerationRequest, ImageFinished
from diffserve.cli.generate import open_engine
from diffserve.engine import Engine
from diffserve.experiments.intervals import bootstrap_interval
from diffserve.experiments.prompts import held_out_prompts, match_prompts
from diffserve.settings.layers import load_settings
from diffserve.settings.quality import QUALITIES, quality_points, with_quality

USED: Final = 96
"""Number of first held-out captions that a calibration may use; a search of samplers uses those from 200 on."""

BASELINE: Final = "max"


def request_of(engine: Engine, word: str, prompt: str, seed: int) -> GenerationRequest:
    """Return the request for one image of a quality word."""
    return with_quality(GenerationRequest(prompt=prompt, seed=seed), word, engine.info)[0]


def exact_matches(engine: Engine, words: Sequence[str], places: Sequence[tuple[str, int]]) -> dict[str, list[bool]]:
    """Generate an image of each place (prompt, seed) with each word, and return whether it matches its prompt."""
    keys: dict[str, tuple[str, int]] = {}
    pixels: dict[tuple[str, int], Any] = {}
    waiting = [(word, index) for index in range(len(places)) for word in words][::-1]
    while waiting or engine.has_work:
        while waiting and len(keys) - len(pixels) < engine.config.max_lanes:
            word, index = waiting.pop()
            keys[engine.submit(request_of(engine, word, *places[index]))] = word, index
        for event in engine.tick():
            if isinstance(event, ImageFinished):
                pixels[keys[event.request_id]] = event.result.pixels
    prompts = [prompt for prompt, _ in places]
    return {
        word: [
            verdict.exact for verdict in match_prompts([pixels[word, i] for i in range(len(places))], prompts).verdicts
        ]
        for word in words
    }


def main(
    words: Annotated[str, typer.Option(help="Quality words, comma-separated.")] = ",".join(QUALITIES),
    prompts: Annotated[int, typer.Option(help="Number of prompts.")] = 64,
    seeds: Annotated[int, typer.Option(help="Images per prompt.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of timed images.")] = 10,
    first_seed: Annotated[int, typer.Option(help="Seed of the first image.")] = 700_000,
    output: Annotated[Path | None, typer.Option(help="JSON document to write.")] = None,
) -> None:
    """Compare the quality words of the embedded model with max."""
    engine = open_engine(load_settings(model="embedded", env={}))
    document: dict[str, Any] = head("quality", "embedded", engine.info)
    names = [name for name in words.split(",") if name != BASELINE]
    captions = held_out_prompts(USED + prompts)[USED:]
    engine.warm_up()
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for word in (BASELINE, *names):
            timings = engine.generate(request_of(engine, word, captions[number % prompts], first_seed))[0].timings
            times[word].append(timings.denoise_s + timings.decode_s)
    places = [(prompt, first_seed + number * seeds + s) for number, prompt in enumerate(captions) for s in range(seeds)]
    exact = exact_matches(engine, [BASELINE, *names], places)
    document |= {"prompts": f"held-out captions {USED} to {USED + prompts - 1}", "seeds_per_prompt": seeds}
    document["words"] = {}
    for word in (BASELINE, *names):
        differences = [float(a) - float(b) for a, b in zip(exact[word], exact[BASELINE], strict=True)]
        low, high = bootstrap_interval(differences, [prompt for prompt, _ in places])
        document["words"][word] = {
            "point": msgspec.to_builtins(quality_points(engine.info)[word]),
            "seconds": summary(times[word]),
            "share_of_max": summary([a / b for a, b in zip(times[word], times[BASELINE], strict=True)]),
            "exact": round(statistics.fmean(exact[word]), 4),
            "exact_minus_max": {
                "mean": round(statistics.fmean(differences), 4),
                "low": round(low, 4),
                "high": round(high, 4),
            },
            "disagreements": sum(value != 0 for value in differences),
        }
    write(document, output or default_path(document))
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)

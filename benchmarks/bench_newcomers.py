"""Newcomers benchmark: what it takes to encode the texts of several requests one by one, and all together.

    python benchmarks/bench_newcomers.py --model embedded

Both ways go from new prompts to keys and values on the pages of the pool, in turns, so that whatever else the machine
does falls on both alike. The ratio is the median of the rounds' own. One JSON document to stdout and to results/.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_preview import in_turns
from benchmarks.report import RESULTS, head, summary, write
from diffserve.config import EngineConfig
from diffserve.engine.image.compiled_groups import is_deterministic
from diffserve.runtime import load_model
from diffserve.runtime.text.conditioning import PagedConditioner, make_conditioner

COLOURS = ("red", "blue", "green", "yellow", "pink", "white", "black", "orange")
THINGS = ("fox", "dog", "cat", "ball", "car", "house", "tree", "boat")


def prompts() -> Iterator[str]:
    """One that was never said before, again and again."""
    for number in itertools.count(1):
        yield from (f"a {colour} {thing} and {number} more" for colour, thing in itertools.product(COLOURS, THINGS))


def main(
    model: Annotated[str, typer.Option(help="embedded, or a diffusers directory.")] = "embedded",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    newcomers: Annotated[int, typer.Option(help="Requests that come together.", min=2)] = 8,
    rounds: Annotated[int, typer.Option(help="Turns of both, after one that is not counted.")] = 21,
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
) -> None:
    """Measure, and print one JSON document as the last line of stdout."""
    loaded, config = load_model(model, device=device, dtype=dtype), EngineConfig(cache_dir="")
    conditioner = make_conditioner(loaded, config, is_exact=is_deterministic(loaded, config))
    assert isinstance(conditioner, PagedConditioner)
    while conditioner.study():
        pass
    new, (width_px, height_px) = prompts(), loaded.info.good_sizes[0]

    def encode(*, together: bool) -> None:
        texts = [(prompt, "") for prompt in itertools.islice(new, newcomers)]
        if together:
            conditioner.make_ready(texts)
        told = [conditioner.condition(*text, width_px=width_px, height_px=height_px) for text in texts]
        conditioner.let_go()
        for one in told:
            one.close()

    ms = in_turns({"one by one": lambda: encode(together=False), "together": lambda: encode(together=True)}, rounds)
    ratios = [alone / shared for alone, shared in zip(*ms.values(), strict=True)]
    document = head("newcomers", Path(model).name, loaded.info)
    options = f"--device {loaded.info.device} --dtype {loaded.info.dtype} --newcomers {newcomers} --rounds {rounds}"
    document["command"] = f"python benchmarks/bench_newcomers.py --model {Path(model).name} {options}"
    document["windows_in_a_call"] = list(conditioner.pages.batches.sizes)
    document["ms"] = {name: summary(values) for name, values in ms.items()}
    document["times_faster"] = {"median": round(statistics.median(ratios), 2), **summary(ratios)}
    day = document["date"][:10]
    name = f"newcomers-{document['model']['id']}-{loaded.info.device.replace(':', '')}-{loaded.info.dtype}-{day}.json"
    write(document, out or RESULTS / name)
    print(json.dumps(document))


if __name__ == "__main__":
    typer.run(main)

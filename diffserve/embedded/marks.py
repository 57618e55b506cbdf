"""Mark the shipped weights: held-out captions painted through the engine and read by the exact checker.

``python -m diffserve.embedded.marks`` prints the marks as one JSON document; the model card quotes it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from diffserve.embedded.checker import Verdict, check
from diffserve.embedded.samples import held_out
from diffserve.embedded.world import COLORS, Scene
from diffserve.engine import Engine
from diffserve.types import DiffusionParams, GenerationRequest, ImageResult

SEED = 9_000
CATEGORIES = ("one object", "two objects", "left or right", "above or below", "next to", "plain colour", "place")


@dataclass(frozen=True)
class Mark:
    """How many of ``count`` pictures are right: in every part, and in each."""

    count: int
    exact: int
    background: int
    objects: int
    relation: int

    @property
    def exact_share(self) -> float:
        """Exact matches over pictures, 0..1."""
        return self.exact / self.count if self.count else 0.0


def paint_held_out(
    engine: Engine, count: int, *, sampler: str = "ddim", num_steps: int = 30, guidance_scale: float = 3.0
) -> list[tuple[Scene, ImageResult]]:
    """Paint the first ``count`` held-out captions, picture i with seed SEED + i."""
    truth = held_out(count)
    params = DiffusionParams(sampler=sampler, num_steps=num_steps, guidance_scale=guidance_scale)
    requests = [
        GenerationRequest(prompt=words, seed=SEED + index, diffusion=params) for index, (_, words) in enumerate(truth)
    ]
    results = engine.generate(requests)
    return [(scene, result) for (scene, _), result in zip(truth, results, strict=True)]


def tally(verdicts: list[Verdict]) -> Mark:
    """Count what is right in ``verdicts``."""
    return Mark(
        count=len(verdicts),
        exact=sum(v.exact for v in verdicts),
        background=sum(v.background for v in verdicts),
        objects=sum(v.objects for v in verdicts),
        relation=sum(v.relation for v in verdicts),
    )


def categories(scene: Scene) -> set[str]:
    """The rows of the table of marks that a scene counts in."""
    words = {"one object" if scene.relation is None else "two objects"}
    words |= {"left or right"} if scene.relation in ("left of", "right of") else set()
    words |= {"above or below"} if scene.relation in ("above", "below") else set()
    words |= {"next to"} if scene.relation == "next to" else set()
    return words | {"plain colour" if scene.background in COLORS else "place"}


def mark(painted: list[tuple[Scene, ImageResult]]) -> dict[str, Mark]:
    """Marks overall ("all") and by category."""
    verdicts = [(scene, check(result.pixels, scene)) for scene, result in painted]
    table = {"all": tally([verdict for _, verdict in verdicts])}
    for name in CATEGORIES:
        table[name] = tally([verdict for scene, verdict in verdicts if name in categories(scene)])
    return table


def main(
    model: Annotated[str, typer.Option(help="embedded, or a directory")] = "embedded",
    count: int = 300,
    sampler: str = "ddim",
    steps: int = 30,
    guidance: float = 3.0,
    out: Annotated[Path | None, typer.Option(help="also write the JSON here")] = None,
) -> None:
    """Paint held-out captions and print the marks."""
    engine = Engine.from_pretrained(model)
    table = mark(paint_held_out(engine, count, sampler=sampler, num_steps=steps, guidance_scale=guidance))
    document = {
        "model": engine.info.model_id,
        "digest": engine.info.digest,
        "dtype": engine.info.dtype,
        "sampler": sampler,
        "num_steps": steps,
        "guidance_scale": guidance,
        "marks": {name: asdict(row) | {"exact_share": round(row.exact_share, 4)} for name, row in table.items()},
    }
    text = json.dumps(document, indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)

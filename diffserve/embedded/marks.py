"""Mark the shipped weights: held-out captions painted through the engine and read by the exact checker.

``python -m diffserve.embedded.marks`` prints the marks as one JSON document; the model card quotes it. The student is
marked with ``--model embedded-turbo --steps 4 --guidance 1``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from diffserve.embedded.samples import held_out
from diffserve.engine import Engine
from diffserve.types import DiffusionParams, GenerationRequest, ImageResult
from diffserve.world.checker import EDITION, Verdict, check
from diffserve.world.scenes import COLORS, KIND_SHARES, OBJECTS, Scene, has_unseen_pair

SEED = 9_000
BEST_GUIDANCE = 3.0
TEACHER = DiffusionParams(sampler="dpmpp_2m_sde", num_steps=25, guidance_scale=BEST_GUIDANCE)
"""As the model is served where nothing is said: ``configs/embedded.toml``."""
STUDENT = DiffusionParams(sampler="ddim", num_steps=4, guidance_scale=1.0)
CATEGORIES = (
    *KIND_SHARES,
    "small or large",
    "left or right",
    "above or below",
    "next to",
    "seen pairs",
    "unseen pairs",
    "plain colour",
    "place",
)
DIRECTIONS = {
    "left of": "left or right",
    "right of": "left or right",
    "above": "above or below",
    "below": "above or below",
    "next to": "next to",
}
MAX_CONFUSIONS = 3
SMEAR, NOTHING = "a smear", "nothing"

Judged = tuple[Scene, Verdict]


@dataclass(frozen=True)
class Mark:
    """How many of ``count`` pictures are right: in every part, and in each."""

    count: int
    exact: int
    background: int
    objects: int
    relation: int
    size: int

    @property
    def exact_share(self) -> float:
        """Exact matches over pictures, 0..1."""
        return self.exact / self.count if self.count else 0.0


@dataclass(frozen=True)
class Confusion:
    """How often an object was asked for, how often it was found, and what was found where it was missing, the most
    frequent first: a surplus object, a smear of something, or nothing."""

    asked: int
    found: int
    instead: dict[str, int]


def paint_held_out(
    engine: Engine, count: int, how: DiffusionParams = TEACHER, *, size: tuple[int | None, int | None] = (None, None)
) -> list[tuple[Scene, ImageResult]]:
    """Paint the first ``count`` held-out captions at ``size`` (width, height; else the native one), picture i with seed
    SEED + i."""
    truth = held_out(count)
    requests = [
        GenerationRequest(prompt=words, seed=SEED + index, diffusion=how, width_px=size[0], height_px=size[1])
        for index, (_, words) in enumerate(truth)
    ]
    results = engine.generate(requests)
    return [(scene, result) for (scene, _), result in zip(truth, results, strict=True)]


def tally(verdicts: Sequence[Verdict]) -> Mark:
    """Count what is right in ``verdicts``."""
    return Mark(
        count=len(verdicts),
        exact=sum(v.exact for v in verdicts),
        background=sum(v.background for v in verdicts),
        objects=sum(v.objects for v in verdicts),
        relation=sum(v.relation for v in verdicts),
        size=sum(v.size for v in verdicts),
    )


def categories(scene: Scene) -> set[str]:
    """The rows of the table of marks that a scene counts in."""
    words = {scene.kind, "plain colour" if scene.background in COLORS else "place"}
    if scene.size != "plain":
        words.add("small or large")
    if scene.kind == "two objects" and scene.relation is not None:
        words |= {DIRECTIONS[scene.relation], "unseen pairs" if has_unseen_pair(scene) else "seen pairs"}
    return words


def judged(painted: Iterable[tuple[Scene, ImageResult]]) -> list[Judged]:
    """Each scene with the checker's verdict on its picture."""
    return [(scene, check(result.pixels, scene)) for scene, result in painted]


def mark(painted: Iterable[tuple[Scene, ImageResult]]) -> dict[str, Mark]:
    """Marks overall ("all") and by category."""
    return mark_judged(judged(painted))


def mark_judged(verdicts: Sequence[Judged]) -> dict[str, Mark]:
    """:func:`mark`, of verdicts."""
    table = {"all": tally([verdict for _, verdict in verdicts])}
    for name in CATEGORIES:
        table[name] = tally([verdict for scene, verdict in verdicts if name in categories(scene)])
    return table


def confusions(verdicts: Sequence[Judged]) -> dict[str, Confusion]:
    """For every object that was asked for, in the world's order: asked, found, and the top of what came instead."""
    asked: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    instead: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for scene, verdict in verdicts:
        wanted = Counter(scene.names)
        seen = Counter(found.name for found in verdict.reading.objects if found.is_clear)
        surplus = list((seen - wanted).elements())
        smeared = any(not found.is_clear for found in verdict.reading.objects)
        asked += wanted
        missing += wanted - seen
        for name in wanted - seen:
            instead[name].update(surplus or [SMEAR if smeared else NOTHING])
    return {
        name: Confusion(asked[name], asked[name] - missing[name], dict(instead[name].most_common(MAX_CONFUSIONS)))
        for name in OBJECTS
        if asked[name]
    }


def document(engine: Engine, verdicts: Sequence[Judged], how: DiffusionParams) -> dict[str, Any]:
    """The marks and confusions of ``verdicts`` as one JSON document, with what painted them and how."""
    return {
        "model": engine.info.model_id,
        "digest": engine.info.digest,
        "checker": EDITION,
        "dtype": engine.info.dtype,
        "sampler": how.sampler,
        "num_steps": how.num_steps,
        "guidance_scale": how.guidance_scale,
        "marks": {
            name: asdict(row) | {"exact_share": round(row.exact_share, 4)}
            for name, row in mark_judged(verdicts).items()
        },
        "confusions": {name: asdict(row) for name, row in confusions(verdicts).items()},
    }


def main(
    model: Annotated[str, typer.Option(help="embedded, embedded-turbo, or a directory")] = "embedded",
    count: int = 300,
    sampler: str = "dpmpp_2m_sde",
    steps: int = 25,
    guidance: Annotated[float, typer.Option(help="guidance scale; 1 is none")] = BEST_GUIDANCE,
    out: Annotated[Path | None, typer.Option(help="also write the JSON here")] = None,
) -> None:
    """Paint held-out captions and print the marks."""
    engine = Engine.from_pretrained(model)
    how = DiffusionParams(sampler=sampler, num_steps=steps, guidance_scale=guidance)
    text = json.dumps(document(engine, judged(paint_held_out(engine, count, how)), how), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)

"""Evaluation on held-out captions: generates them with the engine and reads the images with the exact checker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.world.captions import held_out
from diffserve.world.checker import EDITION, Verdict, check
from diffserve.world.scenes import COLORS, KIND_SHARES, OBJECTS, Scene, has_unseen_pair

BEST_GUIDANCE = 3.0
TEACHER = DiffusionParams(sampler="dpmpp_2m_sde", num_steps=25, guidance_scale=BEST_GUIDANCE)
"""Serving defaults of the model, see ``configs/embedded.toml``."""
DISTILLED = DiffusionParams(sampler="ddim", num_steps=4, guidance_scale=1.0)


def paint(
    engine: Engine,
    prompts: Sequence[str],
    how: DiffusionParams = TEACHER,
    *,
    first_seed: int = 0,
    seeds: Iterable[int] | None = None,
    negatives: Iterable[str] = repeat(""),
    size: tuple[int | None, int | None] = (None, None),
) -> list[NDArray[np.uint8]]:
    """Generate an image (height, width, 3) in uint8 for each prompt.

    Prompt i uses seed ``first_seed`` + i (or + ``seeds[i]``); ``size`` is (width, height), by default the native one.
    """
    requests = [
        GenerationRequest(
            prompt=words,
            negative_prompt=negative,
            seed=first_seed + offset,
            diffusion=how,
            width_px=size[0],
            height_px=size[1],
        )
        for words, negative, offset in zip(prompts, negatives, seeds or count(), strict=False)
    ]
    return [result.pixels for result in engine.generate(requests)]


def painter(engine: Engine) -> dict[str, Any]:
    """Return the head of every document: model and digest of its weights."""
    return {"model": engine.info.model_id, "digest": engine.info.digest}


SEED = 9_000
CATEGORIES = (
    *KIND_SHARES, "small or large", "left or right", "above or below", "next to", "seen pairs", "unseen pairs",
    "plain colour", "place",
)  # fmt: skip
DIRECTIONS = {
    "left of": "left or right", "right of": "left or right", "above": "above or below", "below": "above or below",
    "next to": "next to",
}  # fmt: skip
PARTS = ("exact", "background", "objects", "relation", "size")
MAX_CONFUSIONS = 3
SMEAR, NOTHING = "a smear", "nothing"

Judged = tuple[Scene, Verdict]


@dataclass(frozen=True)
class Score:
    """Number of correct images out of ``count``: in every part (``exact``), and in each part."""

    count: int
    exact: int
    background: int
    objects: int
    relation: int
    size: int

    @property
    def exact_share(self) -> float:
        """Exact matches divided by images, 0..1."""
        return self.exact / self.count if self.count else 0.0


@dataclass(frozen=True)
class Confusion:
    """How often an object was requested and recognized, and what appeared where it was missing.

    ``instead`` lists the most frequent first: a surplus object, a smear of something, or nothing.
    """

    requested: int
    recognized: int
    instead: dict[str, int]


def judge_held_out(
    engine: Engine, count: int, how: DiffusionParams = TEACHER, *, size: tuple[int | None, int | None] = (None, None)
) -> list[Judged]:
    """Generate the first ``count`` held-out captions, image i with seed SEED + i, and check each."""
    truth = held_out(count)
    pictures = paint(engine, [words for _, words in truth], how, first_seed=SEED, size=size)
    return [(scene, check(picture, scene)) for (scene, _), picture in zip(truth, pictures, strict=True)]


def score(judged: Sequence[Judged]) -> Score:
    """Count the correct images."""
    return Score(len(judged), *(sum(getattr(verdict, part) for _, verdict in judged) for part in PARTS))


def categories(scene: Scene) -> set[str]:
    """Return the rows of the score table in which a scene counts."""
    words = {scene.kind, "plain colour" if scene.background in COLORS else "place"}
    if scene.size != "plain":
        words.add("small or large")
    if scene.kind == "two objects" and scene.relation is not None:
        words |= {DIRECTIONS[scene.relation], "unseen pairs" if has_unseen_pair(scene) else "seen pairs"}
    return words


def scores(judged: Sequence[Judged]) -> dict[str, Score]:
    """Compute the scores overall ("all") and by category."""
    parts = {name: [item for item in judged if name in categories(item[0])] for name in CATEGORIES}
    return {name: score(part) for name, part in {"all": judged, **parts}.items()}


def confusions(judged: Sequence[Judged]) -> dict[str, Confusion]:
    """Count requests, recognitions and the most frequent substitutes of every requested object, in world order."""
    requested: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    instead: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for scene, verdict in judged:
        expected = Counter(scene.names)
        clear = Counter(detected.name for detected in verdict.reading.objects if detected.is_clear)
        surplus = list((clear - expected).elements())
        smeared = any(not detected.is_clear for detected in verdict.reading.objects)
        requested += expected
        missing += expected - clear
        for name in expected - clear:
            instead[name].update(surplus or [SMEAR if smeared else NOTHING])
    return {
        name: Confusion(
            requested[name], requested[name] - missing[name], dict(instead[name].most_common(MAX_CONFUSIONS))
        )
        for name in OBJECTS
        if requested[name]
    }


def evaluate(engine: Engine, count: int = 300, how: DiffusionParams = TEACHER) -> dict[str, Any]:
    """Compute scores and confusions on ``count`` held-out captions as one JSON document, with model and settings."""
    judged = judge_held_out(engine, count, how)
    return {
        **painter(engine),
        "checker": EDITION,
        "dtype": engine.info.dtype,
        "sampler": how.sampler,
        "num_steps": how.num_steps,
        "guidance_scale": how.guidance_scale,
        "scores": {
            name: asdict(row) | {"exact_share": round(row.exact_share, 4)} for name, row in scores(judged).items()
        },
        "confusions": {name: asdict(row) for name, row in confusions(judged).items()},
    }

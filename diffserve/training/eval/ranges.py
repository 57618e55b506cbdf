"""Evaluation over guidance scales, canvases and negative prompts.

A negative prompt is tested on what a prompt leaves open: "a fox" leaves the background open, "on the beach" the
objects. An image is generated, what it shows without being requested is named in the negative prompt, and the same seed
is generated again: it should show something else, and still what was requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, repeat
from typing import Any

import msgspec

from diffserve.engine import Engine
from diffserve.training.eval.captions import TEACHER, judge_held_out, paint, painter, score
from diffserve.world.captions import article_for, words_of_background
from diffserve.world.checker import EDITION, Reading, SceneSpec, judge, read_picture
from diffserve.world.scenes import BACKGROUNDS, OBJECTS

GUIDANCE_SCALES = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0)
OTHER_CANVASES = ((128, 192), (192, 128))
SEED = 9_500


@dataclass(frozen=True)
class KeptAway:
    """Result of ``count`` images generated again with a negative prompt.

    avoided  how many lack what the negative prompt names
    right    how many of these still show what was requested
    """

    count: int
    avoided: int
    right: int


def exact_by_guidance(engine: Engine, count: int) -> dict[str, int]:
    """Count exact matches among the first ``count`` held-out captions by guidance scale."""
    ways = {f"{scale:g}": msgspec.structs.replace(TEACHER, guidance_scale=scale) for scale in GUIDANCE_SCALES}
    return {scale: score(judge_held_out(engine, count, how)).exact for scale, how in ways.items()}


def exact_by_canvas(engine: Engine, count: int) -> dict[str, int]:
    """Count exact matches among the first ``count`` held-out captions by canvas, "WIDTHxHEIGHT"."""
    sizes = {"{}x{}".format(*size): size for size in OTHER_CANVASES}
    return {name: score(judge_held_out(engine, count, size=size)).exact for name, size in sizes.items()}


def background_kept_away(engine: Engine, count: int) -> KeptAway:
    """Test prompts of an object only; the negative prompt is the background of the first image."""
    names = list(islice(cycle(OBJECTS), count))
    prompts = [f"{article_for(name)} {name}" for name in names]
    before = _read(engine, prompts)
    after = _read(engine, prompts, [words_of_background(reading.background) for reading in before])
    avoided = [now.background != then.background for now, then in zip(after, before, strict=True)]
    right = [judge(now, SceneSpec((name,))).objects for now, name in zip(after, names, strict=True)]
    return _kept_away(avoided, right)


def objects_kept_away(engine: Engine, count: int) -> KeptAway:
    """Test prompts of a background only; the negative prompt is the first object of the first image.

    Images without objects are left out.
    """
    grounds = list(islice(cycle(BACKGROUNDS), count))
    prompts = [words_of_background(ground) for ground in grounds]
    before = _read(engine, prompts)
    unasked = {index: reading.objects[0].name for index, reading in enumerate(before) if reading.objects}
    negatives = [f"{article_for(name)} {name}" for name in unasked.values()]
    after = _read(engine, [prompts[index] for index in unasked], negatives, unasked)
    avoided = [
        name not in {detected.name for detected in now.objects}
        for now, name in zip(after, unasked.values(), strict=True)
    ]
    right = [now.background == grounds[index] for now, index in zip(after, unasked, strict=True)]
    return _kept_away(avoided, right)


def _kept_away(avoided: Sequence[bool], right: Sequence[bool]) -> KeptAway:
    return KeptAway(len(avoided), sum(avoided), sum(a and r for a, r in zip(avoided, right, strict=True)))


def _read(
    engine: Engine,
    prompts: Sequence[str],
    negatives: Iterable[str] = repeat(""),
    seeds: Iterable[int] | None = None,
) -> list[Reading]:
    pictures = paint(engine, prompts, first_seed=SEED, seeds=seeds, negatives=negatives)
    return [read_picture(picture) for picture in pictures]


def evaluate(engine: Engine, count: int = 60) -> dict[str, Any]:
    """Evaluate all ranges as one JSON document, ``count`` images a row."""
    return {
        **painter(engine),
        "checker": EDITION,
        "count": count,
        "guidance": exact_by_guidance(engine, count),
        "canvases": exact_by_canvas(engine, count),
        "background_kept_away": asdict(background_kept_away(engine, count)),
        "objects_kept_away": asdict(objects_kept_away(engine, count)),
    }

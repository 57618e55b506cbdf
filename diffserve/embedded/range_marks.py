"""Marks over the range that people move in: guidance scales, canvases, and what a negative prompt keeps away.

``python -m diffserve.embedded.range_marks`` prints them as one JSON document; the model card quotes it.

A negative prompt is put to the test where it matters, on what a prompt leaves open: "a fox" says nothing of the
background, "on the beach" nothing of the objects. The picture is painted, what it shows unasked is named in the
negative prompt, and the same seed is painted again: it should show something else, and still what was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from diffserve.embedded.marks import TEACHER, judged, paint_held_out, tally
from diffserve.engine import Engine
from diffserve.types import GenerationRequest
from diffserve.world.captions import article_for, words_of_background
from diffserve.world.checker import EDITION, Reading, SceneSpec, judge, read_picture
from diffserve.world.scenes import BACKGROUNDS, OBJECTS

GUIDANCE_SCALES = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0)
OTHER_CANVASES = ((128, 192), (192, 128))
SEED = 9_500


@dataclass(frozen=True)
class KeptAway:
    """Of ``count`` pictures painted again with a negative prompt: how many lack what it names (``avoided``), and how
    many of those still show what was asked for (``right``)."""

    count: int
    avoided: int
    right: int


def guidance_marks(engine: Engine, count: int) -> dict[str, int]:
    """Guidance scale -> exact matches among the first ``count`` held-out captions."""
    exact = {}
    for scale in GUIDANCE_SCALES:
        how = msgspec.structs.replace(TEACHER, guidance_scale=scale)
        exact[f"{scale:g}"] = tally([verdict for _, verdict in judged(paint_held_out(engine, count, how))]).exact
    return exact


def canvas_marks(engine: Engine, count: int) -> dict[str, int]:
    """ "WIDTHxHEIGHT" -> exact matches among the first ``count`` held-out captions painted at it."""
    exact = {}
    for size in OTHER_CANVASES:
        painted = paint_held_out(engine, count, size=size)
        exact["{}x{}".format(*size)] = tally([verdict for _, verdict in judged(painted)]).exact
    return exact


def background_kept_away(engine: Engine, count: int) -> KeptAway:
    """Prompts of an object alone; the negative prompt is the background that came unasked."""
    names = list(islice(cycle(OBJECTS), count))
    prompts = [f"{article_for(name)} {name}" for name in names]
    before = _read(engine, prompts, [""] * count)
    after = _read(engine, prompts, [words_of_background(reading.background) for reading in before])
    avoided = [now.background != then.background for now, then in zip(after, before, strict=True)]
    right = [judge(now, SceneSpec((name,))).objects for now, name in zip(after, names, strict=True)]
    return _kept_away(avoided, right)


def objects_kept_away(engine: Engine, count: int) -> KeptAway:
    """Prompts of a background alone; the negative prompt is the first object that came unasked. Pictures without any
    are left out."""
    grounds = list(islice(cycle(BACKGROUNDS), count))
    prompts = [words_of_background(ground) for ground in grounds]
    before = _read(engine, prompts, [""] * count)
    unasked = {index: reading.objects[0].name for index, reading in enumerate(before) if reading.objects}
    negatives = [f"{article_for(name)} {name}" for name in unasked.values()]
    after = _read(engine, [prompts[index] for index in unasked], negatives, list(unasked))
    avoided = [
        name not in {found.name for found in now.objects} for now, name in zip(after, unasked.values(), strict=True)
    ]
    right = [now.background == grounds[index] for now, index in zip(after, unasked, strict=True)]
    return _kept_away(avoided, right)


def _kept_away(avoided: Sequence[bool], right: Sequence[bool]) -> KeptAway:
    return KeptAway(len(avoided), sum(avoided), sum(a and r for a, r in zip(avoided, right, strict=True)))


def _read(
    engine: Engine, prompts: Sequence[str], negatives: Sequence[str], seeds: Sequence[int] | None = None
) -> list[Reading]:
    requests = [
        GenerationRequest(prompt=prompt, negative_prompt=negative, seed=SEED + seed, diffusion=TEACHER)
        for prompt, negative, seed in zip(prompts, negatives, seeds or range(len(prompts)), strict=True)
    ]
    return [read_picture(result.pixels) for result in engine.generate(requests)]


def document(engine: Engine, count: int) -> dict[str, Any]:
    """All of it as one JSON document, ``count`` pictures a mark."""
    return {
        "model": engine.info.model_id,
        "digest": engine.info.digest,
        "checker": EDITION,
        "count": count,
        "guidance": guidance_marks(engine, count),
        "canvases": canvas_marks(engine, count),
        "background_kept_away": asdict(background_kept_away(engine, count)),
        "objects_kept_away": asdict(objects_kept_away(engine, count)),
    }


def main(
    model: Annotated[str, typer.Option(help="embedded, or a directory")] = "embedded",
    count: int = 60,
    out: Annotated[Path | None, typer.Option(help="also write the JSON here")] = None,
) -> None:
    """Paint and print the marks."""
    text = json.dumps(document(Engine.from_pretrained(model), count), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)

"""Evaluation of the shipped adapters: gifts by the exact checker, sepia by comparison with the plain images."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffserve.api.types import DiffusionParams
from diffserve.engine import Engine
from diffserve.models.loras import Lora
from diffserve.training.adapters import GIFT, LESSONS, SEPIA, SHARES, lessons_held_out, plain_gifts
from diffserve.training.eval.captions import TEACHER, paint, painter, score
from diffserve.world.checker import EDITION, check
from diffserve.world.render import sepia
from diffserve.world.scenes import Scene

SEED = 9_700
CROWDS = {kind: share for kind, share in SHARES.items() if kind != "one object"}


def with_lora(how: DiffusionParams, name: str) -> DiffusionParams:
    """Return the parameters ``how`` with adapter ``name`` at full weight."""
    return msgspec.structs.replace(how, loras=(Lora(name),))


def gift_score(engine: Engine, requested: list[tuple[Scene, str]], how: DiffusionParams = TEACHER) -> dict[str, int]:
    """Score generated scenes with gifts by the checker.

    "read" counts the images with exactly the requested objects, clear or smeared.
    """
    pictures = paint(engine, [words for _, words in requested], with_lora(how, GIFT), first_seed=SEED)
    judged = [(scene, check(picture, scene)) for (scene, _), picture in zip(requested, pictures, strict=True)]
    read = (
        sorted(detected.name for detected in verdict.reading.objects) == sorted(scene.names)
        for scene, verdict in judged
    )
    return {**asdict(score(judged)), "read": sum(read)}


def drawn_in_sepia(engine: Engine, count: int, how: DiffusionParams = TEACHER) -> dict[str, float]:
    """Compare held-out captions with and without the sepia style, generated from the same seeds.

    Counts the images that are nearer to a sepia conversion of the plain image than to the plain image, and reports the
    mean color errors (0..1) against both.
    """
    prompts = [words for _, words in lessons_held_out(SEPIA, count)]
    plain = paint(engine, prompts, how, first_seed=SEED)
    drawn = paint(engine, prompts, with_lora(how, SEPIA), first_seed=SEED)
    to_drawing = [_error(styled, sepia(original)) for styled, original in zip(drawn, plain, strict=True)]
    to_picture = [_error(styled, original) for styled, original in zip(drawn, plain, strict=True)]
    nearer = sum(drawing < picture for drawing, picture in zip(to_drawing, to_picture, strict=True))
    return {
        "count": count,
        "nearer_to_sepia": nearer,
        "error_to_sepia": round(float(np.mean(to_drawing)), 4),
        "error_to_plain": round(float(np.mean(to_picture)), 4),
    }


def evaluate(engine: Engine, count: int = 30, how: DiffusionParams = TEACHER) -> dict[str, Any]:
    """Evaluate both adapters as one JSON document."""
    return {
        **painter(engine),
        "checker": EDITION,
        "adapters": [*LESSONS],
        "sampler": how.sampler,
        "num_steps": how.num_steps,
        "gift_alone": gift_score(engine, plain_gifts(), how),
        "gift_among_others": gift_score(engine, lessons_held_out(GIFT, count // 2, CROWDS), how),
        "sepia": drawn_in_sepia(engine, count // 3, how),
    }


def _error(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    return float(np.abs(first.astype(np.float32) - second.astype(np.float32)).mean() / 255)

"""Prompts of a sweep, and exact renderings of the scenes that they describe.

The held-out captions are those of the embedded model's evaluation. ``draw_pictures`` renders images that show exactly
what a prompt says, at varying positions. They are the reference set for distances in the feature network.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest
from diffserve.world.captions import held_out
from diffserve.world.checker import SceneSpec
from diffserve.world.prompt_reading import parse_prompt
from diffserve.world.render import render
from diffserve.world.scenes import BACKGROUNDS, OBJECTS, Scene, is_legible, place_one, place_three, place_two

DRAWN_PER_PROMPT = 32
MAX_DRAWN = 4_096
DRAWN_SEED = 7_001
MAX_PROMPT_FILE_BYTES = 4_000_000


def held_out_prompts(count: int) -> tuple[str, ...]:
    """Return the first ``count`` held-out captions of the embedded model."""
    return tuple(words for _, words in held_out(count))


def read_prompts(file: Path) -> tuple[str, ...]:
    """Read prompts from a text file with one prompt per line; empty lines are skipped.

    Raises:
        InvalidRequest: The file cannot be read or contains no prompts.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_PROMPT_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise InvalidRequest(f"cannot read prompts from {str(file)!r}: {error.strerror}.", param="prompts") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{str(file)!r} is not UTF-8 text; write one prompt a line.", param="prompts") from None
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise InvalidRequest(f"{str(file)!r} holds no prompts; write one a line.", param="prompts")
    return prompts


def read_wishes(prompts: Sequence[str]) -> tuple[SceneSpec, ...]:
    """Parse each prompt into a scene description.

    Raises:
        InvalidRequest: A prompt is outside the language of the embedded model.
    """
    return tuple(parse_prompt(prompt) for prompt in prompts)


def draw_pictures(
    wishes: Sequence[SceneSpec], width_px: int, height_px: int, *, each: int
) -> Iterator[NDArray[np.uint8]]:
    """Render ``each`` images (height, width, 3) of every scene description, reproducibly."""
    for index, wish in enumerate(wishes):
        rng = random.Random(DRAWN_SEED + index)
        yield from (render(scene_like(wish, rng), width_px, height_px) for _ in range(each))


def num_drawn_per_prompt(num_prompts: int) -> int:
    """Return the number of images to render per prompt."""
    return max(2, min(DRAWN_PER_PROMPT, MAX_DRAWN // num_prompts))


def scene_like(wish: SceneSpec, rng: random.Random) -> Scene:
    """Sample a scene that shows ``wish``; unspecified parts are chosen at random."""
    while True:
        background = wish.background or rng.choice(BACKGROUNDS)
        names = wish.names or (rng.choice(list(OBJECTS)),)
        scene = _place(names, wish, background, rng)
        if is_legible(scene) or (wish.background and wish.names):
            return scene


def _place(names: tuple[str, ...], wish: SceneSpec, background: str, rng: random.Random) -> Scene:
    if len(names) == 1:
        return place_one(names[0], wish.size or "plain", background, rng)
    if len(names) == 2:
        return place_two(names[0], names[1], wish.relation, background, rng)
    return place_three((names[0], names[1], names[2]), wish.relation, background, rng)

"""Scenes of the ``tune`` stage: the most common prompts, and one layout per caption where possible.

A caption that leaves positions open is a mean of many images to the denoiser, which sometimes generates two of them at
once. So single objects stand near the middle, and objects named in a row stand in that row from left to right. The
captions stay true, so all scores stay comparable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from diffserve.world.scenes import CANVAS_PX, GRID_PX, SIZES_PX, Scene, scenes

SHARES: Final = {
    "plain": 0.25,
    "small": 0.09,
    "large": 0.17,
    "high": 0.06,
    "two objects": 0.17,
    "count": 0.05,
    "three objects": 0.11,
    "between": 0.10,
}
"""Sampling weight of each kind of scene; single objects are split by size."""
MAX_DRIFT_PX: Final = GRID_PX // 2
"""Largest offset of a single object from the center of the canvas: left, right and down."""


def tuning_scenes(seed: int) -> Iterator[Scene]:
    """Yield an endless, seeded stream of training scenes by ``SHARES`` that pass :func:`suits`."""
    rng = random.Random(seed)
    streams = {name: _suiting(name, rng.getrandbits(32)) for name in SHARES}
    while True:
        yield next(streams[rng.choices(list(SHARES), weights=list(SHARES.values()))[0]])


def _suiting(name: str, seed: int) -> Iterator[Scene]:
    kind = "one object" if name in SIZES_PX else name
    stream = scenes(seed, held_out=False, shares={kind: 1.0})
    return (scene for scene in stream if suits(scene) and (name not in SIZES_PX or scene.size == name))


def suits(scene: Scene) -> bool:
    """Whether the objects of ``scene`` stand where its shortest caption suggests."""
    if scene.kind == "one object":
        return scene.is_high or _is_central(scene)
    if scene.kind == "between":
        middle, *outer = scene.objects
        return _reads_on((outer[0].x_px, middle.x_px, outer[1].x_px)) and _is_level(scene)
    if scene.kind == "three objects":
        return _reads_on([placed.x_px for placed in scene.objects]) and _is_level(scene)
    if scene.relation == "next to":
        return _reads_on([placed.x_px for placed in scene.objects])
    return True


def _is_central(scene: Scene) -> bool:
    across, down = (at - CANVAS_PX // 2 for at in (scene.objects[0].x_px, scene.objects[0].y_px))
    return abs(across) <= MAX_DRIFT_PX and 0 <= down <= MAX_DRIFT_PX


def _reads_on(places: list[int] | tuple[int, ...]) -> bool:
    return list(places) == sorted(places)


def _is_level(scene: Scene) -> bool:
    heights = [placed.y_px for placed in scene.objects]
    return max(heights) - min(heights) <= GRID_PX

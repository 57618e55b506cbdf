"""Hold a picture of the embedded world against what it was asked to show, exactly and without any trained network.

:mod:`diffserve.world.picture_reading` says what the picture shows; a :class:`SceneSpec` says what it should.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest
from diffserve.world.canonical import Said
from diffserve.world.drawn import DRAWN
from diffserve.world.picture_reading import Found, Reading, read_picture
from diffserve.world.scenes import BACKGROUNDS, OBJECTS, RELATIONS, SIZES_PX, Scene

__all__ = ["EDITION", "Found", "Reading", "SceneSpec", "Verdict", "check", "grade", "judge", "read_picture"]

EDITION = 2
"""Raised whenever a verdict may change, so that scores by another edition are known: 1 had no look at single spots, and
passed foxes without an eye."""

NOT_EXACT = 0.9
"""Above every grade of a picture that is not exact."""

BETWEEN_MARGIN = 0.15  # the first must lie this share of the way inside the two that it stands between
BETWEEN_DRIFT = 0.4  # and at most this share of their distance beside the line that joins them


@dataclass(frozen=True)
class SceneSpec:
    """What a picture is asked to show.

    ``names`` are the objects in the order of the sentence, a count repeating its name; none at all asks for nothing in
    particular. ``relation`` is of the first to the second, "between" of the first to the two others. ``size``, small or
    large, is that of an only object. None is not asked for.

    Objects may be of ``world.drawn`` too. Raises :class:`InvalidRequest` for words that the world does not know.
    """

    names: tuple[str, ...]
    relation: str | None = None
    size: str | None = None
    background: str | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            _know(name, (*OBJECTS, *DRAWN), "object")
        _know(self.background, (None, *BACKGROUNDS), "background")
        _know(self.relation, (None, *RELATIONS, "between"), "relation")
        _know(self.size, (None, "small", "large"), "size")
        if self.relation is not None and len(self.names) != (3 if self.relation == "between" else 2):
            raise InvalidRequest(f"{self.relation!r} cannot hold of {len(self.names)} objects.")
        if self.size is not None and len(self.names) != 1:
            raise InvalidRequest(f"the size {self.size!r} is checked of an only object, not of {len(self.names)}.")

    @classmethod
    def of(cls, scene: Scene | Said) -> SceneSpec:
        """What the captions of ``scene`` ask for, or the sentence that says it."""
        return cls(scene.names, scene.relation, None if scene.size == "plain" else scene.size, scene.background)


def _know(word: str | None, known: tuple[str | None, ...], what: str) -> None:
    if word not in known:
        raise InvalidRequest(f"the picture world has no {what} {word!r}; it has {', '.join(filter(None, known))}.")


@dataclass(frozen=True)
class Verdict:
    """Whether a picture shows what is asked for; every part on its own and all together.

    ``objects``: each as often as asked for, clear, and nothing else. ``relation`` and ``size`` need the objects to be
    right. What is not asked for cannot be wrong, but a background of the world there must be.
    """

    background: bool
    objects: bool
    relation: bool
    size: bool
    reading: Reading

    @property
    def exact(self) -> bool:
        """Every part is right."""
        return self.background and self.objects and self.relation and self.size


def _relation_holds(relation: str, first: Found, second: Found) -> bool:
    right, down = second.x_px - first.x_px, second.y_px - first.y_px
    beside = abs(right) > abs(down)
    return {
        "left of": beside and right > 0,
        "right of": beside and right < 0,
        "above": not beside and down > 0,
        "below": not beside and down < 0,
        "next to": beside,
    }[relation]


def _is_between(middle: Found, one: Found, two: Found) -> bool:
    """Whether ``middle`` lies between the others along the line that joins them and near it."""
    axis = np.array([two.x_px - one.x_px, two.y_px - one.y_px])
    offset = np.array([middle.x_px - one.x_px, middle.y_px - one.y_px])
    squared = float(axis @ axis)
    along, beside = float(offset @ axis) / squared, abs(float(offset[0] * axis[1] - offset[1] * axis[0])) / squared
    return BETWEEN_MARGIN <= along <= 1 - BETWEEN_MARGIN and beside <= BETWEEN_DRIFT


def _stands_as_asked(spec: SceneSpec, objects: tuple[Found, ...]) -> bool:
    """Whether the relation holds, whichever of several alike is which."""
    if spec.relation is None:
        return True
    orders = (order for order in permutations(objects) if tuple(one.name for one in order) == spec.names)
    if spec.relation == "between":
        return any(_is_between(*order) for order in orders)
    return any(_relation_holds(spec.relation, *order) for order in orders)


def judge(reading: Reading, spec: SceneSpec) -> Verdict:
    """Hold what a picture shows against what it was asked to show."""
    seen = reading.objects
    objects = not spec.names or (reading.is_clear and sorted(found.name for found in seen) == sorted(spec.names))
    return Verdict(
        background=reading.has_background and spec.background in (None, reading.background),
        objects=objects,
        relation=objects and _stands_as_asked(spec, seen),
        size=objects and (spec.size is None or seen[0].size_px == SIZES_PX[spec.size]),
        reading=reading,
    )


def grade(verdict: Verdict, spec: SceneSpec) -> float:
    """How near to exact a picture is that was asked to show ``spec``: 1 where it is, below ``NOT_EXACT`` where it is
    not, by the parts that are right and by the share of the objects that are there and of those that should be."""
    if verdict.exact:
        return 1.0
    asked, seen = Counter(spec.names), Counter(found.name for found in verdict.reading.objects)
    most = max(asked.total(), seen.total()) if spec.names else 0
    objects = (asked & seen).total() / most if most else float(verdict.reading.is_clear)
    parts = (verdict.background, verdict.objects, verdict.relation, verdict.size, verdict.reading.is_clear, objects)
    return NOT_EXACT * sum(parts) / len(parts)


def check(pixels: NDArray[np.uint8], scene: Scene) -> Verdict:
    """Does the (height, width, 3) uint8 picture show exactly this scene? Drawn objects of it are looked for besides the
    world's."""
    drawn = tuple(name for name in DRAWN if name in scene.names)
    return judge(read_picture(pixels, drawn), SceneSpec.of(scene))

"""Checks exactly, without a trained network, whether an image shows a described scene of the embedded model.

:mod:`diffserve.world.picture_reading` recognizes the content of the image; a :class:`SceneSpec` is what is expected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest
from diffserve.world.captions import Content
from diffserve.world.picture_reading import Found, Reading, read_picture
from diffserve.world.render import DRAWN
from diffserve.world.scenes import BACKGROUNDS, OBJECTS, RELATIONS, SIZES_PX, Scene

__all__ = ["EDITION", "Found", "Reading", "SceneSpec", "Verdict", "check", "grade", "judge", "read_picture"]

EDITION = 2
"""Version of the checker, incremented when verdicts may change: version 1 did not check small spots such as eyes."""

NOT_EXACT = 0.9
"""Upper bound of the grade of an image that is not exact."""

BETWEEN_MARGIN = 0.15  # minimum distance of the middle object from both ends, as a share of their distance
BETWEEN_DRIFT = (
    0.4  # maximum distance of the middle object from the line through both ends, as a share of their distance
)


@dataclass(frozen=True)
class SceneSpec:
    """Description of a scene; parts that are not specified are None.

    Attributes:
        names: Objects in the order of the sentence, a count as repeated names, including those of ``DRAWN``.
            Empty if any objects are accepted.
        relation: Relation of the first object to the second, or "between": the first is between the two others.
        size: "small" or "large" for a single object.
        background: Color or place.

    Raises:
        InvalidRequest: A word is unknown, or relation or size do not fit the number of objects.
    """

    names: tuple[str, ...]
    relation: str | None = None
    size: str | None = None
    background: str | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            _check_word(name, (*OBJECTS, *DRAWN), "object")
        _check_word(self.background, (None, *BACKGROUNDS), "background")
        _check_word(self.relation, (None, *RELATIONS, "between"), "relation")
        _check_word(self.size, (None, "small", "large"), "size")
        if self.relation is not None and len(self.names) != (3 if self.relation == "between" else 2):
            raise InvalidRequest(f"{self.relation!r} cannot hold of {len(self.names)} objects.")
        if self.size is not None and len(self.names) != 1:
            raise InvalidRequest(f"the size {self.size!r} is checked of an only object, not of {len(self.names)}.")

    @classmethod
    def of(cls, scene: Scene | Content) -> SceneSpec:
        """Build the description of a scene or of a caption's content."""
        return cls(scene.names, scene.relation, None if scene.size == "plain" else scene.size, scene.background)


def _check_word(word: str | None, known_words: tuple[str | None, ...], kind: str) -> None:
    if word not in known_words:
        raise InvalidRequest(
            f"the picture world has no {kind} {word!r}; it has {', '.join(filter(None, known_words))}."
        )


@dataclass(frozen=True)
class Verdict:
    """Result of a check, part by part; parts that are not specified count as correct.

    Attributes:
        background: Whether the background is a known one and matches.
        objects: Whether exactly the specified objects are present and clear.
        relation: Whether the objects and their relation are correct.
        size: Whether the objects and the size are correct.
        reading: What was recognized in the image.
    """

    background: bool
    objects: bool
    relation: bool
    size: bool
    reading: Reading

    @property
    def exact(self) -> bool:
        """Whether every part is correct."""
        return self.background and self.objects and self.relation and self.size


def _relation_holds(relation: str, first: Found, second: Found) -> bool:
    right, down = second.x_px - first.x_px, second.y_px - first.y_px
    is_horizontal = abs(right) > abs(down)
    return {
        "left of": is_horizontal and right > 0,
        "right of": is_horizontal and right < 0,
        "above": not is_horizontal and down > 0,
        "below": not is_horizontal and down < 0,
        "next to": is_horizontal,
    }[relation]


def _is_between(middle: Found, first: Found, second: Found) -> bool:
    """Return whether ``middle`` is between the others and near the line through them."""
    axis = np.array([second.x_px - first.x_px, second.y_px - first.y_px])
    offset = np.array([middle.x_px - first.x_px, middle.y_px - first.y_px])
    squared = float(axis @ axis)
    along, across = float(offset @ axis) / squared, abs(float(offset[0] * axis[1] - offset[1] * axis[0])) / squared
    return BETWEEN_MARGIN <= along <= 1 - BETWEEN_MARGIN and across <= BETWEEN_DRIFT


def _matches_relation(spec: SceneSpec, objects: tuple[Found, ...]) -> bool:
    """Return whether the relation holds for some assignment of equal objects."""
    if spec.relation is None:
        return True
    orders = (order for order in permutations(objects) if tuple(recognized.name for recognized in order) == spec.names)
    if spec.relation == "between":
        return any(_is_between(*order) for order in orders)
    return any(_relation_holds(spec.relation, *order) for order in orders)


def judge(reading: Reading, spec: SceneSpec) -> Verdict:
    """Compare the recognized content of an image with the expected scene."""
    recognized = reading.objects
    objects = not spec.names or (
        reading.is_clear and sorted(detected.name for detected in recognized) == sorted(spec.names)
    )
    return Verdict(
        background=reading.has_background and spec.background in (None, reading.background),
        objects=objects,
        relation=objects and _matches_relation(spec, recognized),
        size=objects and (spec.size is None or recognized[0].size_px == SIZES_PX[spec.size]),
        reading=reading,
    )


def grade(verdict: Verdict, spec: SceneSpec) -> float:
    """Grade an image in 0..1: 1 if it is exact, otherwise at most ``NOT_EXACT``.

    The grade of an inexact image counts its correct parts and the share of matching objects.
    """
    if verdict.exact:
        return 1.0
    expected, recognized = Counter(spec.names), Counter(detected.name for detected in verdict.reading.objects)
    num_objects = max(expected.total(), recognized.total()) if spec.names else 0
    objects = (expected & recognized).total() / num_objects if num_objects else float(verdict.reading.is_clear)
    parts = (verdict.background, verdict.objects, verdict.relation, verdict.size, verdict.reading.is_clear, objects)
    return NOT_EXACT * sum(parts) / len(parts)


def check(pixels: NDArray[np.uint8], scene: Scene) -> Verdict:
    """Check whether an image (height, width, 3) uint8 shows exactly ``scene``, including objects of ``DRAWN``."""
    drawn = tuple(name for name in DRAWN if name in scene.names)
    return judge(read_picture(pixels, drawn), SceneSpec.of(scene))

"""What cannot be had both better and faster: the Pareto front of (time, quality), and its knee. numpy-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """Something with a time and a quality; more quality is better."""

    name: str
    seconds: float
    quality: float


def pareto_front(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other beats in one and equals in the other, the fastest first.

    Of points equal in both, the first is taken.
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.seconds, -point.quality)):
        if not front or point.quality > front[-1].quality:
            front.append(point)
    return tuple(front)


def knee(front: Sequence[Point]) -> Point | None:
    """The point of a front after which time buys least: farthest above the line between its ends.

    Time is taken as its logarithm and both axes are scaled to 0..1 (the idea of Satopaa et al. 2011, "Finding a Kneedle
    in a Haystack"). ``None`` for fewer than three points, or when none lies above the line.
    """
    if len(front) < 3:
        return None
    first, last = front[0], front[-1]
    width = math.log(last.seconds / first.seconds)
    height = last.quality - first.quality

    def above(point: Point) -> float:
        return (point.quality - first.quality) / height - math.log(point.seconds / first.seconds) / width

    best = max(front[1:-1], key=above)
    return best if above(best) > 0 else None

"""Places labels of a chart so that they do not overlap; lengths are in any one unit, y grows upward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """Return the area that both rectangles share."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)

    def area_outside(self, other: Box) -> float:
        """Return the area that ``other`` does not cover."""
        return (self.right - self.left) * (self.top - self.bottom) - self.overlap(other)


def spread(centers: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Move labels along a line as little as possible until none overlap.

    Labels that touch form a block, whose place minimizes the sum of squared moves; blocks merge until all are apart.

    Args:
        centers: Preferred centers.
        sizes: Sizes of the labels.
        low: Lower end of the line.
        high: Upper end of the line; the labels extend beyond it if their sum is larger than the line.

    Returns:
        The new centers in the order of ``centers``.
    """
    blocks: list[tuple[float, float, list[int]]] = []  # lower end, size, labels from low to high
    for index in sorted(range(len(centers)), key=centers.__getitem__):
        block = _block([index], centers, sizes, low, high)
        while blocks and blocks[-1][0] + blocks[-1][1] > block[0]:
            block = _block([*blocks.pop()[2], *block[2]], centers, sizes, low, high)
        blocks.append(block)
    moved = list(centers)
    for bottom, _, labels in blocks:
        for index in labels:
            moved[index] = bottom + sizes[index] / 2
            bottom += sizes[index]
    return moved


def _block(
    labels: list[int], centers: Sequence[float], sizes: Sequence[float], low: float, high: float
) -> tuple[float, float, list[int]]:
    """Return the lower end, the size and the labels of a block of adjacent labels."""
    size, bottoms = 0.0, []
    for index in labels:
        bottoms.append(centers[index] - size - sizes[index] / 2)
        size += sizes[index]
    bottom = sum(bottoms) / len(bottoms)
    return max(low, min(bottom, high - size)), size, labels


def choose_place(places: Iterable[Box], obstacles: Sequence[Box], frame: Box) -> Box:
    """Return the place that overlaps least with ``obstacles`` and the outside of ``frame``; the first of equal ones."""
    return min(places, key=lambda box: sum(map(box.overlap, obstacles)) + 4 * box.area_outside(frame))

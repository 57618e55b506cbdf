"""Read a picture of the embedded world back: its background and its objects, without any trained network.

The background is found first, by comparing the picture with every background the world can draw. Then every sprite at
every size is slid over the picture (:mod:`diffserve.embedded.sprite_matching`). The placement that explains most of
what it would change is accepted while that share, R2, is above ``MIN_R2``; whatever overlaps it is dropped; then the
next best is taken. Two more looks tell an object from a smear of its colours: ``detail`` asks whether its edges are
where they belong, ``sharpness`` whether there are edges at all. What stands out of the background and is no find is
left over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffserve.embedded.sprite_matching import SCALE, Match, Plane, ScoreMaps, coarser, empty_picture, small_sprite
from diffserve.embedded.world import BACKGROUNDS, COLORS, GRID_PX, SPRITE_SIZES_PX
from diffserve.errors import InvalidRequest

MIN_R2 = 0.5
MIN_DETAIL = 0.45  # after an autoencoder of 32 dB 95 of 100 objects have 0.86 and more; most mere blobs less than 0.4
MIN_SHARPNESS = 0.2  # every clean rendering falls below it when blurred by 4 pixels, none by 1
DETAIL_CELLS = 12  # how many cells across an object its details are compared in
MIN_LEFTOVER = 0.2  # colour error of a cell that the background cannot have
MAX_LEFTOVER_CELLS = 6  # a quarter of the smallest object
MAX_OBJECTS = 6
MAX_SIDE_PX = 256


@dataclass(frozen=True)
class Found:
    """One object found: its name, the centre and side of its square in pixels, the share of the change it explains
    (R2), the share of its edges that are where they belong (``detail``), and the energy of all edges there against
    their own (``sharpness``); a clean rendering has 1 in all three."""

    name: str
    x_px: float
    y_px: float
    size_px: int
    r2: float
    detail: float
    sharpness: float

    @property
    def is_clear(self) -> bool:
        """Whether it is an object, not a smear of one."""
        return self.detail >= MIN_DETAIL and self.sharpness >= MIN_SHARPNESS


@dataclass(frozen=True)
class Reading:
    """What a picture shows, the best find first; how far the nearest background is (colour error, 0..1); and how many
    cells of 8 x 8 pixels are neither background nor near a find."""

    background: str
    background_error: float
    objects: tuple[Found, ...]
    leftover_cells: int

    @property
    def is_clear(self) -> bool:
        """Whether every find is clear and nothing is left over."""
        return self.leftover_cells <= MAX_LEFTOVER_CELLS and all(found.is_clear for found in self.objects)


def _read_background(picture: Plane) -> tuple[str, float, Plane | None]:
    """The nearest background, its error, and of a plain one the picture's own shade."""
    best = ("", np.inf)
    for name in BACKGROUNDS:
        distance = np.abs(picture - empty_picture(name, *picture.shape[:2])).mean(axis=2)
        error = float(np.median(distance)) + 0.25 * float(np.minimum(distance, 0.2).mean())
        best = min(best, (name, error), key=lambda pair: pair[1])
    return *best, _shade(picture) if best[0] in COLORS else None


def _shade(picture: Plane) -> Plane:
    edges = (picture[:3], picture[-3:], picture[:, :3], picture[:, -3:])
    shade: Plane = np.median(np.concatenate([edge.reshape(-1, 3) for edge in edges]), axis=0).astype(np.float32)
    return shade


def _edges(patch: Plane) -> Plane:
    """All differences between neighbours, in one row."""
    return np.concatenate([np.diff(patch, axis=0).ravel(), np.diff(patch, axis=1).ravel()])


def _look_closer(match: Match, picture: Plane, empty: Plane) -> Found:
    spot = (slice(match.top, match.top + match.side), slice(match.left, match.left + match.side))
    drawn = small_sprite(match.name, match.side)
    expected = drawn[..., :3] + (1 - drawn[..., 3:]) * empty[spot]
    factor = round(match.side / DETAIL_CELLS)
    coarse, own = _edges(coarser(picture[spot], factor)), _edges(coarser(expected, factor))
    fine, own_fine = _edges(picture[spot]), _edges(expected)
    return Found(
        name=match.name,
        x_px=SCALE * (match.left + match.side / 2),
        y_px=SCALE * (match.top + match.side / 2),
        size_px=SCALE * match.side,
        r2=match.r2,
        detail=float(coarse @ own) / max(float(own @ own), 1e-6),
        sharpness=float(fine @ fine) / max(float(own_fine @ own_fine), 1e-6),
    )


def _leftover_cells(change: Plane, found: Sequence[Found]) -> int:
    """How many cells of the grid differ from the background (by ``change``) and are half a cell away from any find."""
    far = np.abs(coarser(change, GRID_PX // SCALE)).max(axis=2) > MIN_LEFTOVER
    for one in found:
        left, top = ((at - one.size_px / 2) / GRID_PX - 0.5 for at in (one.x_px, one.y_px))
        across = one.size_px / GRID_PX + 1
        rows = slice(max(0, math.floor(top)), math.ceil(top + across))
        columns = slice(max(0, math.floor(left)), math.ceil(left + across))
        far[rows, columns] = False
    return int(far.sum())


def read_picture(pixels: NDArray[np.uint8]) -> Reading:
    """Find the background and all objects of a (height, width, 3) uint8 picture of the embedded world's scale.

    Raises :class:`InvalidRequest` for another shape, or for sides outside 40 to 256 pixels.
    """
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise InvalidRequest(f"a picture is (height, width, 3) of uint8, not {pixels.shape} of {pixels.dtype}.")
    if not min(SPRITE_SIZES_PX) <= min(pixels.shape[:2]) <= max(pixels.shape[:2]) <= MAX_SIDE_PX:
        raise InvalidRequest(
            f"a picture of {pixels.shape[1]}x{pixels.shape[0]} cannot be read: sides go from {min(SPRITE_SIZES_PX)} to "
            f"{MAX_SIDE_PX} pixels. Ask the embedded model for its own sizes, 128x128, 192x128 or 128x192."
        )
    picture = coarser(pixels.astype(np.float32) / np.float32(255))
    ground, error, shade = _read_background(picture)
    empty = empty_picture(ground, *picture.shape[:2]) if shade is None else np.broadcast_to(shade, picture.shape)
    found = [_look_closer(match, picture, empty) for match in _matches(ScoreMaps(picture, ground, shade))]
    return Reading(ground, error, tuple(found), _leftover_cells(picture - empty, found))


def _matches(maps: ScoreMaps) -> Iterator[Match]:
    for _ in range(MAX_OBJECTS):
        match = maps.best()
        if match.r2 < MIN_R2:
            return
        yield match
        maps.rule_out_around(match)

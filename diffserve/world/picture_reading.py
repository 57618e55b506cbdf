"""Read a picture of the embedded world back: its background and its objects, without any trained network.

The background is found first, by comparing the picture with every background the world can draw. Then every sprite at
every size is slid over the picture (:mod:`diffserve.world.sprite_matching`). The placement that explains most of
what it would change is accepted while that share, R2, is above ``MIN_R2``; whatever overlaps it is dropped; then the
next best is taken. Four more looks tell an object from a smear of its colours: ``detail`` asks whether its edges are
where they belong, ``sharpness`` whether there are edges at all, ``explained`` how many of its pixels have their colour,
and ``flaw`` how wrong its worst spot is: a fox without an eye has nearly all its pixels right. What stands out of the
background and is no find is left over; what is a little beside it all over is dirt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffserve.api.errors import InvalidRequest
from diffserve.world.scenes import BACKGROUNDS, COLORS, GRID_PX, SPRITE_SIZES_PX
from diffserve.world.sprite_matching import (
    NAMES,
    SCALE,
    Names,
    Placement,
    Plane,
    ScoreMaps,
    box_sums,
    downsample,
    empty_picture,
    small_sprite,
)

MIN_R2 = 0.5
# Of 480 renderings of all objects and sizes that went through the shipped autoencoder, none comes near these bounds:
# detail 0.66 and more, sharpness 0.35, explained 0.78, flaw at most 0.19.
MIN_DETAIL = 0.6
MIN_SHARPNESS = 0.25  # every clean rendering falls below it when blurred by 4 pixels, none by 1
MIN_EXPLAINED = 0.7
MAX_FLAW = 0.25  # cats with a smeared mouth, foxes with an eye short begin at 0.28
MAX_DIRT = 0.04  # good samples have 0.03 at most, renderings under grain of 20 levels 0.015; confetti begins at 0.05
DETAIL_CELLS = 12  # how many cells across an object its details are compared in
EXPLAINED_ERROR = 0.18  # colour error (0..1) below which a pixel is explained
FLAW_SPOTS = 7  # how many spots across an object its worst one is sought in: the size of an eye
MIN_LEFTOVER = 0.2  # colour error of a cell that the background cannot have
MAX_LEFTOVER_CELLS = 6  # a quarter of the smallest object
MAX_OBJECTS = 6
MAX_SIDE_PX = 256


@dataclass(frozen=True)
class Found:
    """One object found: its name, the centre and side of its square in pixels, the share of the change it explains
    (R2), the share of its edges that are where they belong (``detail``), the energy of all edges there against their
    own (``sharpness``), the share of its pixels that have their colour or a neighbour's (``explained``), and the mean
    colour error, 0..1, of its worst spot (``flaw``); a clean rendering has 0 in the last and 1 in all others."""

    name: str
    x_px: float
    y_px: float
    size_px: int
    r2: float
    detail: float
    sharpness: float
    explained: float
    flaw: float

    @property
    def is_clear(self) -> bool:
        """Whether it is an object, whole and sharp, not a smear or a part of one."""
        is_sharp = self.detail >= MIN_DETAIL and self.sharpness >= MIN_SHARPNESS
        return is_sharp and self.explained >= MIN_EXPLAINED and self.flaw <= MAX_FLAW


@dataclass(frozen=True)
class Reading:
    """What a picture shows, the best find first, and how far the nearest background is (colour error, 0..1).

    Of the cells of 8 x 8 pixels that no find is near: how many cannot be background, ``leftover_cells``, and how far
    all of them are from it in the mean, ``dirt`` (colour error, 0..1).
    """

    background: str
    background_error: float
    objects: tuple[Found, ...]
    leftover_cells: int
    dirt: float

    @property
    def has_background(self) -> bool:
        """Whether what is behind the objects is a background of the world, not merely nearest to one."""
        return self.dirt <= MAX_DIRT

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


def _nudged(patch: Plane) -> Iterator[Plane]:
    """The patch moved by at most one pixel each way, nine of them."""
    padded = np.pad(patch, ((1, 1), (1, 1), (0, 0)), mode="edge")
    height, width, _ = patch.shape
    for down in range(3):
        for right in range(3):
            yield padded[down : down + height, right : right + width]


def _color_error(seen: Plane, expected: Plane) -> Plane:
    """How far each pixel (h, w) is from what is expected there or beside, and what is expected from what is seen."""
    unexpected = np.min([np.abs(seen - moved).max(axis=2) for moved in _nudged(expected)], axis=0)
    missing = np.min([np.abs(expected - moved).max(axis=2) for moved in _nudged(seen)], axis=0)
    error: Plane = np.maximum(unexpected, missing)
    return error


def _worst_spot(error: Plane) -> float:
    """The greatest mean of ``error`` (h, w) over a spot."""
    side = round(len(error) / FLAW_SPOTS)
    return float(box_sums(error, side).max() / side**2)


def _look_closer(match: Placement, picture: Plane, empty: Plane) -> Found:
    spot = (slice(match.top, match.top + match.side), slice(match.left, match.left + match.side))
    drawn = small_sprite(match.name, match.side)
    expected = drawn[..., :3] + (1 - drawn[..., 3:]) * empty[spot]
    factor = round(match.side / DETAIL_CELLS)
    coarse, own = _edges(downsample(picture[spot], factor)), _edges(downsample(expected, factor))
    fine, own_fine = _edges(picture[spot]), _edges(expected)
    covered = drawn[..., 3] > 0.5
    error = np.where(covered, _color_error(picture[spot], expected), np.float32(0))
    return Found(
        name=match.name,
        x_px=SCALE * (match.left + match.side / 2),
        y_px=SCALE * (match.top + match.side / 2),
        size_px=SCALE * match.side,
        r2=match.r2,
        detail=float(coarse @ own) / max(float(own @ own), 1e-6),
        sharpness=float(fine @ fine) / max(float(own_fine @ own_fine), 1e-6),
        explained=float((error[covered] < EXPLAINED_ERROR).mean()),
        flaw=_worst_spot(error),
    )


def _far_errors(change: Plane, found: Sequence[Found]) -> Plane:
    """How far each cell of the grid is from the background (by ``change``) that is half a cell away from any find."""
    errors = np.abs(downsample(change, GRID_PX // SCALE)).max(axis=2)
    far = np.ones(errors.shape, dtype=bool)
    for one in found:
        left, top = ((at - one.size_px / 2) / GRID_PX - 0.5 for at in (one.x_px, one.y_px))
        across = one.size_px / GRID_PX + 1
        rows = slice(max(0, math.floor(top)), math.ceil(top + across))
        columns = slice(max(0, math.floor(left)), math.ceil(left + across))
        far[rows, columns] = False
    kept: Plane = errors[far]
    return kept


def read_picture(pixels: NDArray[np.uint8], drawn: Names = ()) -> Reading:
    """Find the background and all objects of a (height, width, 3) uint8 picture of the embedded world's scale, those of
    the world and ``drawn`` ones, names of ``world.drawn``.

    Raises :class:`InvalidRequest` for another shape, or for sides outside 40 to 256 pixels.
    """
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise InvalidRequest(f"a picture is (height, width, 3) of uint8, not {pixels.shape} of {pixels.dtype}.")
    if not min(SPRITE_SIZES_PX) <= min(pixels.shape[:2]) <= max(pixels.shape[:2]) <= MAX_SIDE_PX:
        raise InvalidRequest(
            f"a picture of {pixels.shape[1]}x{pixels.shape[0]} cannot be read: sides go from {min(SPRITE_SIZES_PX)} to "
            f"{MAX_SIDE_PX} pixels. Ask the embedded model for its own sizes, 128x128, 192x128 or 128x192."
        )
    picture = downsample(pixels.astype(np.float32) / np.float32(255))
    ground, error, shade = _read_background(picture)
    empty = empty_picture(ground, *picture.shape[:2]) if shade is None else np.broadcast_to(shade, picture.shape)
    maps = ScoreMaps(picture, ground, shade, NAMES + drawn)
    found = [_look_closer(match, picture, empty) for match in _matches(maps)]
    errors = _far_errors(picture - empty, found)
    dirt = float(errors.mean()) if errors.size else 0.0
    return Reading(ground, error, tuple(found), int((errors > MIN_LEFTOVER).sum()), dirt)


def _matches(maps: ScoreMaps) -> Iterator[Placement]:
    for _ in range(MAX_OBJECTS):
        match = maps.best()
        if match.r2 < MIN_R2:
            return
        yield match
        maps.rule_out_around(match)

"""Recognizes the background and the objects of an embedded model's image, without a trained network.

The background is the closest of all rendered ones. Then the best sprite placement with R2 above ``MIN_R2`` is accepted
repeatedly, without overlaps (see :mod:`diffserve.world.sprite_matching`). Measures of detail, sharpness, color and
local flaws separate objects from smears; ``leftover_cells`` and ``dirt`` measure what objects do not explain.
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
# 480 renderings of all objects and sizes that passed through the shipped autoencoder stay within these bounds:
# detail at least 0.66, sharpness 0.35, explained 0.78, flaw at most 0.19.
MIN_DETAIL = 0.6
MIN_SHARPNESS = 0.25  # every clean rendering falls below it when blurred by 4 pixels, none by 1
MIN_EXPLAINED = 0.7
MAX_FLAW = 0.25  # cats with a smeared mouth or foxes with a missing eye have 0.28 or more
MAX_DIRT = 0.04  # good samples have at most 0.03, renderings with noise of 20 levels 0.015, confetti 0.05 or more
DETAIL_CELLS = 12  # cells across an object in the comparison of details
EXPLAINED_ERROR = 0.18  # color error (0..1) below which a pixel is explained
FLAW_SPOTS = 7  # spots across an object in the search for its worst spot; a spot has the size of an eye
MIN_LEFTOVER = 0.2  # color error above which a cell cannot be background
MAX_LEFTOVER_CELLS = 6  # a quarter of the smallest object
MAX_OBJECTS = 6
MAX_SIDE_PX = 256


@dataclass(frozen=True)
class Found:
    """A recognized object; a clean rendering has a flaw of 0 and 1 in all other quality measures.

    Attributes:
        name: Name of the object.
        x_px: Horizontal center.
        y_px: Vertical center.
        size_px: Side of its square.
        r2: Share of the change against the background that the sprite explains.
        detail: Share of the sprite's edges that are in the right place.
        sharpness: Energy of all edges relative to that of the sprite.
        explained: Share of pixels with the expected color or that of a neighbor.
        flaw: Mean color error (0..1) of the worst spot.
    """

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
        """Whether the object is complete and sharp."""
        is_sharp = self.detail >= MIN_DETAIL and self.sharpness >= MIN_SHARPNESS
        return is_sharp and self.explained >= MIN_EXPLAINED and self.flaw <= MAX_FLAW


@dataclass(frozen=True)
class Reading:
    """Recognized content of an image.

    Attributes:
        background: The closest background.
        background_error: Color error (0..1) to it.
        objects: Recognized objects, the best match first.
        leftover_cells: Number of 8 x 8 pixel cells away from all objects that cannot be background.
        dirt: Mean color error (0..1) of all cells away from objects.
    """

    background: str
    background_error: float
    objects: tuple[Found, ...]
    leftover_cells: int
    dirt: float

    @property
    def has_background(self) -> bool:
        """Whether the background is really a known one and not only closest to it."""
        return self.dirt <= MAX_DIRT

    @property
    def is_clear(self) -> bool:
        """Whether every object is clear and nothing else is in the image."""
        return self.leftover_cells <= MAX_LEFTOVER_CELLS and all(detected.is_clear for detected in self.objects)


def _read_background(picture: Plane) -> tuple[str, float, Plane | None]:
    """Return the closest background, its error, and for a plain color the actual shade in the image."""
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
    """Return all differences between neighboring pixels as one vector."""
    return np.concatenate([np.diff(patch, axis=0).ravel(), np.diff(patch, axis=1).ravel()])


def _shifted(patch: Plane) -> Iterator[Plane]:
    """Yield nine copies of the patch, shifted by at most one pixel in each direction."""
    padded = np.pad(patch, ((1, 1), (1, 1), (0, 0)), mode="edge")
    height, width, _ = patch.shape
    for down in range(3):
        for right in range(3):
            yield padded[down : down + height, right : right + width]


def _color_error(actual: Plane, expected: Plane) -> Plane:
    """Compute the symmetric color error of each pixel (h, w), with a tolerance of one pixel in position."""
    unexpected = np.min([np.abs(actual - moved).max(axis=2) for moved in _shifted(expected)], axis=0)
    missing = np.min([np.abs(expected - moved).max(axis=2) for moved in _shifted(actual)], axis=0)
    error: Plane = np.maximum(unexpected, missing)
    return error


def _worst_spot(error: Plane) -> float:
    """Return the maximum over all spots of the mean ``error`` (h, w)."""
    side = round(len(error) / FLAW_SPOTS)
    return float(box_sums(error, side).max() / side**2)


def _measure_match(match: Placement, picture: Plane, empty: Plane) -> Found:
    spot = (slice(match.top, match.top + match.side), slice(match.left, match.left + match.side))
    drawn = small_sprite(match.name, match.side)
    expected = drawn[..., :3] + (1 - drawn[..., 3:]) * empty[spot]
    factor = round(match.side / DETAIL_CELLS)
    coarse, coarse_expected = _edges(downsample(picture[spot], factor)), _edges(downsample(expected, factor))
    fine, fine_expected = _edges(picture[spot]), _edges(expected)
    covered = drawn[..., 3] > 0.5
    error = np.where(covered, _color_error(picture[spot], expected), np.float32(0))
    return Found(
        name=match.name,
        x_px=SCALE * (match.left + match.side / 2),
        y_px=SCALE * (match.top + match.side / 2),
        size_px=SCALE * match.side,
        r2=match.r2,
        detail=float(coarse @ coarse_expected) / max(float(coarse_expected @ coarse_expected), 1e-6),
        sharpness=float(fine @ fine) / max(float(fine_expected @ fine_expected), 1e-6),
        explained=float((error[covered] < EXPLAINED_ERROR).mean()),
        flaw=_worst_spot(error),
    )


def _far_errors(change: Plane, objects: Sequence[Found]) -> Plane:
    """Compute the color errors against the background of all grid cells at least half a cell away from objects."""
    errors = np.abs(downsample(change, GRID_PX // SCALE)).max(axis=2)
    far = np.ones(errors.shape, dtype=bool)
    for detected in objects:
        left, top = ((center - detected.size_px / 2) / GRID_PX - 0.5 for center in (detected.x_px, detected.y_px))
        across = detected.size_px / GRID_PX + 1
        rows = slice(max(0, math.floor(top)), math.ceil(top + across))
        columns = slice(max(0, math.floor(left)), math.ceil(left + across))
        far[rows, columns] = False
    far_errors: Plane = errors[far]
    return far_errors


def read_picture(pixels: NDArray[np.uint8], drawn: Names = ()) -> Reading:
    """Recognize the background and all objects of an embedded model's image.

    Args:
        pixels: Image (height, width, 3) uint8.
        drawn: Names of ``DRAWN`` to search for in addition to the objects of the atlas.

    Raises:
        InvalidRequest: The array has another shape or type, or a side is outside 40 to 256 pixels.
    """
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise InvalidRequest(f"a picture is (height, width, 3) of uint8, not {pixels.shape} of {pixels.dtype}.")
    if not min(SPRITE_SIZES_PX) <= min(pixels.shape[:2]) <= max(pixels.shape[:2]) <= MAX_SIDE_PX:
        raise InvalidRequest(
            f"a picture of {pixels.shape[1]}x{pixels.shape[0]} cannot be read: sides go from {min(SPRITE_SIZES_PX)} to "
            f"{MAX_SIDE_PX} pixels. Ask the embedded model for its own sizes, 128x128, 192x128 or 128x192."
        )
    picture = downsample(pixels.astype(np.float32) / np.float32(255))
    background, error, shade = _read_background(picture)
    empty = empty_picture(background, *picture.shape[:2]) if shade is None else np.broadcast_to(shade, picture.shape)
    maps = ScoreMaps(picture, background, shade, NAMES + drawn)
    objects = [_measure_match(match, picture, empty) for match in _matches(maps)]
    errors = _far_errors(picture - empty, objects)
    dirt = float(errors.mean()) if errors.size else 0.0
    return Reading(background, error, tuple(objects), int((errors > MIN_LEFTOVER).sum()), dirt)


def _matches(maps: ScoreMaps) -> Iterator[Placement]:
    for _ in range(MAX_OBJECTS):
        match = maps.best()
        if match.r2 < MIN_R2:
            return
        yield match
        maps.rule_out_around(match)

"""Scores how well each sprite, at each size and position, explains an image over its empty background.

For the image I, the background B, D = I - B, and a sprite with premultiplied colors s and alpha m, the score is

    R2 = 1 - sum (D - (s - m B))^2 / sum (s - m B)^2 = (2 sum D (s - m B) - sum D^2) / sum (s - m B)^2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from diffserve.world.render import background, sprite
from diffserve.world.scenes import OBJECTS, SPRITE_SIZES_PX

SCALE = 2  # images are matched at 1 / SCALE of their size
MIN_ENERGY = (
    0.004  # mean squared change per covered pixel below which a sprite is indistinguishable from the background
)
OVERLAP = 0.2  # share of a side by which the squares of two objects may overlap

NAMES = tuple(OBJECTS)
Names = tuple[str, ...]
"""Names of the objects to search for."""

Plane = NDArray[np.float32]
Spectrum = NDArray[np.complex64]


@dataclass(frozen=True)
class Placement:
    """A sprite's name, side, left and top edge at 1 / SCALE, and its R2."""

    name: str
    side: int
    left: int
    top: int
    r2: float


def downsample(pixels: NDArray[np.float32], factor: int = SCALE) -> Plane:
    """Average (H, W, C) over ``factor`` x ``factor`` cells, without incomplete cells at the edges."""
    h, w, channels = pixels.shape[0] // factor, pixels.shape[1] // factor, pixels.shape[2]
    cells = pixels[: h * factor, : w * factor].reshape(h, factor, w, factor, channels)
    return np.asarray(cells.mean(axis=(1, 3)), dtype=np.float32)


@lru_cache(maxsize=512)
def small_sprite(name: str, side: int) -> Plane:
    """Return a sprite at 1 / SCALE: (side, side, 4) with premultiplied colors and alpha."""
    return downsample(sprite(name, side * SCALE))


@lru_cache(maxsize=128)
def empty_picture(name: str, height: int, width: int) -> Plane:
    """Return an empty background at 1 / SCALE: (height, width, 3) in 0..1."""
    return downsample(background(name, width * SCALE, height * SCALE).astype(np.float32) / np.float32(255))


def _spectra(planes: NDArray[np.float32]) -> Spectrum:
    return np.asarray(np.fft.rfft2(planes), dtype=np.complex64)


def _sprites(names: Names, side: int) -> Plane:
    """Stack the sprites of ``names`` in one size: (N, 4, side, side)."""
    return np.stack([small_sprite(name, side).transpose(2, 0, 1) for name in names])


def _conjugate_spectra(patches: Plane, height: int, width: int) -> Spectrum:
    """Compute conjugate spectra of patches (N, 4, side, side) in the top left corner of an empty canvas."""
    side = patches.shape[-1]
    canvas = np.zeros((*patches.shape[:2], height, width), dtype=np.float32)
    canvas[..., :side, :side] = patches
    return np.conj(_spectra(canvas))


@lru_cache(maxsize=16)
def _bank(names: Names, side: int, height: int, width: int) -> Spectrum:
    return _conjugate_spectra(_sprites(names, side), height, width)


def _correlate(planes: Plane, bank: Spectrum, side: int) -> Plane:
    """Correlate planes (4, h, w) with every patch at all valid positions, summed over planes: (N, h', w')."""
    height, width = planes.shape[1:]
    product = (_spectra(planes) * bank).sum(axis=1)
    maps = np.fft.irfft2(product, s=(height, width))
    return np.asarray(maps[:, : height - side + 1, : width - side + 1], dtype=np.float32)


def box_sums(plane: Plane, side: int) -> Plane:
    """Sum (h, w) over every ``side`` x ``side`` square."""
    total = np.zeros((plane.shape[0] + 1, plane.shape[1] + 1))
    total[1:, 1:] = plane.cumsum(axis=0, dtype=np.float64).cumsum(axis=1)
    sums = total[side:, side:] - total[:-side, side:] - total[side:, :-side] + total[:-side, :-side]
    return sums.astype(np.float32)


def _energy_planes(names: Names, side: int) -> Plane:
    """Return the factors of a background's colors and squared brightness: -2 s m and m^2, (N, 4, side, side)."""
    patches = _sprites(names, side)
    alpha = patches[:, 3:]
    return np.concatenate([-2 * patches[:, :3] * alpha, alpha**2], axis=1)


def _apply_floor(energy: Plane, names: Names, side: int) -> Plane:
    """Replace energies of sprites that are indistinguishable from the background by infinity, so that R2 is 0."""
    floor = 3 * MIN_ENERGY * _sprites(names, side)[:, 3].sum(axis=(1, 2))[:, None, None]
    return np.where(energy > floor, energy, np.float32(np.inf))


@lru_cache(maxsize=128)
def _place_energy(place: str, names: Names, side: int, height: int, width: int) -> Plane:
    """Compute sum (s - m B)^2 of every sprite over a place: (N, h', w')."""
    empty = empty_picture(place, height, width).transpose(2, 0, 1)
    planes = np.concatenate([empty, (empty**2).sum(axis=0, keepdims=True)])
    background_energy = _correlate(planes, _conjugate_spectra(_energy_planes(names, side), height, width), side)
    sprite_energy = np.square(_sprites(names, side)[:, :3]).sum(axis=(1, 2, 3))[:, None, None]
    return _apply_floor(background_energy + sprite_energy, names, side)


@lru_cache(maxsize=8)
def _energy_sums(names: Names, side: int) -> tuple[Plane, Plane]:
    """Return the sums over each sprite's square of ``_energy_planes`` (N, 4) and of s^2 (N,)."""
    return _energy_planes(names, side).sum(axis=(2, 3)), np.square(_sprites(names, side)[:, :3]).sum(axis=(1, 2, 3))


def _plain_energy(shade: Plane, names: Names, side: int) -> Plane:
    """Compute sum (s - m B)^2 of every sprite over a plain color (3,): (N, 1, 1)."""
    sums, sprite_energy = _energy_sums(names, side)
    background_energy = sums @ np.append(shade, np.square(shade).sum()).astype(np.float32)
    return _apply_floor((background_energy + sprite_energy)[:, None, None], names, side)


class ScoreMaps:
    """R2 of every sprite at every position where it fits.

    R2 is 1 for a clean rendering, 0 for empty background, and less for anything else. All sums run over the sprite's
    square: sum D (s - m B) is a Fourier product per sprite, sum D^2 comes from running sums, and sum (s - m B)^2
    depends only on the background and is cached.

    Args:
        picture: Image (h, w, 3) in 0..1.
        ground: Name of the background.
        shade: Actual color (3,) of a plain background, None for a place.
        names: Sprites to search for.
    """

    def __init__(self, picture: Plane, ground: str, shade: Plane | None, names: Names = NAMES) -> None:
        self._names = names
        height, width, _ = picture.shape
        empty = empty_picture(ground, height, width) if shade is None else np.broadcast_to(shade, picture.shape)
        change = (picture - empty).transpose(2, 0, 1)
        planes = np.concatenate([change, -(change * empty.transpose(2, 0, 1)).sum(axis=0, keepdims=True)])
        square = np.square(change).sum(axis=0)
        self._maps: dict[int, Plane] = {}
        for side in (px // SCALE for px in SPRITE_SIZES_PX if px <= SCALE * min(height, width)):
            if shade is None:
                energy = _place_energy(ground, names, side, height, width)
            else:
                energy = _plain_energy(shade, names, side)
            gain = 2 * _correlate(planes, _bank(names, side, height, width), side) - box_sums(square, side)
            self._maps[side] = gain / energy

    def best(self) -> Placement:
        """Return the placement with the highest R2."""
        matches = []
        for side, scores in self._maps.items():
            index, top, left = (int(i) for i in np.unravel_index(int(scores.argmax()), scores.shape))
            matches.append(Placement(self._names[index], side, left, top, float(scores[index, top, left])))
        return max(matches, key=lambda match: match.r2)

    def rule_out_around(self, taken: Placement) -> None:
        """Exclude every placement whose square overlaps ``taken`` by more than ``OVERLAP``."""
        for side, scores in self._maps.items():
            reach = (1 - OVERLAP) * (taken.side + side) / 2
            left, top = taken.left + (taken.side - side) / 2, taken.top + (taken.side - side) / 2
            rows = slice(max(0, round(top - reach)), max(0, round(top + reach) + 1))
            columns = slice(max(0, round(left - reach)), max(0, round(left + reach) + 1))
            scores[:, rows, columns] = -np.inf

"""Read a picture of the embedded world back, exactly and without any trained network.

The background is found first, by comparing the picture with every background the world can draw. Then every sprite at
every size is slid over the picture. With I the picture, B the background, s and m a sprite and its alpha, a placement
explains

    R2 = 1 - sum (I - m s - (1 - m) B)^2 / sum (m (s - B))^2

of what the sprite would change: 1 for a clean rendering, 0 for bare background, less for anything else. All placements
of a sprite come from a few Fourier products, at a quarter of the pixels. The best placement is accepted while its R2 is
above ``MIN_R2``; whatever overlaps it is dropped; then the next best is taken. A find whose edges have lost more than
1 - ``MIN_SHARPNESS`` of their energy is a smear, not the object.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from diffserve.embedded.backgrounds import background
from diffserve.embedded.sprites import sprite
from diffserve.embedded.world import BACKGROUNDS, COLORS, OBJECTS, SPRITE_SIZES_PX, Scene

MIN_R2 = 0.5
MIN_SHARPNESS = 0.25
MAX_OBJECTS = 6
SCALE = 2  # the picture is matched at 1 / SCALE of its size
MIN_ENERGY = 0.004  # mean squared change per covered pixel below which a sprite cannot be told from the background

Plane = NDArray[np.float32]
Spectrum = NDArray[np.complex64]


@dataclass(frozen=True)
class Found:
    """One object found: its name, the centre and side of its square in pixels, the share of the change it explains
    (R2), and the edge energy of the picture there against the sprite's own (1 = as crisp)."""

    name: str
    x_px: float
    y_px: float
    size_px: int
    r2: float
    sharpness: float


@dataclass(frozen=True)
class Reading:
    """What a picture shows, and how far the nearest background is (mean absolute colour error, 0..1)."""

    background: str
    background_error: float
    objects: tuple[Found, ...]


@dataclass(frozen=True)
class Verdict:
    """Whether a picture shows a scene; every part on its own and all together."""

    background: bool
    objects: bool
    relation: bool
    reading: Reading

    @property
    def exact(self) -> bool:
        """Background, objects (each once, no others) and relation are all right."""
        return self.background and self.objects and self.relation


def _shrink(pixels: NDArray[np.float32]) -> Plane:
    height, width, channels = pixels.shape
    h, w = height // SCALE, width // SCALE
    view = pixels[: h * SCALE, : w * SCALE].reshape(h, SCALE, w, SCALE, channels)
    return np.asarray(view.mean(axis=(1, 3)), dtype=np.float32)


@dataclass(frozen=True)
class _Bank:
    """Conjugate spectra of all sprites: colours (N, 3, ...), alpha (N, ...), alpha squared, and the energy sum s^2."""

    names: tuple[str, ...]
    sides: NDArray[np.int64]
    colors: Spectrum
    color_alpha: Spectrum
    alpha: Spectrum
    alpha_squared: Spectrum
    box: Spectrum
    energy: Plane
    covered: Plane


@lru_cache(maxsize=8)
def _bank(height: int, width: int) -> _Bank:
    entries = [(name, side) for name in OBJECTS for side in SPRITE_SIZES_PX if side <= SCALE * min(height, width)]
    colors = np.zeros((len(entries), 3, height, width), dtype=np.float32)
    alphas = np.zeros((len(entries), height, width), dtype=np.float32)
    boxes = np.zeros_like(alphas)
    for index, (name, side) in enumerate(entries):
        small = _shrink(sprite(name, side))
        cut = small.shape[0]
        colors[index, :, :cut, :cut] = small[..., :3].transpose(2, 0, 1)
        alphas[index, :cut, :cut] = small[..., 3]
        boxes[index, :cut, :cut] = 1

    def spectra(planes: Plane) -> Spectrum:
        return np.conj(np.fft.rfft2(planes)).astype(np.complex64)

    return _Bank(
        names=tuple(name for name, _ in entries),
        sides=np.array([side // SCALE for _, side in entries]),
        colors=spectra(colors),
        color_alpha=spectra(colors * alphas[:, None]),
        alpha=spectra(alphas),
        alpha_squared=spectra(alphas**2),
        box=spectra(boxes),
        energy=(colors**2).sum(axis=(1, 2, 3)),
        covered=alphas.sum(axis=(1, 2)),
    )


def _explained(picture: Plane, empty: Plane, bank: _Bank) -> Plane:
    """R2 of every sprite (N) with its top left corner at every cell: (N, h, w); impossible placements are -inf."""
    height, width, _ = picture.shape
    change = (picture - empty).transpose(2, 0, 1)
    ground = empty.transpose(2, 0, 1)

    def spectrum(plane: Plane) -> Spectrum:
        return np.fft.rfft2(plane).astype(np.complex64)

    # sum (D - m (s - B))^2 = sum D^2 - 2 sum D m s + 2 sum D B m + energy
    # energy = sum s^2 - 2 sum s m B + sum m^2 B^2
    energy_hat = spectrum((ground**2).sum(axis=0)) * bank.alpha_squared
    energy_hat -= 2 * np.einsum("chw,nchw->nhw", spectrum(ground), bank.color_alpha)
    cross_hat = np.einsum("chw,nchw->nhw", spectrum(change), bank.colors)
    cross_hat -= spectrum((change * ground).sum(axis=0)) * bank.alpha
    error_hat = spectrum((change**2).sum(axis=0)) * bank.box - 2 * cross_hat
    energy = np.fft.irfft2(energy_hat, s=(height, width)) + bank.energy[:, None, None]
    error = np.fft.irfft2(error_hat, s=(height, width)) + energy
    floor = MIN_ENERGY * 3 * bank.covered[:, None, None]
    score = np.where(energy > floor, 1 - error / np.maximum(energy, floor), -np.inf)
    rows, columns = np.arange(height)[None, :, None], np.arange(width)[None, None, :]
    fits = (rows <= height - bank.sides[:, None, None]) & (columns <= width - bank.sides[:, None, None])
    return np.where(fits, score, -np.inf).astype(np.float32)


def _read_background(picture: Plane) -> tuple[str, float, Plane]:
    """The nearest background, its error, and what it looks like bare (a plain one in the picture's own shade)."""
    height, width, _ = picture.shape
    best: tuple[str, float, Plane] | None = None
    for name in BACKGROUNDS:
        empty = _shrink(background(name, width * SCALE, height * SCALE).astype(np.float32) / np.float32(255))
        error = float(np.median(np.abs(picture - empty).mean(axis=2)))
        error += 0.25 * float(np.clip(np.abs(picture - empty).mean(axis=2), 0, 0.2).mean())
        if best is None or error < best[1]:
            best = (name, error, empty)
    assert best is not None
    name, error, empty = best
    if name in COLORS:
        edge = np.concatenate([picture[:3].reshape(-1, 3), picture[-3:].reshape(-1, 3), picture[:, :3].reshape(-1, 3)])
        shade = np.median(np.concatenate([edge, picture[:, -3:].reshape(-1, 3)]), axis=0)
        empty = np.broadcast_to(shade.astype(np.float32), picture.shape)
    return name, error, empty


def read_picture(pixels: NDArray[np.uint8]) -> Reading:
    """Find the background and all objects of a (height, width, 3) uint8 picture of the embedded world's scale."""
    picture = _shrink(pixels.astype(np.float32) / np.float32(255))
    name, error, empty = _read_background(picture)
    bank = _bank(*picture.shape[:2])
    score = _explained(picture, empty, bank)
    found: list[Found] = []
    while len(found) < MAX_OBJECTS and (one := _best_placement(score, bank, picture, empty)) is not None:
        found.append(one)
        _clear_around(score, bank, one)
    return Reading(name, error, tuple(found))


def _best_placement(score: Plane, bank: _Bank, picture: Plane, empty: Plane) -> Found | None:
    index, y, x = (int(i) for i in np.unravel_index(int(score.argmax()), score.shape))
    r2 = float(score[index, y, x])
    if r2 < MIN_R2:
        return None
    side, name = int(bank.sides[index]), bank.names[index]
    drawn = _shrink(sprite(name, side * SCALE))
    spot = (slice(y, y + side), slice(x, x + side))
    expected = drawn[..., :3] + (1 - drawn[..., 3:]) * empty[spot]
    sharpness = _edge_energy(picture[spot]) / max(_edge_energy(expected), 1e-6)
    return Found(name, SCALE * (x + side / 2), SCALE * (y + side / 2), side * SCALE, r2, sharpness)


def _edge_energy(patch: Plane) -> float:
    return float(np.square(np.diff(patch, axis=0)).sum() + np.square(np.diff(patch, axis=1)).sum())


def _clear_around(score: Plane, bank: _Bank, one: Found) -> None:
    """Rule out every placement whose square would overlap ``one`` by more than a fifth of a side."""
    for side in np.unique(bank.sides):
        reach = 0.8 * (one.size_px / SCALE + side) / 2
        left, top = one.x_px / SCALE - side / 2, one.y_px / SCALE - side / 2
        rows = slice(max(0, round(top - reach)), max(0, round(top + reach) + 1))
        columns = slice(max(0, round(left - reach)), max(0, round(left + reach) + 1))
        score[bank.sides == side, rows, columns] = -np.inf


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


def check(pixels: NDArray[np.uint8], scene: Scene) -> Verdict:
    """Does the (height, width, 3) uint8 picture show exactly this scene?"""
    reading = read_picture(pixels)
    wanted = [placed.name for placed in scene.objects]
    crisp = all(found.sharpness >= MIN_SHARPNESS for found in reading.objects)
    objects = crisp and sorted(found.name for found in reading.objects) == sorted(wanted)
    relation = objects
    if objects and scene.relation is not None:
        by_name = {found.name: found for found in reading.objects}
        relation = _relation_holds(scene.relation, by_name[wanted[0]], by_name[wanted[1]])
    return Verdict(reading.background == scene.background, objects, relation, reading)


"""A mark in the pixels that says that a machine painted them: not seen, and still there after JPEG or WebP.

In every 8 x 8 block two coefficients of the luma's cosine transform, the lowest across and the lowest down, are moved
to the nearest place that says a bit (quantization index modulation: Chen and Wornell, 2001, IEEE Trans. Inf. Theory
47(4)): by at most half of ``STEP``, no pixel by more than 2 of 255. The bits are those of one word of 16, which its
checksum ends, repeated all over the picture in an order and with signs that are fixed and look like noise. The word
says what kind of picture it is, never whose.

Pictures are marked when they leave by a door. Latents, what the engine gives, what sweeps and the page's experiments
measure, and what a mask keeps of somebody's picture, bear none. The mark is made of the pixels alone, and all sums are
of whole numbers: equal pictures are marked with equal bytes on every machine. Cropping by other than whole tiles of
128 pixels, and resizing, lose it.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import Final, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.types import Picture

Kind = Literal["generated", "composite"]
NumberT = TypeVar("NumberT", np.int8, np.float64)

STEP: Final = 12.0
"""Between two places that say the same bit, in units of an orthonormal transform: noise of 52 dB. At 20 skies show the
blocks once a small picture is enlarged; at 8 JPEG at quality 80 takes the mark away."""

SURE_Z: Final = 7.0
"""Standard deviations from which on the votes are no chance: signs that are drawn agree so well in exp(-z * z / 2) of
pictures at most, whatever these are (Hoeffding), for each of two words in each window: 1e-8 of those of 512 pixels."""

_BLOCK: Final = 8
_TILE: Final = 16
_BITS: Final = 16
_VERSION: Final = 1
_KINDS: Final[dict[Kind, int]] = {"generated": 1, "composite": 2}
_SCALE: Final = 1 << 12
_COSINES: Final = np.rint(_SCALE * np.cos((2 * np.arange(_BLOCK) + 1) * math.pi / 16))
"""Whole numbers, and sums of their products exact, in whatever order they are made."""

_UNIT: Final = math.sqrt(1 / 8) / 2 / _SCALE
"""What turns sums with ``_COSINES`` into coefficients, and these into pixels."""


class Watermark(NamedTuple):
    """What was found in a picture.

    kind        what the word says
    confidence  the share of the votes, each by its weight, that agree with it: 0.5 is chance, 1 all of them
    z           how far from chance they are, in standard deviations; both of the window that says it most clearly
    """

    kind: Kind
    confidence: float
    z: float


def embed(picture: Picture, kind: Kind) -> Picture:
    """``picture`` with the mark in it; as it is where it is smaller than a block, or a mask."""
    rows, columns = picture.height_px // _BLOCK, picture.width_px // _BLOCK
    if picture.channels != 3 or rows == 0 or columns == 0:
        return picture
    pixels = picture.array
    offsets = _spread(_tile(kind), rows, columns) - _coefficients(pixels, rows, columns)
    offsets -= STEP * np.rint(offsets / STEP)
    waves, cosines = (offsets * _UNIT).astype(np.float32), _COSINES.astype(np.float32)
    height, width = rows * _BLOCK, columns * _BLOCK
    across = (waves[0, :, :, None] * cosines).reshape(rows, 1, width)
    down = np.repeat(waves[1], _BLOCK, axis=1)[:, None] * cosines[:, None]  # (rows, 8, width)
    levels = np.zeros(pixels.shape[:2], dtype=np.int8)
    levels[:height, :width] = np.rint(across + down).reshape(height, width)
    return Picture.from_array(_added(pixels, levels))


def detect(picture: Picture) -> Watermark | None:
    """The mark in ``picture``, all over it or in a part, or ``None`` where there is none that could not be chance."""
    rows, columns = picture.height_px // _BLOCK, picture.width_px // _BLOCK
    if picture.channels != 3 or rows == 0 or columns == 0:
        return None
    phases = _coefficients(picture.array, rows, columns) * (2 * math.pi / STEP)
    said: NDArray[np.float64] = np.sin(phases) * _spread(_SIGNS, rows, columns)
    votes = _spread(_VOTES, rows, columns)
    windows = _Windows(rows, columns)
    spread = np.sqrt(windows.sums(said * said)) + 1e-9
    best: Watermark | None = None
    for kind in _KINDS:
        agreed = windows.sums(said * _bits(kind)[votes])
        place = int(np.argmax(agreed / spread))
        z = float(agreed[place] / spread[place])
        if z >= max(SURE_Z, best.z if best else 0.0):
            best = Watermark(kind, (1 + float(agreed[place] / windows.sums(np.abs(said))[place])) / 2, z)
    return best


class _Windows:
    """All of a picture, and squares of 8, 16 and 32 blocks that overlap by half: where a mark may be."""

    def __init__(self, rows: int, columns: int) -> None:
        edges = [np.array([[0], [rows], [0], [columns]])]
        for side in (8, 16, 32):
            tops, lefts = (np.arange(0, max(0, end - side) + 1, side // 2) for end in (rows, columns))
            if side < max(rows, columns):
                top, left = (grid.ravel() for grid in np.meshgrid(tops, lefts, indexing="ij"))
                edges.append(np.stack([top, (top + side).clip(0, rows), left, (left + side).clip(0, columns)]))
        self._edge = np.concatenate(edges, axis=1)

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of ``values`` (2, rows, columns) within each of them."""
        table = np.pad(values.sum(axis=0).cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
        top, bottom, left, right = self._edge
        found: NDArray[np.float64] = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
        return found.clip(0.0) if values.min() >= 0 else found


def _coefficients(pixels: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.float64]:
    """(2, rows, columns): of each block's luma the lowest coefficient across, and the lowest down."""
    luma = np.asarray(Image.fromarray(pixels).convert("L"))[: rows * _BLOCK, : columns * _BLOCK]
    of_columns = luma.reshape(rows, _BLOCK, -1).sum(axis=1, dtype=np.uint16)
    slices = [luma[:, place::_BLOCK].astype(np.uint16) for place in range(_BLOCK)]  # faster than along an axis of 8
    of_rows = np.asarray(sum(slices[1:], slices[0]))
    across = of_columns.reshape(rows, columns, _BLOCK).astype(np.float64) @ _COSINES
    down = _COSINES @ of_rows.reshape(rows, _BLOCK, columns).astype(np.float64)
    return np.stack([across, down]) * _UNIT


def _added(pixels: NDArray[np.uint8], levels: NDArray[np.int8]) -> NDArray[np.uint8]:
    """``pixels`` with ``levels`` added to all their colours, within 0 .. 255."""
    up, down = (Image.fromarray(half.view(np.uint8)) for half in (np.maximum(levels, 0), -np.minimum(levels, 0)))
    added: NDArray[np.uint8] = np.minimum(np.asarray(Image.merge("RGB", [up] * 3)), 255 - pixels) + pixels
    added -= np.minimum(np.asarray(Image.merge("RGB", [down] * 3)), added)
    return added


def _spread(table: NDArray[NumberT], rows: int, columns: int) -> NDArray[NumberT]:
    """``table`` (2, 16, 16) repeated over (2, rows, columns)."""
    return np.tile(table, (1, -(-rows // _TILE), -(-columns // _TILE)))[:, :rows, :columns]


@cache
def _tile(kind: Kind) -> NDArray[np.float64]:
    """(2, 16, 16): where the word of ``kind`` wants the coefficients of a tile."""
    wanted: NDArray[np.float64] = _bits(kind)[_VOTES] * _SIGNS * (STEP / 4)
    return wanted


def _bits(kind: Kind) -> NDArray[np.float64]:
    """The word of ``kind``, each bit as 1 or -1."""
    return np.array([1.0 if _word(kind) >> place & 1 else -1.0 for place in range(_BITS)])


def _word(kind: Kind) -> int:
    """What is written: version, kind, and their CRC-8."""
    data = _VERSION << 4 | _KINDS[kind]
    rest = data
    for _ in range(8):
        rest = (rest << 1) ^ (0x107 if rest & 0x80 else 0)
    return data << 8 | rest


def _tables() -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """For each place of a tile, the bit that it votes for, each as often as any other, and the sign of its vote."""
    count = 2 * _TILE * _TILE
    noise = np.frombuffer(hashlib.shake_256(b"diffserve watermark 1").digest(9 * count), dtype=np.uint8)
    order = np.argsort(noise[count:].view("<u8"), kind="stable")
    votes = np.empty(count, dtype=np.int8)
    votes[order] = np.arange(count) % _BITS
    return votes.reshape(2, _TILE, _TILE), ((noise[:count] & 1) * 2 - 1).astype(np.int8).reshape(2, _TILE, _TILE)


_VOTES, _SIGNS = _tables()

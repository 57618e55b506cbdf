"""Invisible watermark of generated images. It survives JPEG and WebP, but neither resizing nor cropping across tiles.

Quantization index modulation (Chen and Wornell, 2001, IEEE Trans. Inf. Theory 47(4)) of the lowest horizontal and the
lowest vertical luma DCT coefficient of each 8 x 8 block. They encode a 16-bit word (version, kind, CRC-8) in tiles of
128 pixels. The result depends on the pixels only and is byte-identical on every machine.
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
"""Quantization step of the coefficients of the orthonormal DCT; the PSNR is 52 dB.

At 20, blocks become visible in the sky of enlarged images. At 8, JPEG at quality 80 removes the watermark.
"""

MIN_Z: Final = 7.0
"""Detection threshold in standard deviations.

The probability of a false positive is at most exp(-z * z / 2) for each word and window, for any image (Hoeffding):
1e-8 for an image of 512 x 512 pixels.
"""

_BLOCK: Final = 8
_TILE: Final = 16
_BITS: Final = 16
_VERSION: Final = 1
_KINDS: Final[dict[Kind, int]] = {"generated": 1, "composite": 2}
_SCALE: Final = 1 << 12
_COSINES: Final = np.rint(_SCALE * np.cos((2 * np.arange(_BLOCK) + 1) * math.pi / 16))
"""Integer cosines, so that sums of products are exact in any order."""

_UNIT: Final = math.sqrt(1 / 8) / 2 / _SCALE
"""Scale from sums with ``_COSINES`` to coefficients, and from coefficients to pixels."""


class Watermark(NamedTuple):
    """Detected watermark, measured in the window with the highest z.

    Attributes:
        kind: Kind of image that the watermark encodes.
        confidence: Weighted fraction of the votes that agree with the kind; 0.5 is chance.
        z: Distance of the votes from chance, in standard deviations.
    """

    kind: Kind
    confidence: float
    z: float


def embed(picture: Picture, kind: Kind) -> Picture:
    """Embed the watermark for ``kind``; return ``picture`` unchanged if it is a mask or smaller than a block."""
    rows, columns = picture.height_px // _BLOCK, picture.width_px // _BLOCK
    if picture.channels != 3 or rows == 0 or columns == 0:
        return picture
    pixels = picture.array
    offsets = _repeat(_tile(kind), rows, columns) - _coefficients(pixels, rows, columns)
    offsets -= STEP * np.rint(offsets / STEP)
    amplitudes, cosines = (offsets * _UNIT).astype(np.float32), _COSINES.astype(np.float32)
    height, width = rows * _BLOCK, columns * _BLOCK
    horizontal = (amplitudes[0, :, :, None] * cosines).reshape(rows, 1, width)
    vertical = np.repeat(amplitudes[1], _BLOCK, axis=1)[:, None] * cosines[:, None]  # (rows, 8, width)
    levels = np.zeros(pixels.shape[:2], dtype=np.int8)
    levels[:height, :width] = np.rint(horizontal + vertical).reshape(height, width)
    return Picture.from_array(_add_levels(pixels, levels))


def detect(picture: Picture) -> Watermark | None:
    """Detect a watermark in all of ``picture`` or in a part of it; ``None`` if there is none above ``MIN_Z``."""
    rows, columns = picture.height_px // _BLOCK, picture.width_px // _BLOCK
    if picture.channels != 3 or rows == 0 or columns == 0:
        return None
    phases = _coefficients(picture.array, rows, columns) * (2 * math.pi / STEP)
    signals: NDArray[np.float64] = np.sin(phases) * _repeat(_SIGNS, rows, columns)
    votes = _repeat(_VOTES, rows, columns)
    windows = _Windows(rows, columns)
    deviations = np.sqrt(windows.sums(signals * signals)) + 1e-9
    best: Watermark | None = None
    for kind in _KINDS:
        agreement = windows.sums(signals * _bits(kind)[votes])
        window = int(np.argmax(agreement / deviations))
        z = float(agreement[window] / deviations[window])
        if z >= max(MIN_Z, best.z if best else 0.0):
            share = float(agreement[window] / windows.sums(np.abs(signals))[window])
            best = Watermark(kind, (1 + share) / 2, z)
    return best


class _Windows:
    """Search windows: the whole image, and squares of 8, 16 and 32 blocks that overlap by half."""

    def __init__(self, rows: int, columns: int) -> None:
        bounds = [np.array([[0], [rows], [0], [columns]])]
        for side in (8, 16, 32):
            tops, lefts = (np.arange(0, max(0, end - side) + 1, side // 2) for end in (rows, columns))
            if side < max(rows, columns):
                top, left = (grid.ravel() for grid in np.meshgrid(tops, lefts, indexing="ij"))
                bounds.append(np.stack([top, (top + side).clip(0, rows), left, (left + side).clip(0, columns)]))
        self._bounds = np.concatenate(bounds, axis=1)

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of ``values`` (2, rows, columns) in each window."""
        table = np.pad(values.sum(axis=0).cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
        top, bottom, left, right = self._bounds
        totals: NDArray[np.float64] = table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left]
        return totals.clip(0.0) if values.min() >= 0 else totals


def _coefficients(pixels: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.float64]:
    """Return the lowest horizontal and vertical luma coefficient of each block, (2, rows, columns)."""
    luma = np.asarray(Image.fromarray(pixels).convert("L"))[: rows * _BLOCK, : columns * _BLOCK]
    column_sums = luma.reshape(rows, _BLOCK, -1).sum(axis=1, dtype=np.uint16)
    slices = [luma[:, offset::_BLOCK].astype(np.uint16) for offset in range(_BLOCK)]  # faster than a sum over an axis
    row_sums = np.asarray(sum(slices[1:], slices[0]))
    horizontal = column_sums.reshape(rows, columns, _BLOCK).astype(np.float64) @ _COSINES
    vertical = _COSINES @ row_sums.reshape(rows, _BLOCK, columns).astype(np.float64)
    return np.stack([horizontal, vertical]) * _UNIT


def _add_levels(pixels: NDArray[np.uint8], levels: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Add ``levels`` to all color channels of ``pixels``, clipped to 0 .. 255."""
    signs = (np.maximum(levels, 0), -np.minimum(levels, 0))
    increase, decrease = (Image.fromarray(sign.view(np.uint8)) for sign in signs)
    added: NDArray[np.uint8] = np.minimum(np.asarray(Image.merge("RGB", [increase] * 3)), 255 - pixels) + pixels
    added -= np.minimum(np.asarray(Image.merge("RGB", [decrease] * 3)), added)
    return added


def _repeat(table: NDArray[NumberT], rows: int, columns: int) -> NDArray[NumberT]:
    """Repeat ``table`` (2, 16, 16) over (2, rows, columns)."""
    return np.tile(table, (1, -(-rows // _TILE), -(-columns // _TILE)))[:, :rows, :columns]


@cache
def _tile(kind: Kind) -> NDArray[np.float64]:
    """Return the target phases of the coefficients in a tile for ``kind``, (2, 16, 16)."""
    targets: NDArray[np.float64] = _bits(kind)[_VOTES] * _SIGNS * (STEP / 4)
    return targets


def _bits(kind: Kind) -> NDArray[np.float64]:
    """Return the bits of the word for ``kind`` as 1 or -1."""
    return np.array([1.0 if _word(kind) >> index & 1 else -1.0 for index in range(_BITS)])


def _word(kind: Kind) -> int:
    """Return the 16-bit word for ``kind``: version, kind and CRC-8."""
    data = _VERSION << 4 | _KINDS[kind]
    remainder = data
    for _ in range(8):
        remainder = (remainder << 1) ^ (0x107 if remainder & 0x80 else 0)
    return data << 8 | remainder


def _tables() -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Return the bit that each coefficient of a tile encodes, all equally often, and its sign; both (2, 16, 16)."""
    count = 2 * _TILE * _TILE
    noise = np.frombuffer(hashlib.shake_256(b"diffserve watermark 1").digest(9 * count), dtype=np.uint8)
    order = np.argsort(noise[count:].view("<u8"), kind="stable")
    votes = np.empty(count, dtype=np.int8)
    votes[order] = np.arange(count) % _BITS
    return votes.reshape(2, _TILE, _TILE), ((noise[:count] & 1) * 2 - 1).astype(np.int8).reshape(2, _TILE, _TILE)


_VOTES, _SIGNS = _tables()

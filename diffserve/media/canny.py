"""Canny's edge detector, for ControlNets that were trained on edges. No torch.

Canny, "A Computational Approach to Edge Detection", IEEE PAMI 1986: Gaussian, gradient, thinning to the ridges of its
magnitude, and hysteresis. Gradient and thresholds are those that ControlNets for edges were trained with: Sobel's 3 x 3
of 8-bit gray, |gx| + |gy|, 100 and 200.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.bounds import check
from diffserve.models.controlnets import CANNY_THRESHOLDS, PARAM

SIGMA: Final = 1.0
WEAK, STRONG = CANNY_THRESHOLDS
GREY: Final = (0.299, 0.587, 0.114)
"""Of red, green and blue (ITU-R BT.601)."""
SMOOTHING: Final = np.array([1.0, 2.0, 1.0], dtype=np.float32)
"""Sobel's, along an edge."""
MAX_PIXELS: Final = 4096 * 2048

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


def edge_map(picture: Pixels, weak: float = WEAK, strong: float = STRONG, resolution: int = 0) -> Pixels:
    """Return the edges of ``picture`` as a control map of its size, (height, width, 3).

    Args:
        picture: Pixels (height, width, 3).
        weak: Gradient above which a pixel that leads to a strong one is an edge.
        strong: Gradient above which a pixel is an edge.
        resolution: Pixels of the shorter side at which edges are found; 0: as many as the picture has.

    Raises:
        InvalidRequest: The picture has too many pixels at this resolution.
    """
    height, width = picture.shape[:2]
    scale = resolution / min(height, width) if resolution else 1.0
    size = max(1, round(width * scale)), max(1, round(height * scale))
    message = f"edges are found in {MAX_PIXELS} pixels at most, the picture has {size[0]}x{size[1]}; make it smaller."
    check(size[0] * size[1] <= MAX_PIXELS, message, PARAM)
    if scale != 1.0:
        picture = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS), dtype=np.uint8)
    edges = canny(picture, weak, strong)
    if scale != 1.0:
        resample = Image.Resampling.BOX if scale > 1.0 else Image.Resampling.NEAREST
        edges = np.asarray(Image.fromarray(edges).resize((width, height), resample), dtype=np.uint8)
    return np.repeat(edges[..., None], 3, axis=2)


def canny(picture: Pixels, weak: float = WEAK, strong: float = STRONG) -> Pixels:
    """Return (height, width) uint8: 255 on the edges of ``picture`` (height, width, 3), 0 elsewhere.

    An edge is a pixel whose gradient is the largest across it and above ``weak``, joined by others to one
    above ``strong``.
    """
    padded = np.pad(_blurred(picture.astype(np.float32) @ np.asarray(GREY, dtype=np.float32)), 1, mode="edge")
    gx = _weighed(padded[:, 2:] - padded[:, :-2], SMOOTHING)
    gy = _weighed((padded[2:] - padded[:-2]).T, SMOOTHING).T
    magnitude = np.abs(gx) + np.abs(gy)
    ridges = np.where(_is_ridge(magnitude, gx, gy), magnitude, 0.0)
    return np.where(_joined(ridges > weak, ridges > strong), 255, 0).astype(np.uint8)


def _blurred(grey: Floats) -> Floats:
    """Blur by a Gaussian of ``SIGMA`` pixels, out to three sigmas."""
    reach = math.ceil(3 * SIGMA)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / SIGMA) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for _ in range(2):
        grey = _weighed(np.pad(grey, ((reach, reach), (0, 0)), mode="edge"), weights).T
    return grey


def _weighed(padded: Floats, weights: Floats) -> Floats:
    """Return (height, width): weighted sums down the columns of (height + len(weights) - 1, width)."""
    height = len(padded) - len(weights) + 1
    total: Floats = weights[0] * padded[:height]
    for place in range(1, len(weights)):
        total += weights[place] * padded[place : place + height]
    return total


def _is_ridge(magnitude: Floats, gx: Floats, gy: Floats) -> NDArray[np.bool_]:
    """Return where ``magnitude`` is largest across the edge, in the nearest of four directions.

    It is above that of the pixel before and not below that of the pixel after: of two equal ones the first is taken.
    """
    padded = np.pad(magnitude, 1)
    height, width = magnitude.shape

    def shifted(down: int, right: int) -> Floats:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    steep, flat = np.abs(gy) > np.abs(gx) * math.tan(3 * math.pi / 8), np.abs(gy) < np.abs(gx) * math.tan(math.pi / 8)
    falling = (gx > 0) == (gy > 0)
    ridge = np.zeros(magnitude.shape, dtype=np.bool_)
    for has_direction, step in (
        (flat, (0, 1)),
        (steep, (1, 0)),
        (~flat & ~steep & falling, (1, 1)),
        (~flat & ~steep & ~falling, (1, -1)),
    ):
        before, behind = shifted(-step[0], -step[1]), shifted(*step)
        ridge |= has_direction & (magnitude > before) & (magnitude >= behind)
    return ridge


def _joined(weak: NDArray[np.bool_], strong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the pixels of ``weak`` that are connected to ``strong``, searched from there outwards."""
    height, width = weak.shape
    left = np.pad(weak, 1).ravel()  # a margin, so that every pixel has neighbors
    stride = width + 2
    around = np.array([row * stride + column for row in (-1, 0, 1) for column in (-1, 0, 1) if row or column])
    is_edge = np.zeros_like(left)
    front = np.flatnonzero(np.pad(strong, 1).ravel())
    while front.size:
        is_edge[front] = True
        left[front] = False
        near = np.unique((front[:, None] + around).ravel())
        front = near[left[near]]
    return is_edge.reshape(height + 2, stride)[1:-1, 1:-1]

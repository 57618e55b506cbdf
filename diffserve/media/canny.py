"""Canny edge detection for ControlNets trained on edges, in NumPy without torch.

Canny, "A Computational Approach to Edge Detection", IEEE PAMI 1986: Gaussian blur, gradient, non-maximum suppression,
hysteresis. The defaults match the training of edge ControlNets: 3 x 3 Sobel on 8-bit gray, |gx| + |gy|, thresholds 100
and 200.
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
"""Luma weights of red, green and blue (ITU-R BT.601)."""
SMOOTHING: Final = np.array([1.0, 2.0, 1.0], dtype=np.float32)
"""Weights of the Sobel operator along an edge."""
MAX_PIXELS: Final = 4096 * 2048

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


def edge_map(picture: Pixels, weak: float = WEAK, strong: float = STRONG, resolution: int = 0) -> Pixels:
    """Return the edges of ``picture`` as a control map (height, width, 3) of the same size.

    Args:
        picture: Pixels (height, width, 3).
        weak: Gradient above which a pixel is an edge if it is connected to a strong pixel.
        strong: Gradient above which a pixel is an edge.
        resolution: Shorter side in pixels at which edges are detected; 0 keeps the size of the image.

    Raises:
        InvalidRequest: The image has too many pixels at this resolution.
    """
    height, width = picture.shape[:2]
    scale = resolution / min(height, width) if resolution else 1.0
    size = max(1, round(width * scale)), max(1, round(height * scale))
    message = f"edges are detected in at most {MAX_PIXELS} pixels, the image has {size[0]}x{size[1]}; make it smaller."
    check(size[0] * size[1] <= MAX_PIXELS, message, PARAM)
    if scale != 1.0:
        picture = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS), dtype=np.uint8)
    edges = canny(picture, weak, strong)
    if scale != 1.0:
        resample = Image.Resampling.BOX if scale > 1.0 else Image.Resampling.NEAREST
        edges = np.asarray(Image.fromarray(edges).resize((width, height), resample), dtype=np.uint8)
    return np.repeat(edges[..., None], 3, axis=2)


def canny(picture: Pixels, weak: float = WEAK, strong: float = STRONG) -> Pixels:
    """Return an edge image (height, width) uint8: 255 on the edges of ``picture``, 0 elsewhere.

    An edge pixel has a gradient above ``weak`` that is a local maximum across the edge, and is connected through other
    edge pixels to one above ``strong``.

    Args:
        picture: Pixels (height, width, 3).
        weak: Lower threshold of the gradient.
        strong: Upper threshold of the gradient.
    """
    padded = np.pad(_blur(picture.astype(np.float32) @ np.asarray(GREY, dtype=np.float32)), 1, mode="edge")
    gx = _convolve_columns(padded[:, 2:] - padded[:, :-2], SMOOTHING)
    gy = _convolve_columns((padded[2:] - padded[:-2]).T, SMOOTHING).T
    magnitude = np.abs(gx) + np.abs(gy)
    ridges = np.where(_is_ridge(magnitude, gx, gy), magnitude, 0.0)
    return np.where(_connected_edges(ridges > weak, ridges > strong), 255, 0).astype(np.uint8)


def _blur(grey: Floats) -> Floats:
    """Apply a Gaussian blur of ``SIGMA`` pixels, truncated at three sigmas."""
    reach = math.ceil(3 * SIGMA)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / SIGMA) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for _ in range(2):
        grey = _convolve_columns(np.pad(grey, ((reach, reach), (0, 0)), mode="edge"), weights).T
    return grey


def _convolve_columns(padded: Floats, weights: Floats) -> Floats:
    """Correlate the columns of ``padded`` (height + len(weights) - 1, width) with ``weights`` to (height, width)."""
    height = len(padded) - len(weights) + 1
    total: Floats = weights[0] * padded[:height]
    for offset in range(1, len(weights)):
        total += weights[offset] * padded[offset : offset + height]
    return total


def _is_ridge(magnitude: Floats, gx: Floats, gy: Floats) -> NDArray[np.bool_]:
    """Return a mask of the local maxima of ``magnitude`` across the edge, in the nearest of four directions.

    A maximum exceeds the previous pixel and is at least the next pixel, so that the first of two equal pixels counts.
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
        previous, following = shifted(-step[0], -step[1]), shifted(*step)
        ridge |= has_direction & (magnitude > previous) & (magnitude >= following)
    return ridge


def _connected_edges(weak: NDArray[np.bool_], strong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the pixels of ``weak`` that are connected to ``strong``, by a breadth-first search from ``strong``."""
    height, width = weak.shape
    unvisited = np.pad(weak, 1).ravel()  # a margin, so that every pixel has neighbors
    stride = width + 2
    neighbors = np.array([row * stride + column for row in (-1, 0, 1) for column in (-1, 0, 1) if row or column])
    is_edge = np.zeros_like(unvisited)
    front = np.flatnonzero(np.pad(strong, 1).ravel())
    while front.size:
        is_edge[front] = True
        unvisited[front] = False
        near = np.unique((front[:, None] + neighbors).ravel())
        front = near[unvisited[near]]
    return is_edge.reshape(height + 2, stride)[1:-1, 1:-1]

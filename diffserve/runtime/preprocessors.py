"""From a picture to the control map that a ControlNet was trained on: edges, found here, and what a library adds.

``canny`` is Canny's detector (Canny, "A Computational Approach to Edge Detection", IEEE PAMI 1986): Gaussian, gradient,
thinning to the ridges of its magnitude, and hysteresis. Gradient and thresholds are those that ControlNets for edges
were trained with: Sobel's 3 x 3 of 8-bit grey, |gx| + |gy|, 100 and 200.
"""

from __future__ import annotations

import logging
import math
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.controlnets import PARAM, PASSED_THROUGH
from diffserve.errors import InvalidRequest
from diffserve.runtime.loading.library_imports import import_quietly

CANNY: Final = "canny"
LIBRARY: Final = "controlnet_aux"
RANDOM: Final = "shuffle"
SIGMA: Final = 1.0
WEAK: Final = 100.0
STRONG: Final = 200.0
GREY: Final = (0.299, 0.587, 0.114)
"""Of red, green and blue (ITU-R BT.601)."""
SMOOTHING: Final = np.array([1.0, 2.0, 1.0], dtype=np.float32)
"""Sobel's, along an edge."""

logger = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


def check_preprocessor(name: str) -> None:
    """InvalidRequest for one that is not here."""
    if name in (PASSED_THROUGH, CANNY):
        return
    names, trouble = _library()
    if name in names:
        return
    known = ", ".join((PASSED_THROUGH, CANNY, *names))
    more = f"; others come with the package {LIBRARY}, which {trouble}" if trouble else ""
    raise InvalidRequest(f"the preprocessor is {name!r}; there are {known}{more}.", param=PARAM)


def preprocess(name: str, picture: Pixels) -> Pixels:
    """The control map (height, width, 3) of ``picture`` (height, width, 3). Raises InvalidRequest."""
    if name == PASSED_THROUGH:
        return picture
    if name == CANNY:
        return np.repeat(canny(picture)[..., None], 3, axis=2)
    check_preprocessor(name)
    height, width = picture.shape[:2]
    try:
        found = import_quietly(f"{LIBRARY}.processor", "Processor")(name)(Image.fromarray(picture), to_pil=True)
    except Exception as error:  # its own weights are looked for on the network, which is not asked here
        said = f"the preprocessor {name!r} of {LIBRARY} cannot be used ({type(error).__name__}); give a control map."
        raise InvalidRequest(said, param=PARAM) from error
    return np.asarray(found.convert("RGB").resize((width, height), Image.Resampling.LANCZOS), dtype=np.uint8)


def canny(picture: Pixels, weak: float = WEAK, strong: float = STRONG) -> Pixels:
    """(height, width) uint8, 255 on the edges of ``picture`` (height, width, 3), else 0.

    An edge is a pixel whose gradient is the largest of those across it and above ``weak``, joined by others to one
    above ``strong``.
    """
    padded = np.pad(_blurred(picture.astype(np.float32) @ np.asarray(GREY, dtype=np.float32)), 1, mode="edge")
    gx = _weighed(padded[:, 2:] - padded[:, :-2], SMOOTHING)
    gy = _weighed((padded[2:] - padded[:-2]).T, SMOOTHING).T
    magnitude = np.abs(gx) + np.abs(gy)
    ridges = np.where(_is_ridge(magnitude, gx, gy), magnitude, 0.0)
    return np.where(_joined(ridges > weak, ridges > strong), 255, 0).astype(np.uint8)


def _blurred(grey: Floats) -> Floats:
    """By a Gaussian of ``SIGMA`` pixels, out to three of them."""
    reach = math.ceil(3 * SIGMA)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / SIGMA) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for _ in range(2):
        grey = _weighed(np.pad(grey, ((reach, reach), (0, 0)), mode="edge"), weights).T
    return grey


def _weighed(padded: Floats, weights: Floats) -> Floats:
    """(height, width): sums of (height + len(weights) - 1, width) down the columns, weighted."""
    height = len(padded) - len(weights) + 1
    total: Floats = weights[0] * padded[:height]
    for place in range(1, len(weights)):
        total += weights[place] * padded[place : place + height]
    return total


def _is_ridge(magnitude: Floats, gx: Floats, gy: Floats) -> NDArray[np.bool_]:
    """Where ``magnitude`` is above that of the pixel before and not below that of the pixel behind, across the edge in
    the nearest of four directions; of two equal ones the first is taken."""
    padded = np.pad(magnitude, 1)
    height, width = magnitude.shape

    def shifted(down: int, right: int) -> Floats:
        return padded[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    steep, flat = np.abs(gy) > np.abs(gx) * math.tan(3 * math.pi / 8), np.abs(gy) < np.abs(gx) * math.tan(math.pi / 8)
    falling = (gx > 0) == (gy > 0)
    ridge = np.zeros(magnitude.shape, dtype=np.bool_)
    for chosen, step in (
        (flat, (0, 1)),
        (steep, (1, 0)),
        (~flat & ~steep & falling, (1, 1)),
        (~flat & ~steep & ~falling, (1, -1)),
    ):
        before, behind = shifted(-step[0], -step[1]), shifted(*step)
        ridge |= chosen & (magnitude > before) & (magnitude >= behind)
    return ridge


def _joined(weak: NDArray[np.bool_], strong: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Those of ``weak`` from which a way over its neighbours leads to ``strong``, found from there outwards."""
    height, width = weak.shape
    left = np.pad(weak, 1).ravel()  # a margin, so that no neighbour lies over the edge
    stride = width + 2
    around = np.array([row * stride + column for row in (-1, 0, 1) for column in (-1, 0, 1) if row or column])
    found = np.zeros_like(left)
    front = np.flatnonzero(np.pad(strong, 1).ravel())
    while front.size:
        found[front] = True
        left[front] = False
        near = np.unique((front[:, None] + around).ravel())
        front = near[left[near]]
    return found.reshape(height + 2, stride)[1:-1, 1:-1]


def _library() -> tuple[tuple[str, ...], str]:
    """The names of the library, less what gives another map each time; and why there are none."""
    if find_spec(LIBRARY) is None:
        return (), "is not installed here"
    try:
        known: dict[str, Any] = import_quietly(f"{LIBRARY}.processor", "MODELS")
    except Exception as error:  # whatever one of the many libraries that it wants says
        logger.warning("%s cannot be imported: %s", LIBRARY, error)
        return (), f"cannot be imported here ({error})"
    return tuple(sorted({*known} - {CANNY, PASSED_THROUGH, RANDOM})), ""

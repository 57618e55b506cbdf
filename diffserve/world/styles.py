"""Alternative rendering styles of scenes, applied to exact renderings."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from diffserve.world.render import render
from diffserve.world.scenes import CANVAS_PX, Scene

LUMA: Final = np.array([0.299, 0.587, 0.114], np.float32)
SHADOW: Final = np.array([44, 26, 12], np.float32)
PAPER: Final = np.array([255, 238, 205], np.float32)
"""Colors that replace black (``SHADOW``) and white (``PAPER``)."""


def sepia(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert an image (h, w, 3) to sepia: its brightness from dark brown to cream."""
    brightness = (pixels.astype(np.float32) @ LUMA / 255)[..., None]
    return np.rint(SHADOW + (PAPER - SHADOW) * brightness).astype(np.uint8)


def render_sepia(scene: Scene, width_px: int = CANVAS_PX, height_px: int = CANVAS_PX) -> NDArray[np.uint8]:
    """Render ``scene`` in sepia."""
    return sepia(render(scene, width_px, height_px))

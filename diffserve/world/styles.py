"""Manners in which the picture world can be drawn besides its own: from its exact pictures to others."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from diffserve.world.render import render
from diffserve.world.scenes import CANVAS_PX, Scene

LUMA: Final = np.array([0.299, 0.587, 0.114], np.float32)
SHADOW: Final = np.array([44, 26, 12], np.float32)
PAPER: Final = np.array([255, 238, 205], np.float32)
"""What black and white become."""


def sepia(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A picture (h, w, 3) as an old photograph: its brightness alone, from dark brown to cream."""
    brightness = (pixels.astype(np.float32) @ LUMA / 255)[..., None]
    return np.rint(SHADOW + (PAPER - SHADOW) * brightness).astype(np.uint8)


def render_sepia(scene: Scene, width_px: int = CANVAS_PX, height_px: int = CANVAS_PX) -> NDArray[np.uint8]:
    """The exact picture of ``scene`` as an old photograph."""
    return sepia(render(scene, width_px, height_px))

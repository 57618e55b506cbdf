"""Renders a :class:`~diffserve.world.scenes.Scene` exactly by compositing sprites on a drawn background."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from diffserve.world.backgrounds import background
from diffserve.world.scenes import CANVAS_PX, GRID_PX, Placed, Scene
from diffserve.world.sprites import sprite


def render(scene: Scene, width_px: int = CANVAS_PX, height_px: int = CANVAS_PX) -> NDArray[np.uint8]:
    """Render a scene as (height, width, 3) uint8; positions scale with the canvas on its grid, sizes do not."""
    canvas = background(scene.background, width_px, height_px).astype(np.float32)
    for placed in scene.objects:
        _paste(canvas, placed, width_px / CANVAS_PX, height_px / CANVAS_PX)
    return np.rint(canvas).astype(np.uint8)


def _paste(canvas: NDArray[np.float32], placed: Placed, scale_x: float, scale_y: float) -> None:
    height, width = canvas.shape[:2]
    side = placed.size_px
    left = _snap(placed.x_px * scale_x - side / 2)
    top = _snap(placed.y_px * scale_y - side / 2)
    x0, x1, y0, y1 = max(0, left), min(width, left + side), max(0, top), min(height, top + side)
    part = sprite(placed.name, side)[y0 - top : y1 - top, x0 - left : x1 - left]
    spot = canvas[y0:y1, x0:x1]
    spot *= 1 - part[..., 3:]
    spot += part[..., :3] * 255


def _snap(pixels: float) -> int:
    return GRID_PX * round(pixels / GRID_PX)

"""Rendering of scenes: sprites composited on drawn backgrounds, exactly and at any size.

The sprite atlas was cut out of the Noto Color Emoji font (``python -m diffserve.training.train atlas``) and ships as
package data, so nothing else needs the font. Rendering is deterministic, so the checker can subtract a background.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from diffserve.api.errors import ModelLoadError
from diffserve.world.scenes import CANVAS_PX, COLORS, GRID_PX, OBJECTS, Placed, Scene

ATLAS = Path(__file__).parent / "atlas.png"
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FONT_PX = 109  # the only bitmap size in the font
TILE_PX = 96
COLUMNS = 10
SUPERSAMPLE = 4
"""Factor of the size at which shapes are drawn, for smooth edges."""

Color = tuple[int, int, int]


def _draw_gift() -> Image.Image:
    board = Image.new("RGBA", (SUPERSAMPLE * TILE_PX, SUPERSAMPLE * TILE_PX))
    draw = ImageDraw.Draw(board)
    paper, lid, ribbon = (214, 48, 49), (190, 30, 40), (250, 215, 70)
    for box, color, radius in (((8, 38, 88, 93), paper, 3), ((3, 26, 93, 44), lid, 3), ((41, 26, 55, 93), ribbon, 0)):
        draw.rounded_rectangle([SUPERSAMPLE * at for at in box], SUPERSAMPLE * radius, fill=color)
    for left in (18, 48):
        draw.ellipse([SUPERSAMPLE * at for at in (left, 4, left + 30, 28)], outline=ribbon, width=7 * SUPERSAMPLE)
    return board.resize((TILE_PX, TILE_PX), Image.Resampling.LANCZOS)


DRAWN: Final[dict[str, Callable[[], Image.Image]]] = {"gift": _draw_gift}
"""Functions that draw objects that are not in the atlas, in a similar style; adapters are trained on them.

The embedded autoencoder was not trained on these objects but reconstructs their shapes and colors sharply.
"""


def build_atlas(font_path: Path = FONT, atlas_path: Path = ATLAS) -> Path:
    """Render every glyph of the font into a TILE_PX square and save all of them as one PNG."""
    if not font_path.is_file():
        raise ModelLoadError(f"no emoji font at {font_path}; install Debian's fonts-noto-color-emoji.")
    font = ImageFont.truetype(str(font_path), FONT_PX)
    rows = -(-len(OBJECTS) // COLUMNS)
    atlas = Image.new("RGBA", (COLUMNS * TILE_PX, rows * TILE_PX))
    for index, glyph in enumerate(OBJECTS.values()):
        spot = (index % COLUMNS * TILE_PX, index // COLUMNS * TILE_PX)
        atlas.paste(_cut_glyph(glyph, font), spot)
    atlas.save(atlas_path, optimize=True)
    return atlas_path


def _cut_glyph(glyph: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    board = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(board).text((10, 10), glyph, font=font, embedded_color=True)
    box = board.getbbox()
    if box is None:
        raise ModelLoadError(f"the emoji font has no glyph for {glyph!r}.")
    cut = board.crop(box)
    scale = TILE_PX / max(cut.size)
    fitted = cut.resize((round(cut.width * scale), round(cut.height * scale)), Image.Resampling.LANCZOS)
    tile = Image.new("RGBA", (TILE_PX, TILE_PX))
    tile.paste(fitted, ((TILE_PX - fitted.width) // 2, (TILE_PX - fitted.height) // 2))
    return tile


@lru_cache(maxsize=1)
def _tiles() -> dict[str, Image.Image]:
    with Image.open(ATLAS) as file:
        atlas = file.convert("RGBA")
    spots = ((i % COLUMNS * TILE_PX, i // COLUMNS * TILE_PX) for i in range(len(OBJECTS)))
    cut = {name: atlas.crop((x, y, x + TILE_PX, y + TILE_PX)) for name, (x, y) in zip(OBJECTS, spots, strict=True)}
    return cut | {name: draw() for name, draw in DRAWN.items()}


@lru_cache(maxsize=1024)
def sprite(name: str, side_px: int) -> NDArray[np.float32]:
    """Return an object of the atlas or of ``DRAWN`` as (side, side, 4) float32 in 0..1, with premultiplied alpha."""
    tile = _tiles()[name]
    if side_px != TILE_PX:
        tile = tile.resize((side_px, side_px), Image.Resampling.LANCZOS)
    pixels = np.asarray(tile, dtype=np.float32) / np.float32(255)
    pixels[..., :3] *= pixels[..., 3:]
    pixels.setflags(write=False)
    return pixels


class _Canvas:
    """A supersampled drawing board with fractional coordinates: (0, 0) top left, (1, 1) bottom right."""

    def __init__(self, width_px: int, height_px: int) -> None:
        self.width, self.height = width_px * SUPERSAMPLE, height_px * SUPERSAMPLE
        self.image = Image.new("RGB", (self.width, self.height))
        self.draw = ImageDraw.Draw(self.image)

    def gradient(self, top: float, bottom: float, above: Color, below: Color) -> None:
        first, last = round(top * self.height), round(bottom * self.height)
        for y in range(first, last):
            share = (y - first) / max(1, last - first - 1)
            color = tuple(round(a + (b - a) * share) for a, b in zip(above, below, strict=True))
            self.draw.line([(0, y), (self.width, y)], fill=color)

    def polygon(self, points: list[tuple[float, float]], color: Color) -> None:
        self.draw.polygon([(x * self.width, y * self.height) for x, y in points], fill=color)

    def hills(self, level: float, height: float, waves: float, phase: float, color: Color) -> None:
        ridge = [(x / 64, level - height * math.sin(waves * math.tau * x / 64 + phase)) for x in range(65)]
        self.polygon([*ridge, (1, 1), (0, 1)], color)

    def box(self, left: float, top: float, right: float, bottom: float, color: Color) -> None:
        edges = (left * self.width, top * self.height, right * self.width - 1, bottom * self.height - 1)
        self.draw.rectangle(edges, fill=color)

    def dot(self, x: float, y: float, radius_px: float, color: Color) -> None:
        r = radius_px * SUPERSAMPLE
        x_px, y_px = x * self.width, y * self.height
        self.draw.ellipse((x_px - r, y_px - r, x_px + r, y_px + r), fill=color)


def _beach(board: _Canvas) -> None:
    board.gradient(0, 0.42, (120, 195, 240), (205, 232, 245))
    board.gradient(0.42, 0.68, (30, 120, 175), (70, 185, 205))
    board.hills(0.63, 0.012, 2, 0.4, (240, 250, 250))
    board.hills(0.65, 0.012, 2, 0.4, (238, 214, 160))


def _meadow(board: _Canvas) -> None:
    board.gradient(0, 0.62, (135, 200, 245), (215, 238, 248))
    board.hills(0.55, 0.05, 1, 0.6, (120, 190, 90))
    board.hills(0.68, 0.04, 1.5, 2.4, (95, 170, 70))


def _night_sky(board: _Canvas) -> None:
    board.gradient(0, 1, (12, 16, 48), (48, 52, 110))
    for index in range(26):
        x, y = (0.07 + 0.618034 * index) % 1, (0.11 + 0.3819 * index * 1.37) % 1
        board.dot(x, y, 0.7 + 0.5 * (index % 3 == 0), (225, 225, 200))


def _desert(board: _Canvas) -> None:
    board.gradient(0, 0.64, (250, 180, 110), (253, 226, 170))
    board.hills(0.55, 0.06, 1, 2.0, (222, 160, 90))
    board.hills(0.72, 0.05, 1, 5.0, (202, 136, 70))


def _snow(board: _Canvas) -> None:
    board.gradient(0, 0.66, (165, 190, 215), (220, 230, 240))
    board.hills(0.58, 0.04, 1, 1.2, (250, 252, 255))
    board.hills(0.76, 0.03, 1, 4.0, (228, 236, 246))


def _ocean(board: _Canvas) -> None:
    board.gradient(0, 0.35, (150, 210, 245), (220, 240, 250))
    board.gradient(0.35, 1, (40, 130, 190), (10, 50, 110))
    for level in (0.5, 0.68, 0.86):
        board.box(0.08, level, 0.3, level + 0.012, (90, 170, 215))
        board.box(0.62, level - 0.07, 0.9, level - 0.058, (90, 170, 215))


def _city(board: _Canvas) -> None:
    board.gradient(0, 0.8, (250, 200, 170), (250, 230, 210))
    heights = (0.45, 0.3, 0.52, 0.38, 0.24, 0.48, 0.34, 0.42)
    for index, top in enumerate(heights):
        left = index / len(heights)
        right = left + 1 / len(heights)
        shade: Color = (105, 112, 138) if index % 2 else (85, 92, 120)
        board.box(left, top, right, 0.86, shade)
        for row in range(int((0.8 - top) / 0.09)):
            y = top + 0.05 + row * 0.09
            for x in (left + 0.025, left + 0.075):
                board.box(x, y, x + 0.025, y + 0.035, (250, 225, 140))
    board.box(0, 0.86, 1, 1, (70, 72, 80))


def _mountains(board: _Canvas) -> None:
    board.gradient(0, 0.82, (150, 200, 240), (225, 238, 246))
    for x, top, half, rock in ((0.24, 0.26, 0.36, (112, 118, 140)), (0.74, 0.18, 0.4, (96, 102, 126))):
        board.polygon([(x - half, 0.78), (x, top), (x + half, 0.78)], rock)
        cap = 0.3
        left, right, line = x - half * cap, x + half * cap, top + (0.78 - top) * cap
        snow = [(left, line), (x, top), (right, line), (x + half * 0.1, line - 0.03), (x, line + 0.03)]
        board.polygon(snow, (250, 250, 255))
    board.hills(0.78, 0.02, 1.5, 0.3, (95, 140, 90))


_PLACES: dict[str, Callable[[_Canvas], None]] = {
    "beach": _beach,
    "meadow": _meadow,
    "night sky": _night_sky,
    "desert": _desert,
    "snow": _snow,
    "ocean": _ocean,
    "city": _city,
    "mountains": _mountains,
}


@lru_cache(maxsize=128)
def background(name: str, width_px: int = 128, height_px: int = 128) -> NDArray[np.uint8]:
    """Render an empty scene (height, width, 3) uint8, read-only; ``name`` is a color or a place."""
    if name in COLORS:
        pixels = np.empty((height_px, width_px, 3), dtype=np.uint8)
        pixels[:] = COLORS[name]
    else:
        board = _Canvas(width_px, height_px)
        _PLACES[name](board)
        pixels = np.asarray(board.image.resize((width_px, height_px), Image.Resampling.BOX)).copy()
    pixels.setflags(write=False)
    return pixels


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

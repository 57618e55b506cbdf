"""The sprite atlas: every object as a square RGBA image.

The atlas is extracted once from the Noto Color Emoji font (``python -m diffserve.training.train atlas``) and shipped as
package data, so rendering, checking and training need no font.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from diffserve.api.errors import ModelLoadError
from diffserve.world.drawn import DRAWN
from diffserve.world.drawn import tile as drawn_tile
from diffserve.world.scenes import OBJECTS

ATLAS = Path(__file__).parent / "atlas.png"
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
FONT_PX = 109  # the only bitmap size in the font
TILE_PX = 96
COLUMNS = 10


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
    return cut | {name: drawn_tile(name, TILE_PX) for name in DRAWN}


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

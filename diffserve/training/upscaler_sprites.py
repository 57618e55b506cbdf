"""Sprites of the embedded world in four times its resolution, the truth that the shipped upscaler is trained on.

The atlas of ``diffserve.world`` holds 96 px per object. The same drawings exist as vectors: the npm package
``@iconify-json/noto`` (Apache-2.0). ``python -m diffserve.training.train sprites`` draws them with Chromium, aligns
each with its sprite in the atlas, and writes ``sprites-4x.webp``.
"""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from diffserve.api.errors import ConfigError
from diffserve.world.render import COLUMNS, TILE_PX, background, sprite
from diffserve.world.scenes import CANVAS_PX, GRID_PX, OBJECTS, Placed, Scene

FACTOR: Final = 4
SPRITES: Final = Path(__file__).parent / "sprites-4x.webp"
LARGE_PX: Final = FACTOR * TILE_PX
BOARD_PX: Final = 512
ALIGNMENT_STEPS: Final = 150
QUALITY: Final = 92
MAX_ERROR: Final = 1.5e-3
"""Largest mean squared error of a drawing against its sprite, both with colors in 0..1."""


def build_sprites(packages: Sequence[Path], path: Path = SPRITES, chromium: str = "/usr/bin/chromium") -> Path:
    """Draw every object at four times the atlas's resolution, aligned with the atlas.

    The drawings of some objects changed over the years, so several versions of the package may be given; of each object
    the drawing nearest to its sprite is taken. A sprite that no drawing resembles is enlarged by Lanczos instead.

    Args:
        packages: directories of unpacked versions of the npm package, each with icons.json, the first also with
            chars.json.
        path: the WebP file to write, a grid of tiles like the atlas.
        chromium: program that draws SVG.

    Returns:
        ``path``.

    Raises:
        ConfigError: a directory does not hold the package.
    """
    small = torch.from_numpy(np.stack([sprite(name, TILE_PX) for name in OBJECTS])).permute(0, 3, 1, 2)
    enlarged = torch.from_numpy(np.stack([sprite(name, LARGE_PX) for name in OBJECTS])).permute(0, 3, 1, 2)
    names = _drawing_names(packages[0])
    drawn = (torch.from_numpy(_draw(_boards(package, names), chromium)) for package in packages)
    versions = [align(drawing.permute(0, 3, 1, 2), small) for drawing in drawn]
    errors = torch.stack([_error(version, small) for version in versions])
    nearest = errors.argmin(dim=0).tolist()
    sheet = Image.new("RGBA", (COLUMNS * LARGE_PX, -(-len(OBJECTS) // COLUMNS) * LARGE_PX))
    for index, (name, version) in enumerate(zip(OBJECTS, nearest, strict=True)):
        fits = float(errors[version, index]) < MAX_ERROR
        print(f"{name}: version {version}, mean squared error {float(errors[version, index]):.5f}, drawn: {fits}")
        pixels = (versions[version] if fits else enlarged)[index].permute(1, 2, 0).numpy()
        color = pixels[..., :3] / np.maximum(pixels[..., 3:], 1e-6)
        tile = np.concatenate([color, pixels[..., 3:]], axis=-1)
        corner = (index % COLUMNS * LARGE_PX, index // COLUMNS * LARGE_PX)
        sheet.paste(Image.fromarray(np.rint(tile.clip(0, 1) * 255).astype(np.uint8)), corner)
    sheet.save(path, quality=QUALITY, alpha_quality=100, method=6, exact=False)
    return path


def _drawing_names(package: Path) -> list[str]:
    """Return the name of the drawing of every object, in the unpacked npm package in ``package``."""
    names = _read(package / "chars.json")
    return [names["-".join(f"{ord(char):x}" for char in glyph)] for glyph in OBJECTS.values()]


def _boards(package: Path, names: list[str]) -> list[str]:
    """Return the SVG texts of the drawings ``names`` of an unpacked npm package."""
    drawings = _read(package / "icons.json")["icons"]
    return [_board(drawings[name]["body"]) for name in names]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} is missing; unpack the npm package @iconify-json/noto there.") from error


def _error(drawn: Tensor, small: Tensor) -> Tensor:
    """Return the mean squared error (N,) of drawings (N, 4, LARGE_PX, LARGE_PX) reduced to the size of sprites."""
    return (F.avg_pool2d(drawn, FACTOR) - small).square().mean(dim=(1, 2, 3))


def _board(body: str) -> str:
    """Return the SVG text of a drawing of 128 units with a margin of 8 units."""
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} viewBox="-8 -8 144 144">{body}</svg>'


def _draw(boards: list[str], chromium: str) -> NDArray[np.float32]:
    """Draw SVG texts as (N, BOARD_PX, BOARD_PX, 4) in 0..1 with premultiplied alpha."""
    rows = -(-len(boards) // COLUMNS)
    codes = (base64.b64encode(board.encode()).decode() for board in boards)
    shape = f'width="{BOARD_PX}" height="{BOARD_PX}"'
    images = "".join(f'<img {shape} src="data:image/svg+xml;base64,{code}">' for code in codes)
    width, height = COLUMNS * BOARD_PX, rows * BOARD_PX
    style = f"body{{margin:0;width:{width}px;line-height:0;font-size:0}}"
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder, "page.html"), Path(folder, "page.png")
        page.write_text(f"<style>{style}</style>{images}", encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
        options += [f"--window-size={width},{height}", f"--screenshot={picture}"]
        options += ["--default-background-color=00000000"]
        subprocess.run([chromium, *options, page.as_uri()], check=True, capture_output=True, timeout=300)
        with Image.open(picture) as file:
            pixels = np.asarray(file.convert("RGBA"), dtype=np.float32) / 255
    pixels[..., :3] *= pixels[..., 3:]
    tiles = pixels[:height, :width].reshape(rows, BOARD_PX, COLUMNS, BOARD_PX, 4).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles.reshape(-1, BOARD_PX, BOARD_PX, 4)[: len(boards)])


def align(drawn: Tensor, small: Tensor, steps: int = ALIGNMENT_STEPS) -> Tensor:
    """Scale and shift each drawing so that it matches its sprite when it is reduced to the sprite's size.

    Args:
        drawn: drawings (N, 4, H, W) with premultiplied alpha.
        small: sprites (N, 4, TILE_PX, TILE_PX).
        steps: iterations of the fit of two scales and two shifts for each drawing.

    Returns:
        The aligned drawings (N, 4, LARGE_PX, LARGE_PX).
    """
    target, source = _span(small), _span(drawn)
    scale = (source[1] - source[0]) / (target[1] - target[0]).clamp(min=0.1)
    middle = (source[1] + source[0]) / 2 - scale * (target[1] + target[0]) / 2
    fit = torch.cat([scale, middle], dim=1).requires_grad_()
    optimizer = torch.optim.Adam([fit], lr=2e-3)
    reduced = F.avg_pool2d(drawn, BOARD_PX // 128)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
        optimizer.zero_grad()
        (_sample(reduced, fit, TILE_PX) - small).square().mean(dim=(1, 2, 3)).sum().backward()
        optimizer.step()
    return _sample(drawn, fit.detach(), LARGE_PX).clamp(0, 1)


def _span(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and upper bound (N, 2) as x, y in -1..1 of what is opaque in ``pixels`` (N, 4, S, S)."""
    opaque = pixels[:, 3] > 0.3
    bounds = []
    for axis in (1, 2):
        line = opaque.any(dim=axis).float()
        side = line.shape[1]
        first = line.argmax(dim=1)
        last = side - line.flip(1).argmax(dim=1)
        bounds.append(torch.stack([2 * first / side - 1, 2 * last / side - 1]))
    low, high = torch.stack(bounds, dim=-1)
    return low, high


def _sample(pixels: Tensor, fit: Tensor, side: int) -> Tensor:
    zero = torch.zeros(len(fit))
    rows = [torch.stack([fit[:, 0], zero, fit[:, 2]], -1), torch.stack([zero, fit[:, 1], fit[:, 3]], -1)]
    grid = F.affine_grid(torch.stack(rows, 1), [len(fit), 4, side, side], align_corners=False)
    mode = "bicubic" if side == LARGE_PX else "bilinear"
    return F.grid_sample(pixels, grid, mode=mode, align_corners=False)


@lru_cache(maxsize=1)
def _tiles() -> dict[str, Image.Image]:
    with Image.open(SPRITES) as file:
        sheet = file.convert("RGBA")
    corners = ((i % COLUMNS * LARGE_PX, i // COLUMNS * LARGE_PX) for i in range(len(OBJECTS)))
    return {name: sheet.crop((x, y, x + LARGE_PX, y + LARGE_PX)) for name, (x, y) in zip(OBJECTS, corners, strict=True)}


@lru_cache(maxsize=512)
def large_sprite(name: str, side_px: int) -> NDArray[np.float32]:
    """Return an object as (side, side, 4) in 0..1, with premultiplied alpha; ``side_px`` is at most LARGE_PX."""
    tile = _tiles()[name]
    if side_px != LARGE_PX:
        tile = tile.resize((side_px, side_px), Image.Resampling.LANCZOS)
    pixels = np.asarray(tile, dtype=np.float32) / np.float32(255)
    pixels[..., :3] *= pixels[..., 3:]
    pixels.setflags(write=False)
    return pixels


def render_large(scene: Scene) -> NDArray[np.uint8]:
    """Render a scene at four times its resolution, (512, 512, 3) uint8.

    Every object is where :func:`diffserve.world.render.render` puts it on the native canvas.
    """
    side = FACTOR * CANVAS_PX
    canvas = background(scene.background, side, side).astype(np.float32)
    for placed in scene.objects:
        _paste(canvas, placed)
    return np.rint(canvas).astype(np.uint8)


def _paste(canvas: NDArray[np.float32], placed: Placed) -> None:
    side = FACTOR * placed.size_px
    left, top = (FACTOR * GRID_PX * round((at - placed.size_px / 2) / GRID_PX) for at in (placed.x_px, placed.y_px))
    x0, x1, y0, y1 = max(0, left), min(canvas.shape[1], left + side), max(0, top), min(canvas.shape[0], top + side)
    part = large_sprite(placed.name, side)[y0 - top : y1 - top, x0 - left : x1 - left]
    spot = canvas[y0:y1, x0:x1]
    spot *= 1 - part[..., 3:]
    spot += part[..., :3] * 255

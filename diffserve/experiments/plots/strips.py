"""One prompt and seed with growing steps: a row for each sampler and guidance, the converged picture at its end."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from diffserve.experiments.plan import Cell
from diffserve.experiments.plots.drawing import png, style
from diffserve.experiments.strip_grid import strip_grid

MAX_TITLE_CHARS = 90
CELL_INCHES = 1.15


def strip(title: str, thumbnails: Mapping[Cell, bytes]) -> bytes:
    """The pictures of ``thumbnails``, which are encoded themselves, as one PNG in all its colours."""
    grid = strip_grid(thumbnails)
    with style():
        size = (CELL_INCHES * len(grid.heads) + 0.9, 1.2 * len(grid.rows) + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        short = title if len(title) <= MAX_TITLE_CHARS else f"{title[: MAX_TITLE_CHARS - 3]}..."
        figure.suptitle(short, fontsize=9)
        places = figure.subplots(len(grid.rows), len(grid.heads), squeeze=False)
        for axes, head in zip(places[0], grid.heads, strict=True):
            axes.set_title(head, fontsize=8)
        for row, name, pictures in zip(places, grid.names, grid.rows, strict=True):
            row[0].set_ylabel(name, fontsize=8)
            for axes, picture in zip(row, pictures, strict=True):
                _show(axes, picture)
        return png(figure, num_colors=None)


def _show(axes: Axes, picture: bytes | None) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if picture is not None:
        axes.imshow(Image.open(BytesIO(picture)).convert("RGB"), interpolation="lanczos")

"""Additional objects that are not in the atlas, drawn by code in a similar style; adapters are trained on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PIL import Image, ImageDraw

Color = tuple[int, int, int]

FINE: Final = 4
"""Supersampling factor for smooth edges."""
UNITS: Final = 96
"""Side of a drawing in drawing units."""


class Pen:
    """Draws shapes on a transparent board of UNITS x UNITS."""

    def __init__(self) -> None:
        self.board = Image.new("RGBA", (UNITS * FINE, UNITS * FINE))
        self._draw = ImageDraw.Draw(self.board)

    def box(self, left: int, top: int, right: int, bottom: int, fill: Color, *, radius: int = 0) -> None:
        """Draw a filled box with rounded corners."""
        self._draw.rounded_rectangle(_fine(left, top, right, bottom), radius * FINE, fill=fill)

    def ring(self, left: int, top: int, right: int, bottom: int, color: Color, *, width: int) -> None:
        """Draw the outline of an ellipse."""
        self._draw.ellipse(_fine(left, top, right, bottom), outline=color, width=width * FINE)


def _fine(*units: int) -> list[int]:
    return [FINE * at for at in units]


def _gift(pen: Pen) -> None:
    paper, lid, ribbon = (214, 48, 49), (190, 30, 40), (250, 215, 70)
    pen.box(8, 38, 88, 93, paper, radius=3)
    pen.box(3, 26, 93, 44, lid, radius=3)
    pen.box(41, 26, 55, 93, ribbon)
    for left in (18, 48):
        pen.ring(left, 4, left + 30, 28, ribbon, width=7)


DRAWN: Final[dict[str, Callable[[Pen], None]]] = {"gift": _gift}
"""Drawing functions by object name.

The embedded autoencoder was not trained on these objects but reconstructs their shapes and colors sharply.
"""


def tile(name: str, side_px: int) -> Image.Image:
    """Render an object of ``DRAWN`` as a square RGBA image."""
    pen = Pen()
    DRAWN[name](pen)
    return pen.board.resize((side_px, side_px), Image.Resampling.LANCZOS)

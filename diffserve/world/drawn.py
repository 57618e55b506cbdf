"""Objects that the closed world does not have, drawn by code in the manner of the atlas: what adapters teach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PIL import Image, ImageDraw

Color = tuple[int, int, int]

FINE: Final = 4
"""How much finer than the tile they are drawn, for smooth edges."""
UNITS: Final = 96
"""Across a drawing."""


class Pen:
    """Shapes on a transparent board of UNITS x UNITS."""

    def __init__(self) -> None:
        self.board = Image.new("RGBA", (UNITS * FINE, UNITS * FINE))
        self._draw = ImageDraw.Draw(self.board)

    def box(self, left: int, top: int, right: int, bottom: int, fill: Color, *, radius: int = 0) -> None:
        """A filled box with round corners."""
        self._draw.rounded_rectangle(_fine(left, top, right, bottom), radius * FINE, fill=fill)

    def ring(self, left: int, top: int, right: int, bottom: int, color: Color, *, width: int) -> None:
        """The outline of an ellipse."""
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
"""By their names, as captions say them. In these shapes and colours the embedded autoencoder, which saw none of them,
gives them back; a robot of turquoise came back blurred."""


def tile(name: str, side_px: int) -> Image.Image:
    """One of ``DRAWN`` as a square RGBA picture."""
    pen = Pen()
    DRAWN[name](pen)
    return pen.board.resize((side_px, side_px), Image.Resampling.LANCZOS)

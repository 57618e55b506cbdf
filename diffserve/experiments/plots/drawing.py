"""What all plots share: colours, axes, legend, and PNG."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

DPI = 110
NUM_COLORS = 128  # of a PNG; lines on a plain ground lose nothing by it, and the file is a third
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_plotting = threading.Lock()  # matplotlib keeps its style for the whole process

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito
INK, FAINT = "#1b1d21", "#70757d"


@contextmanager
def style() -> Iterator[None]:
    """Our style and no other, in one thread at a time; characters that the font lacks are boxes without a word."""
    with _plotting, matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rc("font", size=9)
        matplotlib.rc("axes", grid=True, edgecolor=FAINT, labelcolor=INK)
        matplotlib.rc("axes.spines", top=False, right=False)
        matplotlib.rc("grid", alpha=0.25, color=FAINT)
        matplotlib.rc("text", parse_math=False, color=INK)  # a prompt may hold dollars
        matplotlib.rc("xtick", color=FAINT, labelcolor=INK)
        matplotlib.rc("ytick", color=FAINT, labelcolor=INK)
        yield


def name_lines(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend above all axes, every name once."""
    named: dict[str, Artist] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(named.values()), list(named), loc="outside upper center", ncols=5, frameon=False, fontsize=8,
        columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip


def png(figure: Figure, *, num_colors: int | None = NUM_COLORS) -> bytes:
    """The figure as PNG; with ``num_colors`` of a palette, or all where that is ``None``."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": "diffserve"})
    if num_colors is None:
        return file.getvalue()
    return to_palette(Image.open(file).convert("RGB"), num_colors)


def to_palette(image: Image.Image, num_colors: int) -> bytes:
    """A PNG of so many colours."""
    file = BytesIO()
    image.quantize(num_colors, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()

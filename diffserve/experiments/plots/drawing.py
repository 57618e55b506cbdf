"""What all plots share: two looks, one for a light page and one for a dark one, colours, axes, and PNG."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, NullLocator
from PIL import Image

from diffserve.experiments.estimates import Measure

DPI = 110
NUM_COLORS = 128  # of a PNG; lines on a plain ground lose nothing by it, and the file is a third
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Look(NamedTuple):
    """Colours of a page: its ground, its ink, a faint ink, and those of the lines."""

    ground: str
    ink: str
    faint: str
    lines: tuple[str, ...]

    def line(self, number: int) -> tuple[str, str]:
        """Colour and marker of a line."""
        return self.lines[number % len(self.lines)], MARKERS[number % len(MARKERS)]


OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LIGHT = Look("#ffffff", "#1b1d21", "#70757d", OKABE_ITO)
DARK = Look(
    "#16181c", "#e4e6ea", "#9aa0a9", ("#56B4E9", "#FF9152", "#2BC796", "#E59AC4", "#F2C14E", "#A9B8FF", "#FFFFFF")
)
"""The same order of hues, lighter."""


@contextmanager
def style(look: Look = LIGHT) -> Iterator[None]:
    """Our style and no other; characters that the font lacks are drawn as boxes without a word."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rc("font", size=9)
        matplotlib.rc("axes", grid=True, facecolor=look.ground, edgecolor=look.faint, labelcolor=look.ink)
        matplotlib.rc("axes.spines", top=False, right=False)
        matplotlib.rc("figure", facecolor=look.ground)
        matplotlib.rc("grid", alpha=0.25, color=look.faint)
        matplotlib.rc("text", parse_math=False, color=look.ink)  # a prompt may hold dollars
        matplotlib.rc("xtick", color=look.faint, labelcolor=look.ink)
        matplotlib.rc("ytick", color=look.faint, labelcolor=look.ink)
        yield


def name_measure(axes: Axes, measure: Measure, *, is_narrow: bool = False) -> None:
    """The measure above its axes, and which way is better, in two lines where it is narrow; shares as per cent."""
    better = "higher" if measure.more_is_better else "lower"
    axes.set_title(f"{measure.title}{chr(10) if is_narrow else ' '}({better} is better)", fontsize=9)
    if measure is Measure.EXACT:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}" if share < 1.001 else "")  # there is no more


def log_steps(axes: Axes, steps: Sequence[int]) -> None:
    """A logarithmic axis that names the steps there are."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_xlabel("steps")


def name_lines(figure: Figure | SubFigure, axes: Iterable[Axes]) -> None:
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
    image = Image.open(file).convert("RGB").quantize(num_colors, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small = BytesIO()
    image.save(small, "PNG", optimize=True)
    return small.getvalue()

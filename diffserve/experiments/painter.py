"""Whoever paints the images of a plan: an engine (``engine_painter``) or a server (in ``ui.experiment``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diffserve.experiments.plan import PlannedImage


class FinishedImage(NamedTuple):
    """An image that is painted.

    pixels       (H, W, 3) uint8
    evaluations  UNet rows it took
    latents      (C, h, w) float32, ``None`` where the painter does not see them
    engine_s     its share of the engine's time, 0 where that is not known
    file         as a server sent it, with its metadata
    """

    image: PlannedImage
    pixels: NDArray[np.uint8]
    seed: int
    spacing: str
    evaluations: int
    latents: NDArray[np.float32] | None = None
    engine_s: float = 0.0
    file: bytes = b""


class PreviewImage(NamedTuple):
    """An image on its way, as a PNG; previews of an image count from 0."""

    image: PlannedImage
    file: bytes
    number: int


class RowsDone(NamedTuple):
    """UNet rows that ran since this was last told, by image."""

    rows: Mapping[PlannedImage, float]


class RefusedImage(NamedTuple):
    """Images of this cell cannot be painted; no more of them are tried."""

    image: PlannedImage
    reason: str


PaintEvent = FinishedImage | PreviewImage | RowsDone | RefusedImage


class Painter(Protocol):
    """Paints many images of a plan at once, started in their order."""

    def paint(self, images: Iterable[PlannedImage]) -> AsyncGenerator[PaintEvent, None]:
        """What happens until all are painted. Raises what ends all painting."""

    def close(self) -> None:
        """Give up what is being painted; what was finished before may still be told."""

"""Interface of image generators for a plan: an engine (``engine_painter``) or a server (in ``ui.experiment``)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diffserve.experiments.plan import PlannedImage


class FinishedImage(NamedTuple):
    """A generated image.

    Attributes:
        image: The planned image.
        pixels: (H, W, 3) uint8.
        seed: Seed of the starting latents.
        spacing: Timestep spacing that was used.
        evaluations: UNet rows of the image.
        latents: (C, h, w) float32, ``None`` if the painter has no access to them.
        engine_s: Share of the engine's time, 0 if unknown.
        file: Encoded file with metadata, as sent by a server.
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
    """A PNG preview of an image in progress; the previews of an image are numbered from 0."""

    image: PlannedImage
    file: bytes
    number: int


class RowsDone(NamedTuple):
    """UNet rows by image that ran since the previous event of this type."""

    rows: Mapping[PlannedImage, float]


class RefusedImage(NamedTuple):
    """An image was rejected; no more images of its cell are attempted."""

    image: PlannedImage
    reason: str


PaintEvent = FinishedImage | PreviewImage | RowsDone | RefusedImage


class Painter(Protocol):
    """Generates the images of a plan concurrently, started in the given order."""

    def paint(self, images: Iterable[PlannedImage]) -> AsyncGenerator[PaintEvent, None]:
        """Generate ``images`` and yield events; an error that stops all images is raised."""

    def close(self) -> None:
        """Cancel images in progress; events of finished images may still follow."""

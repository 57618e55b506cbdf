"""Generated images, events of image generators, and the record of an image, stored as one JSON line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffserve.experiments.plan import Place, PlannedImage
from diffserve.world.checker import Verdict


class FinishedImage(NamedTuple):
    """A generated image.

    Attributes:
        image: The planned image.
        pixels: (H, W, 3) uint8.
        seed: Seed of the starting latents.
        spacing: Timestep spacing that was used.
        evaluations: UNet rows of the image.
        latents: (C, h, w) float32, ``None`` if the generator has no access to them.
        engine_s: Share of the engine's time, 0 if unknown.
    """

    image: PlannedImage
    pixels: NDArray[np.uint8]
    seed: int
    spacing: str
    evaluations: int
    latents: NDArray[np.float32] | None = None
    engine_s: float = 0.0


class RowsDone(NamedTuple):
    """UNet rows by image that ran since the previous event of this type."""

    rows: Mapping[PlannedImage, float]


GenerationEvent = FinishedImage | RowsDone


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The checker's verdict on an image, part by part."""

    exact: bool
    background: bool
    objects: bool
    relation: bool
    size: bool

    @classmethod
    def of(cls, verdict: Verdict) -> Parts:
        """Take the parts of a checker's verdict."""
        return cls(**{name: getattr(verdict, name) for name in cls.__struct_fields__})


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """Distance of an image to the converged image of the same seed; see :mod:`diffserve.experiments.metrics`.

    A value is ``None`` if it could not be measured because latents, torch or a network were missing.
    """

    latent_rmse: float | None = None
    psnr_db: float | None = None
    ssim: float | None = None
    lpips: float | None = None


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one image.

    Attributes:
        prompt_index: Index of the prompt in the plan.
        seed_index: Index of the seed within the prompt.
        seed: Seed of the starting latents.
        spacing: Timestep spacing that was used.
        evaluations: UNet rows of the image, two per step with guidance.
        engine_s: Share of the engine's time: the wall time of each tick divided by the rows that ran in it.
        features: Features in the fixed feature network, empty if there is no network.
        parts: Verdict of the prompt checker, ``None`` if the prompt cannot be checked.
        distance: Distance to the converged image, ``None`` for the converged image itself.
        thumbnail: Small PNG of the few images that a report shows.
        scores: Values of the :data:`PROMPT_MEASURES` that the user has weights for, by name of the measure.
    """

    prompt_index: int
    seed_index: int
    seed: int
    spacing: str
    evaluations: int
    engine_s: float
    features: tuple[float, ...]
    parts: Parts | None = None
    distance: Distance | None = None
    thumbnail: bytes | None = None
    scores: dict[str, float] = {}

    @property
    def place(self) -> Place:
        """(prompt index, seed index): key that pairs the image with those of other cells."""
        return self.prompt_index, self.seed_index


class StoredImage(NamedTuple):
    """A stored image: pixels (H, W, 3) uint8 and, if known, latents (C, h, w) float32."""

    pixels: NDArray[np.uint8]
    latents: NDArray[np.float32] | None


class SoloTime(msgspec.Struct, frozen=True):
    """Times of a cell's image generated alone, by round: milliseconds per step and seconds per image."""

    step_ms: tuple[float, ...]
    image_s: tuple[float, ...]


def features_of(records: list[ImageRecord]) -> NDArray[np.float32]:
    """Stack the features of all ``records`` into (N, D)."""
    return np.array([record.features for record in records], dtype=np.float32)

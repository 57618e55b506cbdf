"""What is kept of every picture of a sweep: one line of JSON each."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from diffserve.experiments.plan import Place
from diffserve.world.checker import Verdict


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The checker's verdict on a picture, part by part."""

    exact: bool
    background: bool
    objects: bool
    relation: bool
    size: bool

    @classmethod
    def of(cls, verdict: Verdict) -> Parts:
        return cls(**{name: getattr(verdict, name) for name in cls.__struct_fields__})


class Distance(msgspec.Struct, frozen=True, kw_only=True):
    """How far a picture is from the converged one of the same seed; see :mod:`diffserve.experiments.metrics`.

    ``None``: not measured, for want of latents or of torch.
    """

    latent_rmse: float | None = None
    psnr_db: float | None = None
    ssim: float | None = None


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One picture, measured.

    evaluations  UNet rows it took, two a step under guidance
    engine_s     its share of the engine's time: each tick's wall time divided among the rows that ran in it
    features     in the fixed feature network; none where there was none
    parts        ``None`` where prompts have no checkable truth
    distance     ``None`` for the converged picture itself
    thumbnail    a small PNG, of the few pictures that are shown
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

    @property
    def place(self) -> Place:
        """(prompt, seed): what pairs it with pictures of other cells."""
        return self.prompt_index, self.seed_index


class StoredImage(NamedTuple):
    """A kept picture: pixels (H, W, 3) uint8, and latents (C, h, w) float32 where they are known."""

    pixels: NDArray[np.uint8]
    latents: NDArray[np.float32] | None


class SoloTime(msgspec.Struct, frozen=True):
    """One cell alone, in the order of rounds: milliseconds a step, and seconds from the first step to the picture."""

    step_ms: tuple[float, ...]
    image_s: tuple[float, ...]


def features_of(records: list[ImageRecord]) -> NDArray[np.float32]:
    """The features of all ``records``, (N, D)."""
    return np.array([record.features for record in records], dtype=np.float32)

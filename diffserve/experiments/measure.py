"""Measure each painted picture: against its prompt, against the converged picture, and in the feature network."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.experiments.metrics import FeatureNetwork, fidelity
from diffserve.experiments.painting import PaintedJob
from diffserve.experiments.records import Distance, ImageRecord, Parts
from diffserve.experiments.store import Converged
from diffserve.world.checker import SceneSpec, judge, read_picture

SHOWN_PROMPTS = 3
"""Of so many prompts, the first seed's pictures are kept to be looked at."""

THUMBNAIL_PX = 128


class PictureMeasures:
    """Turns pictures into records. ``wishes``: what each prompt asks for, or ``None`` where that cannot be checked."""

    def __init__(self, wishes: Sequence[SceneSpec] | None) -> None:
        self._wishes = wishes
        self._network = FeatureNetwork()

    def measure(self, painted: PaintedJob, converged: Converged | None) -> ImageRecord:
        """Measure one picture; ``converged`` is that of the same seed, ``None`` for the converged one itself."""
        job, result = painted.job, painted.result
        latents = result.latents
        assert latents is not None, "a sweep asks for latents"
        return ImageRecord(
            prompt_index=job.prompt_index,
            seed_index=job.seed_index,
            seed=result.seed,
            spacing=result.spacing,
            evaluations=result.num_evaluations,
            engine_s=painted.engine_s,
            features=tuple(self.features(result.pixels).tolist()),
            parts=self._parts(job.prompt_index, result.pixels),
            distance=None if converged is None else _distance(result.pixels, latents.array, converged),
            thumbnail=_thumbnail(result.pixels) if is_shown(job.place) else None,
        )

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features of one picture (H, W, 3)."""
        return self._network.features(pixels)

    def _parts(self, prompt_index: int, pixels: NDArray[np.uint8]) -> Parts | None:
        if self._wishes is None:
            return None
        return Parts.of(judge(read_picture(pixels), self._wishes[prompt_index]))


def is_shown(place: tuple[int, int]) -> bool:
    """Whether the picture of this prompt and seed is kept to be looked at."""
    return place[0] < SHOWN_PROMPTS and place[1] == 0


def _distance(pixels: NDArray[np.uint8], latents: NDArray[np.float32], converged: Converged) -> Distance:
    found = fidelity(pixels, latents, converged.pixels, converged.latents)
    return Distance(latent_rmse=found.latent_rmse, psnr_db=found.psnr_db, ssim=found.ssim)


def _thumbnail(pixels: NDArray[np.uint8]) -> bytes:
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX), Image.Resampling.LANCZOS)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()

"""Measure each painted image: against its prompt, against the converged image, and in the feature network."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.metrics.fidelity import latent_rmse, psnr_db, ssim
from diffserve.experiments.painter import FinishedImage
from diffserve.experiments.prompts import read_wishes
from diffserve.experiments.records import Distance, ImageRecord, Parts, StoredImage
from diffserve.world.checker import judge, read_picture

if TYPE_CHECKING:
    from diffserve.experiments.metrics.feature_network import FeatureNetwork

CHECKED_FAMILY = "embedded"
MAX_REASON_CHARS = 240
SHOWN_PROMPTS = 3
"""Of so many prompts, the first seed's images are kept to be looked at."""

THUMBNAIL_PX = 128


class PromptCheck:
    """The exact checker of the embedded model's picture world.

    wishes   what each prompt asks for, ``None`` where that cannot be checked
    why_not  why it cannot be, ``None`` if it can
    """

    def __init__(self, family: str, prompts: Sequence[str]) -> None:
        self.wishes = None
        self.why_not: str | None = None
        if family != CHECKED_FAMILY:
            self.why_not = "only pictures of the embedded model can be checked against their prompts."
            return
        try:
            self.wishes = read_wishes(prompts)
        except InvalidRequest as error:
            self.why_not = shorten(error.message, MAX_REASON_CHARS, placeholder=" …")

    def parts(self, prompt_index: int, pixels: NDArray[np.uint8]) -> Parts | None:
        """Whether an image (H, W, 3) shows its prompt, part by part; ``None`` where that cannot be checked."""
        if self.wishes is None:
            return None
        try:
            return Parts.of(judge(read_picture(pixels), self.wishes[prompt_index]))
        except InvalidRequest:
            return None  # not of the picture world's scale


class ImageMeasures:
    """Turns images into records: with a ``network`` all measures, without it those that need no torch."""

    def __init__(self, check: PromptCheck, network: FeatureNetwork | None = None) -> None:
        self._check = check
        self._network = network

    def measure(self, finished: FinishedImage, converged: StoredImage | None) -> ImageRecord:
        """Measure one image; ``converged`` is that of the same seed, ``None`` for the converged one itself."""
        image, pixels, network = finished.image, finished.pixels, self._network
        is_shown = network is not None and image.prompt_index < SHOWN_PROMPTS and image.seed_index == 0
        distance = None if converged is None else self.distance(StoredImage(pixels, finished.latents), converged)
        return ImageRecord(
            prompt_index=image.prompt_index,
            seed_index=image.seed_index,
            seed=finished.seed,
            spacing=finished.spacing,
            evaluations=finished.evaluations,
            engine_s=finished.engine_s,
            features=() if network is None else tuple(network.features(pixels).tolist()),
            parts=self._check.parts(image.prompt_index, pixels),
            distance=distance,
            thumbnail=thumbnail(pixels, THUMBNAIL_PX) if is_shown else None,
        )

    def distance(self, one: StoredImage, converged: StoredImage) -> Distance | None:
        """How near an image is to the converged one; ``None`` where they differ in size."""
        if one.pixels.shape != converged.pixels.shape:
            return None
        rmse = None
        if one.latents is not None and converged.latents is not None:
            rmse = latent_rmse(one.latents, converged.latents)
        return Distance(
            latent_rmse=rmse,
            psnr_db=psnr_db(one.pixels, converged.pixels),
            ssim=None if self._network is None else ssim(one.pixels, converged.pixels),
        )


def thumbnail(pixels: NDArray[np.uint8], side_px: int) -> bytes:
    """(H, W, 3) as a PNG of at most ``side_px`` a side."""
    image = Image.fromarray(pixels)
    image.thumbnail((side_px, side_px), Image.Resampling.LANCZOS)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()

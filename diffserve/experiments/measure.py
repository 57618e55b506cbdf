"""Measures each generated image: prompt match, distance to the converged image, and features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from textwrap import shorten
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.experiments.estimates import CheckerError
from diffserve.experiments.metrics.fidelity import latent_rmse, psnr_db, ssim
from diffserve.experiments.prompts import draw_pictures, read_wishes
from diffserve.experiments.records import Distance, FinishedImage, ImageRecord, Parts, StoredImage
from diffserve.world.checker import judge, read_picture

if TYPE_CHECKING:
    from diffserve.experiments.metrics.set_distance import FeatureNetwork

CHECKED_FAMILY = "embedded"
MAX_REASON_CHARS = 240
SHOWN_PROMPTS = 3
"""Number of prompts whose first-seed images are stored as thumbnails."""

THUMBNAIL_PX = 128
NUM_KNOWN_SCENES = 64
"""Number of rendered scenes that the checker's own error is measured on."""


class PromptCheck:
    """Exact prompt checker for the scenes of the embedded model.

    Attributes:
        prompts: Prompt texts.
        wishes: Parsed scene of each prompt, ``None`` if the prompts cannot be checked.
        why_not: Reason why prompts cannot be checked, otherwise ``None``.
    """

    def __init__(self, family: str, prompts: Sequence[str]) -> None:
        self.prompts = tuple(prompts)
        self.wishes = None
        self.why_not: str | None = None
        if family != CHECKED_FAMILY:
            self.why_not = "only images of the embedded model can be checked against their prompts."
            return
        try:
            self.wishes = read_wishes(prompts)
        except InvalidRequest as error:
            self.why_not = shorten(error.message, MAX_REASON_CHARS, placeholder=" …")

    def parts(self, prompt: str, pixels: NDArray[np.uint8]) -> Parts | None:
        """Check part by part whether an image (H, W, 3) shows ``prompt``; ``None`` if it cannot be checked."""
        if self.wishes is None:
            return None
        try:
            return Parts.of(judge(read_picture(pixels), self.wishes[self.prompts.index(prompt)]))
        except InvalidRequest:
            return None  # the image size does not match the scale of the sprites

    def error(
        self, width_px: int, height_px: int, round_trip: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
    ) -> CheckerError | None:
        """Measure the checker's own error on rendered scenes of the prompts.

        Each image is also judged against another prompt with other objects, which it cannot show.

        Args:
            width_px: Width of the images.
            height_px: Height of the images.
            round_trip: Encodes and decodes an image (H, W, 3) with the model's autoencoder, so that the images have
                its artifacts like those that the model generates.

        Returns:
            The error, or ``None`` if the prompts or images of this size cannot be checked.
        """
        if self.wishes is None:
            return None
        wishes = self.wishes[:NUM_KNOWN_SCENES]
        each = NUM_KNOWN_SCENES // len(wishes)
        missed, wrong = [], []
        for number, pixels in enumerate(draw_pictures(wishes, width_px, height_px, each=each)):
            wish = wishes[number // each]
            try:
                reading = read_picture(round_trip(pixels))
            except InvalidRequest:
                return None
            missed.append(not judge(reading, wish).exact)
            other = next((w for w in wishes if wish.names and w.names and set(w.names) != set(wish.names)), None)
            wrong += [] if other is None else [judge(reading, other).exact]
        return CheckerError(len(missed), sum(missed) / len(missed), sum(wrong) / len(wrong) if wrong else None)


class ModelMeasures(NamedTuple):
    """Measures by networks whose weights the user names; see :mod:`diffserve.experiments.model_measures`.

    Attributes:
        scores: Score of a prompt and an image (H, W, 3) uint8, by name of the :class:`Measure`.
        lpips: LPIPS-like distance of two images of the same shape.
    """

    scores: Mapping[str, Callable[[str, NDArray[np.uint8]], float]] = MappingProxyType({})
    lpips: Callable[[NDArray[np.uint8], NDArray[np.uint8]], float] | None = None


NO_MODELS = ModelMeasures()


class ImageMeasures:
    """Converts images into records, with all measures if ``network`` is set and otherwise those without torch.

    Args:
        check: Checks images against their prompts.
        network: Computes features of images.
        models: Further measures.
    """

    def __init__(
        self, check: PromptCheck, network: FeatureNetwork | None = None, models: ModelMeasures = NO_MODELS
    ) -> None:
        self._check = check
        self._network = network
        self._models = models

    def measure(self, finished: FinishedImage, converged: StoredImage | None) -> ImageRecord:
        """Measure one image; ``converged`` is the reference of its seed, ``None`` for the reference itself."""
        image, pixels, network = finished.image, finished.pixels, self._network
        prompt = self._check.prompts[image.prompt_index] if image.cell.prompt is None else image.cell.prompt
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
            parts=self._check.parts(prompt, pixels),
            distance=distance,
            thumbnail=thumbnail(pixels, THUMBNAIL_PX) if is_shown else None,
            scores={name: score(prompt, pixels) for name, score in self._models.scores.items()},
        )

    def distance(self, image: StoredImage, converged: StoredImage) -> Distance | None:
        """Compute the distance of an image to the converged one, or ``None`` if their sizes differ."""
        if image.pixels.shape != converged.pixels.shape:
            return None
        rmse = None
        if image.latents is not None and converged.latents is not None:
            rmse = latent_rmse(image.latents, converged.latents)
        lpips = self._models.lpips
        return Distance(
            latent_rmse=rmse,
            psnr_db=psnr_db(image.pixels, converged.pixels),
            ssim=None if self._network is None else ssim(image.pixels, converged.pixels),
            lpips=None if lpips is None else lpips(image.pixels, converged.pixels),
        )


def thumbnail(pixels: NDArray[np.uint8], side_px: int) -> bytes:
    """Encode an image (H, W, 3) as PNG, scaled down to at most ``side_px`` per side."""
    image = Image.fromarray(pixels)
    image.thumbnail((side_px, side_px), Image.Resampling.LANCZOS)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()

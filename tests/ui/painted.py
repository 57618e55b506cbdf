"""Simulated images on an experiment's board."""

from __future__ import annotations

import numpy as np

from diffserve.api.types import Picture
from diffserve.experiments.plan import PlannedImage
from diffserve.experiments.records import Distance, FinishedImage, ImageRecord, Parts
from diffserve.media.images import encode_image
from ui.experiment.board import Board

COLOR = (250, 0, 200)


def paint(board: Board, image: PlannedImage, *, is_exact: bool | None = None, psnr_db: float | None = None) -> None:
    """Finish ``image`` as a small square of ``COLOR`` that took eight UNet rows."""
    pixels = np.full((40, 40, 3), COLOR, np.uint8)
    file = encode_image(Picture.from_array(pixels))
    board.save(FinishedImage(image, pixels, 0, "trailing", 8, file=file))
    parts = None
    if is_exact is not None:
        parts = Parts(exact=is_exact, background=is_exact, objects=True, relation=True, size=True)
    board.add(
        image.cell,
        ImageRecord(
            prompt_index=image.prompt_index,
            seed_index=image.seed_index,
            seed=0,
            spacing="trailing",
            evaluations=8,
            engine_s=0.0,
            features=(),
            parts=parts,
            distance=None if psnr_db is None else Distance(psnr_db=psnr_db),
        ),
    )

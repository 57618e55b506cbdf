"""What a picture of an experiment is worth: whether it shows its prompt, and how near it is to the converged one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffserve.errors import InvalidRequest
from diffserve.experiments import judge, read_picture
from diffserve.experiments.prompts import read_wishes

CHECKED_FAMILY: Final = "embedded"
MAX_REASON_CHARS: Final = 240
PEAK: Final = 255.0
BEST_PSNR_DB: Final = 99.0
"""What equal pictures count as, as in the reports of ``diffserve sweep``."""


class PromptCheck:
    """The exact checker of the embedded model's picture world. ``why_not``: why it cannot check, ``None`` if it can."""

    def __init__(self, family: str, prompts: Sequence[str]) -> None:
        self.why_not: str | None = None
        self._wishes = None
        if family != CHECKED_FAMILY:
            self.why_not = "only pictures of the embedded model can be checked against their prompts."
            return
        try:
            self._wishes = read_wishes(prompts)
        except InvalidRequest as error:
            self.why_not = shorten(error.message, MAX_REASON_CHARS, placeholder=" …")

    def is_exact(self, file: Path, prompt_index: int) -> bool | None:
        """Whether the picture shows exactly what its prompt asks for; ``None`` where that cannot be checked."""
        if self._wishes is None:
            return None
        try:
            return judge(read_picture(pixels_of(file)), self._wishes[prompt_index]).exact
        except InvalidRequest:
            return None  # not of the picture world's scale


def psnr_db(file: Path, converged: Path) -> float | None:
    """10 log10(255^2 / mean squared difference) in decibels, at most ``BEST_PSNR_DB``; ``None`` for unequal sizes."""
    painted, target = pixels_of(file), pixels_of(converged)
    if painted.shape != target.shape:
        return None
    squared = float(np.mean(np.square(painted.astype(np.float64) - target)))
    return BEST_PSNR_DB if squared == 0 else min(BEST_PSNR_DB, 10 * float(np.log10(PEAK**2 / squared)))


def pixels_of(file: Path) -> NDArray[np.uint8]:
    """The pixels of an image file, (height, width, 3)."""
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"), dtype=np.uint8)

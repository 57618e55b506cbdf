"""Does the device still compute? Some errors say that it does not (``sticky_errors``); any other that nobody
expected is a reason to ask: a small call of the UNet, which was seen to work when the process began.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from diffserve.errors import DeviceLost
from diffserve.runtime import DiffusionModel
from diffserve.runtime.sticky_errors import first_line
from diffserve.runtime.unet.random_rows import random_rows

PROBE_CELLS: Final = 8

logger = logging.getLogger(__name__)


class DeviceProbe:
    """One row of the smallest size through the UNet of ``model``; of use where that works at the beginning."""

    def __init__(self, model: DiffusionModel) -> None:
        side_px = PROBE_CELLS * model.info.vae_factor
        self._predict = random_rows(model, (side_px, side_px, model.text.window_tokens), 1)
        self.is_of_use = self._trouble() is None
        if not self.is_of_use:
            logger.warning("the UNet takes no picture of %d pixels: a lost device is known by its words only", side_px)

    def check(self) -> None:
        """DeviceLost where the device computes nothing any more. One that is out of memory for a moment is not lost."""
        trouble = self._trouble() if self.is_of_use else None
        if trouble is not None:
            raise DeviceLost(f"a trial call failed, too: {trouble}")

    def _trouble(self) -> str | None:
        try:
            return None if bool(torch.isfinite(self._predict(range(1))).all()) else "its result is not finite"
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"

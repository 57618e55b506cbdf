"""Noise or velocity? SD 2 single files often do not say which their UNet predicts. The UNet itself can be asked."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional as F

from diffserve.runtime.unet.unet import UNetRunner

LAST_TIMESTEP: Final = 999
PROBE_CELLS: Final = 32
WINDOW_TOKENS: Final = 77


def predicts_velocity(unet: UNetRunner, context_width: int) -> bool:
    """Whether the UNet predicts velocity, from its answer to pure noise at the last timestep.

    There the noise is nearly the whole input: a UNet that predicts noise gives its input back (cosine near 1), one that
    predicts velocity gives minus the picture it imagines (cosine near 0).
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((1, unet.latent_channels, PROBE_CELLS, PROBE_CELLS), generator=generator)
    extra = torch.zeros((1, unet.extra_channels, PROBE_CELLS, PROBE_CELLS)) if unet.extra_channels else None
    contexts = torch.zeros((1, WINDOW_TOKENS, context_width))
    output = unet.predict(noise, torch.tensor([LAST_TIMESTEP]), contexts, extra=extra).cpu()
    return bool(F.cosine_similarity(noise.flatten(), output.flatten(), dim=0) < 0.5)

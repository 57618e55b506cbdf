"""What loading gives, whichever way a model lay on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.text import TextEncoder


@dataclass(frozen=True)
class LoadedParts:
    """Networks, tokenizers and configurations, before runners are made of them.

    files                the weight files, for the digest
    zero_empty_negative  SDXL: an empty negative prompt is all zeros instead of an encoded ""
    guess_prediction     nothing on disk says whether the UNet predicts noise or velocity: ask the UNet
    """

    unet: Any
    vae: Any
    encoders: tuple[TextEncoder, ...]
    scheduler_config: dict[str, Any]
    zero_empty_negative: bool
    vae_dtype: torch.dtype
    files: tuple[Path, ...]
    guess_prediction: bool = False


def vae_precision(choice: DeviceChoice, *, upcast: bool) -> DeviceChoice:
    """``choice``, or float32 where it is float16 and the VAE's configuration says that it overflows there."""
    is_half = choice.compute_dtype == torch.float16
    return replace(choice, compute_dtype=torch.float32) if upcast and is_half else choice

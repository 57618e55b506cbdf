"""What loading gives, whichever way a model lay on disk."""

from __future__ import annotations

from collections.abc import Mapping
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


def vae_precision(choice: DeviceChoice, vae_config: Mapping[str, Any], *, is_sdxl: bool) -> DeviceChoice:
    """``choice``, or float32 where it is float16 and the model's VAE overflows there.

    SDXL's own does, unless its configuration says ``force_upcast: false`` (mended ones do). The others do not, whatever
    stands there: diffusers writes ``true`` by default and never reads it for Stable Diffusion 1 and 2. No VAE overflows
    in bfloat16, which has the range of float32.
    """
    is_half = choice.compute_dtype == torch.float16
    needs_float32 = is_sdxl and is_half and bool(vae_config.get("force_upcast", True))
    return replace(choice, compute_dtype=torch.float32) if needs_float32 else choice

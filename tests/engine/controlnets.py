"""ControlNets of a tiny model as directories, in random numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from diffserve.api.types import GenerationRequest, Picture
from diffserve.models.controlnets import Control
from diffserve.runtime.loading.library_imports import import_quietly
from tests.engine.pipelines import image_request


def save_controlnet(unet: Any, directory: Path, seed: int, **options: Any) -> Path:
    """Save a ControlNet that fits ``unet``, with random weights in zero convolutions; ``options`` are of its config."""
    torch.manual_seed(seed)
    network = import_quietly("diffusers", "ControlNetModel").from_unet(unet, load_weights_from_unet=False, **options)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith(("controlnet_down", "controlnet_mid", "controlnet_cond_embedding.conv_out")):
                parameter.copy_(torch.randn(parameter.shape) / parameter[0].numel() ** 0.5)
    network.save_pretrained(str(directory))
    return directory


def write_folder(folder: Path, unet: Any) -> Path:
    """Two ControlNets, ``edges`` and ``depth``, the second for blue, green and red."""
    save_controlnet(unet, folder / "edges", 1)
    save_controlnet(unet, folder / "depth", 2, controlnet_conditioning_channel_order="bgr")
    return folder


def with_folder(model: Any, folder: Path) -> Any:
    """``model``, its requests taking ControlNets from ``folder``."""
    return replace(model, profile=msgspec.structs.replace(model.profile, controlnet_dir=str(folder)))


def control_map(seed: int, width_px: int = 64, height_px: int = 64) -> Picture:
    """Large squares of random colours."""
    squares = np.random.default_rng(seed).integers(0, 256, (height_px // 16 + 1, width_px // 16 + 1, 3), dtype=np.uint8)
    return Picture.from_array(squares.repeat(16, 0).repeat(16, 1)[:height_px, :width_px])


def controlled(
    *controls: Control, kind: str = "sd15", sampler: str = "ddim", seed: int = 1, **extra_fields: Any
) -> Any:
    """Return a request with ``controls``, each with a control image of its index."""
    images = tuple(control_map(place) for place in range(len(controls)))
    fields: dict[str, Any] = {
        "num_steps": 4,
        "controlnets": controls,
        "control_images": images,
        "prompt": "cat",
    } | extra_fields
    request: GenerationRequest = image_request(kind, sampler, seed, **fields)
    return request

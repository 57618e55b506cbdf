"""A UNet with the shapes of a model and none of its weights, for a compiler process on the GPU of a running engine.

Packages take the engine's weights when they are loaded, so a compiler only needs parameters of the right shape, layout
and device. All parameters share one block as large as the largest of them: 60 MB for SDXL's UNet in place of 5 GB.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from diffserve.api.types import ModelProfile
from diffserve.runtime.model import DiffusionModel, load_model
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.unet.unet import UNetRunner

SPACING_BYTES: Final = 64
"""Distance of the starts of two parameters: compilers merge parameters that start at one address."""


def load_outline(
    path: str | Path, choice: DeviceChoice, *, profile: ModelProfile, channels_last: bool
) -> DiffusionModel:
    """Return the model at ``path`` with a UNet of meaningless numbers on ``choice.device``.

    ``channels_last``: the memory format of convolution weights. Raises what ``load_model`` raises.
    """
    model = load_model(path, device="meta", dtype=choice.dtype, profile=profile)
    network = model.unet.network
    if channels_last:
        network.to(memory_format=torch.channels_last)
    share_memory(network, choice.device)
    unet = UNetRunner(network, device=choice.device, dtype=model.dtype)
    return replace(model, unet=unet, choice=replace(model.choice, device=choice.device))


def share_memory(network: nn.Module, device: torch.device) -> None:
    """Replace every parameter and buffer of ``network`` by one on ``device`` that shares memory with the others."""
    entries = [
        (module, name, tensor)
        for module in network.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    most_bytes = max(tensor.nbytes for _, _, tensor in entries)
    block = torch.zeros(most_bytes + SPACING_BYTES * len(entries), dtype=torch.uint8, device=device)
    for number, (module, name, tensor) in enumerate(entries):
        start = SPACING_BYTES * number
        shared = block[start : start + tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        if name in module._parameters:
            module._parameters[name] = nn.Parameter(shared, requires_grad=False)
        else:
            module._buffers[name] = shared

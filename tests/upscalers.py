"""Small upscalers with random weights, in the layouts of published files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from diffserve.models.upscalers import CompactShape, RrdbShape, SwinIRShape, UpscalerShape
from diffserve.runtime.upscaling.network import build_network

COMPACT = CompactShape(features=8, num_convs=3, scale=2)
RRDB = RrdbShape(features=8, growth=4, num_blocks=2, num_doublings=2)
SWINIR = SwinIRShape(
    embed=12, depths=(2, 2), heads=(2, 3), window=4, mlp_width=24, upsampler="pixelshuffledirect", scale=2
)


def random_tensors(shape: UpscalerShape, seed: int = 0, spread: float = 0.2) -> dict[str, Tensor]:
    """Return random weights of a network by name, with biases and slopes that differ."""
    draw = torch.Generator().manual_seed(seed)
    tensors = build_network(shape).state_dict()
    return {
        name: torch.randn(tensor.shape, generator=draw) * (spread if tensor.ndim > 1 else 0.1)
        + float("norm" in name and name.endswith("weight"))
        for name, tensor in tensors.items()
    }


def write_upscaler(path: Path, shape: UpscalerShape = COMPACT, seed: int = 0) -> Path:
    """Write an upscaler with random weights."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(random_tensors(shape, seed, spread=0.1), path)
    return path

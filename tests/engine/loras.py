"""Adapters of a tiny model as files, in random numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks.random_models import lora_tensors
from tests.runtime.original_layout import unet_tensors

ATTENTION = (".to_q", ".to_k", ".to_v", ".to_out.0")
QUERIES = (".attn1.to_q", ".attn2.to_q")
KERNELS = (".conv1", ".time_emb_proj", ".proj_in", "downsamplers.0.conv", "conv_out")
TEXT = (".q_proj", ".fc1", "text_projection")


def write_folder(folder: Path, model: Any) -> Path:
    """Four adapters of three ranks: of queries, of attention, of convolutions, and of everything, texts included."""
    for seed, (name, ends, rank) in enumerate(
        [
            ("queries", QUERIES, 2),
            ("attention", ATTENTION, 8),
            ("kernels", KERNELS, 4),
            ("everything", (*ATTENTION, *KERNELS, *TEXT), 20),
        ]
    ):
        save_file(lora_tensors(model, ends, seed, rank), folder / f"{name}.safetensors")
    return folder


def with_folder(model: Any, folder: Path) -> Any:
    """``model``, its requests taking adapters from ``folder``."""
    return replace(model, profile=msgspec.structs.replace(model.profile, lora_dir=str(folder)))


def kohya_tensors(tensors: dict[str, torch.Tensor], pipeline: Any) -> dict[str, torch.Tensor]:
    """Rename ``tensors`` from diffusers' names to those of kohya's trainer, with an alpha for each layer.

    An SDXL UNet gets the block numbers of SGM, other UNets those of diffusers; the two encoders of SDXL get numbers.
    """
    is_xl = hasattr(pipeline, "text_encoder_2")
    prefixes = {"unet": "unet", "text_encoder": "te1" if is_xl else "te", "text_encoder_2": "te2"}
    keys = {tensor.data_ptr(): key for key, tensor in unet_tensors(pipeline.unet)} if is_xl else {}
    weights = {name: keys.get(tensor.data_ptr(), name) for name, tensor in pipeline.unet.state_dict().items()}
    adapter_tensors: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        component, _, layer_name = name.partition(".")
        layer, half = layer_name.removesuffix(".weight").rsplit(".lora_", 1)
        if component == "unet":
            layer = weights[f"{layer}.weight"].removeprefix("model.diffusion_model.").removesuffix(".weight")
        elif not layer.startswith(("text_model.", "text_projection")):
            layer = f"text_model.{layer}"
        flat = f"lora_{prefixes[component]}_{layer.replace('.', '_')}"
        adapter_tensors[f"{flat}.lora_{'down' if half == 'A' else 'up'}.weight"] = tensor
        if half == "A":
            adapter_tensors[f"{flat}.alpha"] = torch.tensor(tensor.shape[0] / 2)
    return adapter_tensors

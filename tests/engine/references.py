"""IP-Adapters and a CLIP image encoder for tiny models, in random numbers, in both layouts of their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks.random_models import adapter_tensors, save_image_encoder
from diffserve.api.types import GenerationRequest
from diffserve.models.references import Reference
from diffserve.runtime.loading.library_imports import import_quietly
from tests.engine.controlnets import control_map
from tests.engine.pipelines import image_request

ENCODER = "image_encoder"
BASE, PLUS, DIFFUSERS_BASE, DIFFUSERS_PLUS = "base", "plus", "diffusers/base", "diffusers/plus"
TOKENS = {BASE: 4, PLUS: 6}


def in_diffusers_layout(unet_directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what diffusers' UNet saves of the adapter after it has loaded ``tensors``."""
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(unet_directory))
    nested: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in tensors.items():
        kind, _, key = name.partition(".")
        nested[kind][key] = tensor
    unet._load_ip_adapter_weights([nested])
    saved = unet.state_dict()
    return {name: saved[name].clone() for name in saved if "_ip." in name or name.startswith("encoder_hid_proj")}


def write_folder(folder: Path, model: Path) -> Path:
    """Write an image encoder and adapters for the model in ``model``: base and plus, each in both layouts."""
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(model / "unet"))
    save_image_encoder(folder / ENCODER)
    (folder / "diffusers").mkdir()
    for seed, (kind, num_tokens) in enumerate(TOKENS.items(), start=11):
        tensors = adapter_tensors(unet, kind, seed, num_tokens)
        save_file(tensors, folder / f"{kind}.safetensors")
        save_file(in_diffusers_layout(model / "unet", tensors), folder / "diffusers" / f"{kind}.safetensors")
    return folder


def with_folder(model: Any, folder: Path) -> Any:
    """Return ``model`` with references from ``folder``."""
    return replace(model, profile=msgspec.structs.replace(model.profile, reference_dir=str(folder)))


def referenced(
    *references: Reference, kind: str = "sd15", sampler: str = "ddim", seed: int = 1, **extra_fields: Any
) -> GenerationRequest:
    """Return a request with ``references``, each with an image of its index, wider than high."""
    images = tuple(control_map(place + 3, 80, 48) for place in range(len(references)))
    fields: dict[str, Any] = {"num_steps": 4, "references": references, "reference_images": images, "prompt": "cat"}
    return image_request(kind, sampler, seed, **(fields | extra_fields))

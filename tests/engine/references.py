"""IP-Adapters and a CLIP image encoder for tiny models, in random numbers, in both layouts of their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from diffserve.api.types import GenerationRequest
from diffserve.models.references import Reference
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from tests.engine.controlnets import control_map
from tests.engine.pipelines import image_request

ENCODER = "image_encoder"
HIDDEN, PROJECTED, SIDE = 32, 24, 28
BASE, PLUS, DIFFUSERS_BASE, DIFFUSERS_PLUS = "base", "plus", "diffusers/base", "diffusers/plus"


def save_encoder(directory: Path, hidden: int = HIDDEN, projected: int = PROJECTED) -> Path:
    """Save a ``CLIPVisionModelWithProjection`` with inputs of 28 x 28 pixels."""
    config = import_quietly("transformers", "CLIPVisionConfig")(
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=7,
        projection_dim=projected,
    )
    torch.manual_seed(5)
    with hushed("transformers"):
        encoder = import_quietly("transformers", "CLIPVisionModelWithProjection")(config)
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.copy_(torch.randn(parameter.shape) / max(1.0, parameter[0].numel() ** 0.5))
        encoder.save_pretrained(str(directory))
    return directory


def adapter_tensors(unet: Any, kind: str, seed: int, *, num_tokens: int = 4) -> dict[str, torch.Tensor]:
    """Return random tensors of an adapter of ``kind`` for ``unet``, by their original names."""
    torch.manual_seed(seed)
    width = unet.config.cross_attention_dim

    def normal(*shape: int) -> torch.Tensor:
        scale: float = shape[-1] ** -0.5
        return scale * torch.randn(shape)

    def norm(name: str, size: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1.0 + torch.randn(size) / 8, f"{name}.bias": torch.randn(size) / 8}

    if kind == BASE:
        projection = {
            "proj.weight": normal(num_tokens * width, PROJECTED),
            "proj.bias": torch.randn(num_tokens * width),
        }
        projection |= norm("norm", width)
    else:
        inner = 64
        projection = {"latents": torch.randn(1, num_tokens, inner)}
        for name, shape in {"proj_in": (inner, HIDDEN), "proj_out": (width, inner)}.items():
            projection |= {f"{name}.weight": normal(*shape), f"{name}.bias": torch.randn(shape[0]) / 8}
        projection |= norm("norm_out", width)
        for block in range(4):  # diffusers builds four
            first, second = f"layers.{block}.0", f"layers.{block}.1"
            projection |= norm(f"{first}.norm1", inner) | norm(f"{first}.norm2", inner) | norm(f"{second}.0", inner)
            projection |= {f"{first}.to_q.weight": normal(128, inner), f"{first}.to_kv.weight": normal(256, inner)}
            projection |= {f"{first}.to_out.weight": normal(inner, 128), f"{second}.1.weight": normal(256, inner)}
            projection |= {f"{second}.3.weight": normal(inner, 256)}
    tensors = {f"image_proj.{name}": tensor for name, tensor in projection.items()}
    modules = [module for name, module in unet.named_modules() if name.endswith("attn2")]
    for place, module in enumerate(modules):
        for part in "kv":
            weight = 2.0 * normal(module.to_k.weight.shape[0], width)
            tensors[f"ip_adapter.{2 * place + 1}.to_{part}_ip.weight"] = weight
    return tensors


def in_diffusers_layout(unet_directory: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what diffusers' UNet saves of the adapter after it has loaded ``tensors``."""
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(unet_directory))
    nested: dict[str, dict[str, torch.Tensor]] = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        nested[kind][rest] = tensor
    unet._load_ip_adapter_weights([nested])
    saved = unet.state_dict()
    return {name: saved[name].clone() for name in saved if "_ip." in name or name.startswith("encoder_hid_proj")}


def write_folder(folder: Path, model: Path) -> Path:
    """Write an image encoder and adapters for the model in ``model``: base and plus, each in both layouts."""
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(model / "unet"))
    save_encoder(folder / ENCODER)
    (folder / "diffusers").mkdir()
    for seed, (kind, num_tokens) in enumerate(((BASE, 4), (PLUS, 6)), start=11):
        tensors = adapter_tensors(unet, kind, seed, num_tokens=num_tokens)
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

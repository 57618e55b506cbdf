"""Export of the trained parts as one diffusers directory in 16 bits."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from transformers import CLIPTokenizer

from diffserve.runtime.loading.checkpoint import MANIFEST_FILE
from diffserve.training.denoiser_training import Denoiser, build_scheduler
from diffserve.training.vae_training import LATENT_CHANNELS
from diffserve.world.prompt_reading import write_world

POSTERIOR_STD = 0.05


def fold_normalisation(vae: AutoencoderKL, mean: list[float], std: list[float]) -> AutoencoderKL:
    """Return a copy of the autoencoder whose latents have zero mean and unit variance in every channel.

    The two 1 x 1 convolutions around the latents take the affine map, so that the scaling factor is 1 and any reader of
    the format gets it right. The posterior's variance, untrained, is set to a small constant.
    """
    vae = copy.deepcopy(vae)
    shift, scale = torch.tensor(mean), torch.tensor(std)
    with torch.no_grad():
        encode, decode = vae.quant_conv, vae.post_quant_conv
        encode.weight[:LATENT_CHANNELS] /= scale.view(-1, 1, 1, 1)
        encode.bias[:LATENT_CHANNELS] = (encode.bias[:LATENT_CHANNELS] - shift) / scale
        encode.weight[LATENT_CHANNELS:] = 0
        encode.bias[LATENT_CHANNELS:] = 2 * math.log(POSTERIOR_STD)
        decode.bias += decode.weight[:, :, 0, 0] @ shift
        decode.weight *= scale.view(1, -1, 1, 1)
    return vae


def export(directory: Path, vae: AutoencoderKL, denoiser: Denoiser, tokenizer: CLIPTokenizer) -> Path:
    """Save all parts under ``directory`` as fp16 safetensors with their configs; ``vae`` is already normalised."""
    halves = {name: copy.deepcopy(part).cpu().half() for name, part in (
        ("vae", vae), ("unet", denoiser.unet), ("text_encoder", denoiser.text_encoder))}  # fmt: skip
    for name, part in halves.items():
        part.save_pretrained(directory / name, safe_serialization=True)
        config = json.loads((directory / name / "config.json").read_text(encoding="utf-8"))
        config.pop("_name_or_path", None)  # a local path, which means nothing on another machine
        (directory / name / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(directory / "tokenizer")
    build_scheduler().save_pretrained(directory / "scheduler")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "requires_safety_checker": False,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (directory / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    write_world(directory)
    (directory / MANIFEST_FILE).unlink(missing_ok=True)  # belongs to earlier weights; installation writes a new one
    return directory

"""Sample images during training: a sheet and a quick score, directly from the networks in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPTokenizer

from diffserve.training.denoiser_training import Denoiser, build_scheduler
from diffserve.training.vae_training import held_out_pictures
from diffserve.world.captions import HELD_OUT_SEED
from diffserve.world.checker import check
from diffserve.world.scenes import Scene


@torch.inference_mode()
def paint(
    denoiser: Denoiser,
    vae: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    captions: list[str],
    *,
    num_steps: int = 30,
    guidance_scale: float = 3.0,
    seed: int = 0,
) -> NDArray[np.uint8]:
    """Generate images (N, 128, 128, 3) in uint8 by DDIM; image i starts from seed + i."""
    device = next(denoiser.parameters()).device
    words = [*captions, *([""] * len(captions))]
    ids = tokenizer(words, padding="max_length", truncation=True, return_tensors="pt").input_ids.to(device)
    scheduler = build_scheduler()
    scheduler.set_timesteps(num_steps)
    draws = [torch.randn(1, 8, 16, 16, generator=torch.Generator().manual_seed(seed + i)) for i in range(len(captions))]
    latents = torch.cat(draws).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for timestep in scheduler.timesteps:
            both = denoiser(torch.cat([latents, latents]), timestep.expand(2 * len(latents)).to(device), ids).float()
            cond, uncond = both.chunk(2)
            latents = scheduler.step(uncond + guidance_scale * (cond - uncond), timestep, latents).prev_sample
        painted = torch.cat([vae.decode(part).sample for part in latents.split(8)])
    return to_pixels(painted)


def to_pixels(painted: Tensor) -> NDArray[np.uint8]:
    """Convert (N, 3, H, W) in -1..1 to (N, H, W, 3) in uint8."""
    unit = painted.float().clamp(-1, 1).add(1).mul(127.5).round()
    return unit.byte().permute(0, 2, 3, 1).cpu().numpy()


def sheet(pictures: Sequence[NDArray[np.uint8]], columns: int, path: Path, **options: Any) -> Path:
    """Save images of one shape (H, W, 3) as one grid; ``options`` are passed to the image format."""
    rows = [np.concatenate(pictures[i : i + columns], axis=1) for i in range(0, len(pictures), columns)]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate(rows)).save(path, **options)
    return path


@torch.inference_mode()
def round_trip_sheet(vae: AutoencoderKL, path: Path) -> Path:
    """Save held-out scenes, each above its round trip through the autoencoder."""
    truth = next(held_out_pictures(HELD_OUT_SEED, 8, vae.device))
    back = vae.decode(vae.encode(truth).latent_dist.mode()).sample
    return sheet([*to_pixels(torch.cat([truth, back]))], len(truth), path)


@torch.inference_mode()
def preview_sheet(net: nn.Module, vae: AutoencoderKL, path: Path) -> Path:
    """Save held-out scenes as the autoencoder decodes them, each above its preview."""
    latents = vae.encode(next(held_out_pictures(HELD_OUT_SEED, 8, vae.device))).latent_dist.mode()
    return sheet([*to_pixels(torch.cat([vae.decode(latents).sample, net(latents)]))], len(latents), path)


def quick_score(pictures: NDArray[np.uint8], truth: list[Scene]) -> str:
    """Format exact matches, correct backgrounds, and requested objects in the images as one line."""
    verdicts = [check(pixels, scene) for pixels, scene in zip(pictures, truth, strict=True)]
    num_requested = sum(len(scene.objects) for scene in truth)
    num_detected = sum(
        (Counter(detected.name for detected in verdict.reading.objects) & Counter(scene.names)).total()
        for verdict, scene in zip(verdicts, truth, strict=True)
    )
    exact = sum(verdict.exact for verdict in verdicts)
    grounds = sum(verdict.background for verdict in verdicts)
    return f"exact {exact}/{len(truth)} background {grounds}/{len(truth)} objects {num_detected}/{num_requested}"

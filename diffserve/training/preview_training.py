"""The preview stage: a tiny decoder that shows denoised estimates while an image is being generated.

The targets are the rendered scenes: cheaper than the autoencoder's decodes of their latents, and sharper. A denoised
estimate is about the mean of all possible images (Tweedie's formula), exaggerated by guidance and slightly noisy.
So some latents are mixed with others, together with their images, some are stretched, and all get a little noise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors.torch import save
from torch import Tensor

from diffserve.models.model_files import DIFFUSERS_STEM
from diffserve.runtime.vae.preview import OWN_CLASS, PreviewConfig, PreviewDecoder
from diffserve.training.latents import LatentScenes, draw_rows
from diffserve.training.training_loop import Look, Run, TrainSettings
from diffserve.training.vae_training import (
    LATENT_CHANNELS,
    held_out_pictures,
    mean_psnr_db,
    reconstruction_loss,
    to_unit,
)
from diffserve.world.render import render
from diffserve.world.scenes import GRID_PX

CONFIG = PreviewConfig(LATENT_CHANNELS, widths=(64, 32, 16), num_blocks=(2, 1, 1), factor=GRID_PX)
MIXED_SHARE = 0.3
STRETCHED_SHARE = 0.2
MOST_STRETCH = 2.0
MOST_NOISE = 0.2


def batches(data: list[LatentScenes], batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches of one canvas each: normalised latents (B, 8, h, w), images (B, 3, 8 h, 8 w) in -1..1."""
    rng, latents = random.Random(seed), [shelf.latents for shelf in data]
    while True:
        canvas, indices = draw_rows(rng, latents, batch_size)
        height_px, width_px = (GRID_PX * cells for cells in latents[canvas].shape[-2:])
        pictures = np.stack([render(data[canvas].scenes[index], width_px, height_px) for index in indices])
        yield latents[canvas][torch.tensor(indices)].float(), to_unit(pictures)


def like_estimates(latents: Tensor, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Turn latents and images into augmented pairs that resemble denoised estimates; shapes do not change."""
    mixed, stretched = _uniform(latents) < MIXED_SHARE, _uniform(latents) < STRETCHED_SHARE
    weight = torch.where(mixed, _uniform(latents), 1.0)
    stretch = torch.where(stretched, 1 + (MOST_STRETCH - 1) * _uniform(latents), 1.0)
    noise = MOST_NOISE * _uniform(latents) * torch.randn_like(latents)
    return stretch * _mix(latents, weight) + noise, _mix(pictures, weight)


def _mix(rows: Tensor, weight: Tensor) -> Tensor:
    """Blend each of ``rows`` (B, ...) at ``weight`` (B, 1, 1, 1) with the row before it."""
    return weight * rows + (1 - weight) * rows.roll(1, 0)


def _uniform(rows: Tensor) -> Tensor:
    return torch.rand(len(rows), 1, 1, 1, device=rows.device)


def train_preview(
    settings: TrainSettings,
    work: Path,
    data: list[LatentScenes],
    look: Look[PreviewDecoder] | None = None,
    look_every: int = 300,
    *,
    made_from: str = "",
) -> PreviewDecoder:
    """Train the preview decoder on normalised ``data`` of the autoencoder with fingerprint ``made_from``.

    Training resumes from ``work/preview.pt``. Returns the averaged decoder.
    """
    torch.manual_seed(settings.seed)
    net = PreviewDecoder(CONFIG).train().to(settings.device)
    run = Run("preview", net, settings, work, made_from=made_from)
    torch.manual_seed(settings.seed + 1 + run.iteration)
    source = batches(data, settings.batch_size, settings.seed + run.iteration)

    def losses() -> list[Tensor]:
        latents, truth = like_estimates(*(part.to(settings.device) for part in next(source)))
        with run.autocast():
            painted = net(latents)
        return [reconstruction_loss(painted.float(), truth)]

    return run.train(losses, look, look_every)


def save_preview(net: PreviewDecoder, directory: Path) -> Path:
    """Write config.json and the weights in 16 bits into ``directory``, for ``runtime.preview``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"_class_name": OWN_CLASS, **msgspec.to_builtins(net.config)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.cpu().half().contiguous() for name, tensor in net.state_dict().items()}
    (directory / f"{DIFFUSERS_STEM}.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    return directory


@torch.inference_mode()
def fidelity_db(net: PreviewDecoder, vae: AutoencoderKL, seed: int, num_scenes: int = 64) -> float:
    """Compute the mean PSNR in dB of previews against the decodes of ``vae``, on held-out scenes.

    ``vae`` is already normalised.
    """
    held_out = held_out_pictures(seed, num_scenes, vae.device)
    latents = (vae.encode(truth).latent_dist.mode() for truth in held_out)
    return mean_psnr_db((net(batch), vae.decode(batch).sample) for batch in latents)

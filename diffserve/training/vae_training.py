"""The autoencoder stage: a VAE that turns 128 x 128 scenes into 16 x 16 x 8 latents and back.

A plain reconstruction loss (L1 plus L1 of the image gradients) with small fixed noise on the latents and a light
penalty on their size. A KL term with unit noise would collapse the posterior at the start of so short a training.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from diffserve.experiments.metrics.fidelity import psnr_db
from diffserve.training.training_loop import Look, Run, TrainSettings
from diffserve.world.render import render
from diffserve.world.scenes import CANVAS_PX, GRID_PX, Scene, scenes

LATENT_CHANNELS = 8
LATENT_NOISE = 0.1
CROP_PX = 64
OFF_GRID_SHARE = 0.1  # crops off the grid, so that images from other sources can be encoded too


def build_vae() -> AutoencoderKL:
    """Build the autoencoder: 3.8 M parameters, eight pixels to a latent cell."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=16,
        sample_size=CANVAS_PX,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        force_upcast=False,
    )


def crops(seed: int, batch_size: int) -> Iterator[Tensor]:
    """Yield endless batches (batch_size, 3, CROP_PX, CROP_PX) in -1..1: scene crops around objects, a few anywhere."""
    rng = random.Random(seed)
    source = scenes(seed, held_out=False)
    while True:
        yield to_unit(np.stack([_crop(next(source), rng) for _ in range(batch_size)]))


def _crop(scene: Scene, rng: random.Random) -> np.ndarray:
    target = rng.choice(scene.objects)
    spread = CROP_PX // 2 if rng.random() < 0.85 else CANVAS_PX
    step = 1 if rng.random() < OFF_GRID_SHARE else GRID_PX
    corner = [
        min(CANVAS_PX - CROP_PX, max(0, centre - CROP_PX // 2 + rng.randint(-spread, spread))) // step * step
        for centre in (target.y_px, target.x_px)
    ]
    return render(scene)[corner[0] : corner[0] + CROP_PX, corner[1] : corner[1] + CROP_PX]


def to_unit(pixels: np.ndarray) -> Tensor:
    """Convert (B, H, W, 3) in uint8 to (B, 3, H, W) float32 in -1..1."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def reconstruction_loss(painted: Tensor, truth: Tensor) -> Tensor:
    """Compute the mean absolute error of the pixels plus that of their horizontal and vertical differences."""
    error = painted - truth
    edges = (error[..., 1:] - error[..., :-1]).abs().mean() + (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return error.abs().mean() + edges


def train_vae(
    settings: TrainSettings,
    work: Path,
    start: Path | None = None,
    look: Look[AutoencoderKL] | None = None,
    look_every: int = 500,
) -> AutoencoderKL:
    """Train the autoencoder, resuming from ``work/vae.pt``, else from the weights in ``start``, else from nothing.

    Returns the autoencoder before normalisation.
    """
    torch.manual_seed(settings.seed)
    vae = build_vae() if start is None else AutoencoderKL.from_pretrained(start, torch_dtype=torch.float32)
    vae.to(settings.device, memory_format=torch.channels_last)
    run = Run("vae", vae.train(), settings, work)
    data = crops(settings.seed + run.iteration, settings.batch_size)

    def losses() -> list[Tensor]:
        truth = next(data).to(settings.device)
        with run.autocast():
            latents = vae.quant_conv(vae.encoder(truth))[:, :LATENT_CHANNELS]
            noisy = latents + LATENT_NOISE * torch.randn_like(latents)
            painted = vae.decoder(vae.post_quant_conv(noisy))
        return [reconstruction_loss(painted.float(), truth) + 1e-3 * latents.float().square().mean()]

    return run.train(losses, look, look_every)


def held_out_pictures(seed: int, num_scenes: int, device: torch.device) -> Iterator[Tensor]:
    """Yield held-out scenes in batches of at most eight, (B, 3, 128, 128) in -1..1."""
    pixels = np.stack([render(scene) for scene in islice(scenes(seed, held_out=True), num_scenes)])
    yield from to_unit(pixels).to(device).split(8)


@torch.inference_mode()
def round_trip_db(vae: AutoencoderKL, seed: int, num_scenes: int = 64) -> float:
    """Compute the mean round-trip PSNR in dB on held-out scenes."""
    held_out = held_out_pictures(seed, num_scenes, vae.device)
    return mean_psnr_db((vae.decode(vae.encode(truth).latent_dist.mode()).sample, truth) for truth in held_out)


def mean_psnr_db(batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Compute the mean PSNR in dB of pairs of images (B, 3, H, W), both clamped to -1..1."""
    values = []
    for batch in batches:
        painted, truth = (part.clamp(-1, 1).cpu().numpy() for part in batch)
        values += [psnr_db(image, reference, peak=2.0) for image, reference in zip(painted, truth, strict=True)]
    return mean(values)

"""Stages two and three: encode scenes once, then train text encoder and UNet together on their latents.

v-prediction with a zero-terminal-SNR schedule (Lin et al., 2024, arXiv 2305.08891): flat, strongly coloured backgrounds
need a last timestep that is pure noise. A tenth of the captions is dropped, so that classifier-free guidance works.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from diffserve.embedded.captions import caption
from diffserve.embedded.muon import Muon, hidden_matrices
from diffserve.embedded.render import render
from diffserve.embedded.tokenizer import MAX_TOKENS
from diffserve.embedded.training import Run, TrainSettings, adamw
from diffserve.embedded.vae_training import LATENT_CHANNELS, to_unit
from diffserve.embedded.world import Scene, scenes

TEXT_WIDTH = 192
CAPTION_DROPOUT = 0.1


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """A causal CLIP text encoder, 3 layers of width 192."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=6,
            max_position_embeddings=MAX_TOKENS,
            projection_dim=TEXT_WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_unet() -> UNet2DConditionModel:
    """The UNet: plain blocks at 16 x 16, cross-attention at 8 x 8."""
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(96, 192),
        layers_per_block=2,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=6,
    )


def build_scheduler() -> DDIMScheduler:
    """The noise schedule the denoiser is trained on and sampled with."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=0,
    )


class Denoiser(nn.Module):
    """Text encoder and UNet as one trainable net.

    Attention is computed by plain products: for a few dozen tokens the fused kernel's backward pass on a CPU makes the
    whole iteration a quarter slower.
    """

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.text_encoder = build_text_encoder(tokenizer)
        self.text_encoder.set_attn_implementation("eager")
        self.unet = build_unet()
        self.unet.set_attn_processor(AttnProcessor())

    def forward(self, noisy: Tensor, timesteps: Tensor, token_ids: Tensor) -> Tensor:
        """(B, 8, h, w), (B,), (B, MAX_TOKENS) -> predicted velocity (B, 8, h, w)."""
        context = self.text_encoder(token_ids).last_hidden_state
        velocity: Tensor = self.unet(noisy, timesteps, encoder_hidden_states=context).sample
        return velocity


@dataclass(frozen=True)
class LatentScenes:
    """Scenes and their normalised latents (N, 8, 16, 16) in 16 bits."""

    scenes: list[Scene]
    latents: Tensor


@torch.inference_mode()
def encode_scenes(vae: AutoencoderKL, work: Path, *, num_scenes: int, seed: int, device: str) -> LatentScenes:
    """Render and encode ``num_scenes`` training scenes, keeping the latents in ``work/latents.pt``."""
    chosen = list(islice(scenes(seed, held_out=False), num_scenes))
    path = work / "latents.pt"
    if path.is_file():
        latents: Tensor = torch.load(path, weights_only=True)
        if len(latents) == num_scenes:
            return LatentScenes(chosen, latents)
    parts = []
    for start in range(0, num_scenes, 32):
        pixels = to_unit(np.stack([render(scene) for scene in chosen[start : start + 32]])).to(device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            parts.append(vae.encode(pixels).latent_dist.mode().float().cpu())
        if start % 3200 == 0:
            print(f"latents {start}/{num_scenes}", flush=True)
    latents = torch.cat(parts).half()
    torch.save(latents, path)
    return LatentScenes(chosen, latents)


def channel_statistics(latents: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every latent channel, for the autoencoder's config."""
    flat = latents.float().transpose(0, 1).flatten(1)
    return flat.mean(dim=1).tolist(), flat.std(dim=1).tolist()


def normalise(latents: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """Centre and scale every channel to unit variance."""
    shape = (1, -1, 1, 1)
    return (latents.float() - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


class Batches:
    """Random training batches: latents with a caption worded anew each time, a tenth of them empty."""

    def __init__(self, data: LatentScenes, tokenizer: CLIPTokenizer, settings: TrainSettings, seed: int) -> None:
        self._data, self._tokenizer, self._settings = data, tokenizer, settings
        self._rng = random.Random(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """(B, 8, 16, 16) float32 latents and (B, MAX_TOKENS) token ids on the training device."""
        chosen = self._rng.choices(range(len(self._data.scenes)), k=self._settings.batch_size)
        words = [
            "" if self._rng.random() < CAPTION_DROPOUT else caption(self._data.scenes[index], self._rng)
            for index in chosen
        ]
        ids = self._tokenizer(words, padding="max_length", truncation=True, return_tensors="pt").input_ids
        latents = self._data.latents[torch.tensor(chosen)].float()
        return latents.to(self._settings.device), ids.to(self._settings.device)


def velocity_loss(denoiser: Denoiser, latents: Tensor, token_ids: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Mean squared error of the velocity v = sqrt(a) noise - sqrt(1 - a) latents (Salimans & Ho, 2022, eq. 12)."""
    timesteps = stratified_timesteps(len(latents), len(alphas_cumprod)).to(latents.device)
    signal = alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    noise = torch.randn_like(latents)
    noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
    velocity = signal.sqrt() * noise - (1 - signal).sqrt() * latents
    error: Tensor = denoiser(noisy, timesteps, token_ids).float() - velocity
    return error.square().mean()


def stratified_timesteps(count: int, num_train_timesteps: int) -> Tensor:
    """One uniform timestep from each of ``count`` equal strata: the same mean as independent draws, less variance."""
    spread = (torch.arange(count) + torch.rand(count)) * (num_train_timesteps / count)
    return spread.long().clamp(max=num_train_timesteps - 1)


def denoiser_optimizers(denoiser: Denoiser, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices and kernels, AdamW for the rest, at one learning rate."""
    hidden = hidden_matrices(denoiser)
    taken = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in denoiser.parameters() if id(parameter) not in taken]
    return [Muon(hidden, lr=settings.learning_rate), adamw(rest, settings)]


def train_denoiser(
    settings: TrainSettings,
    work: Path,
    data: LatentScenes,
    tokenizer: CLIPTokenizer,
    look: Callable[[Denoiser, int], None] | None = None,
    look_every: int = 500,
) -> Denoiser:
    """Train on normalised ``data``, resuming from ``work/denoiser.pt``; ``look`` is called now and then to paint."""
    torch.manual_seed(settings.seed)
    denoiser = Denoiser(tokenizer).to(settings.device)
    run = Run("denoiser", denoiser, settings, work, denoiser_optimizers(denoiser, settings))
    torch.manual_seed(settings.seed + 1 + run.iteration)
    batches = Batches(data, tokenizer, settings, settings.seed + run.iteration)
    alphas = build_scheduler().alphas_cumprod.to(settings.device)
    for iteration in run.iterations():
        latents, token_ids = batches.next()
        with run.autocast():
            loss = velocity_loss(denoiser, latents, token_ids, alphas)
        run.step(loss)
        if look is not None and (iteration + 1) % look_every == 0:
            look(run.averaged(), iteration + 1)
    return run.averaged()

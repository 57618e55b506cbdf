"""Stage three: train text encoder and UNet together on the latents of scenes.

v-prediction with a zero-terminal-SNR schedule (Lin et al., 2024, arXiv 2305.08891): flat, strongly coloured backgrounds
need a last timestep that is pure noise. A tenth of the captions is dropped, so that classifier-free guidance works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from diffserve.training.latents import LatentScenes, batches, emphasis, tuning_emphasis
from diffserve.training.layouts import WEIGHT as LAYOUT_WEIGHT
from diffserve.training.layouts import LayoutHead
from diffserve.training.tokenizer import MAX_TOKENS
from diffserve.training.training_loop import Look, Run, TrainSettings, fingerprint
from diffserve.training.vae_training import LATENT_CHANNELS
from diffserve.world.scenes import Scene

TEXT_WIDTH = 192
FINISH_SHARE, FINISH_PLAIN = 0.7, 2.5
CONTINUED: dict[str, Callable[[Scene], float]] = {
    "finish": partial(emphasis, plain=FINISH_PLAIN),
    "tune": tuning_emphasis,
}
"""How often each scene is drawn in the stages that train a denoiser on."""


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
        self.layout_head = LayoutHead(TEXT_WIDTH)
        self.unet = build_unet()
        self.unet.set_attn_processor(AttnProcessor())

    def load(self, directory: Path, tokenizer: CLIPTokenizer) -> None:
        """Begin from exported weights. Embeddings follow their tokens; a token new to the weights stays as made."""
        self.unet.load_state_dict(UNet2DConditionModel.from_pretrained(directory / "unet").state_dict())
        known = CLIPTokenizer.from_pretrained(directory / "tokenizer").get_vocab()
        state = CLIPTextModel.from_pretrained(directory / "text_encoder").state_dict()
        (table,) = (name for name in state if name.endswith("token_embedding.weight"))
        embedding = self.text_encoder.state_dict()[table].clone()
        for token, index in tokenizer.get_vocab().items():
            if token in known:
                embedding[index] = state[table][known[token]]
        self.text_encoder.load_state_dict(state | {table: embedding})

    def context(self, token_ids: Tensor) -> Tensor:
        """(B, MAX_TOKENS) -> hidden states (B, MAX_TOKENS, TEXT_WIDTH)."""
        states: Tensor = self.text_encoder(token_ids).last_hidden_state
        return states

    def velocity(self, noisy: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        """(B, 8, h, w), (B,), (B, MAX_TOKENS, TEXT_WIDTH) -> predicted velocity (B, 8, h, w)."""
        velocity: Tensor = self.unet(noisy, timesteps, encoder_hidden_states=context).sample
        return velocity

    def forward(self, noisy: Tensor, timesteps: Tensor, token_ids: Tensor) -> Tensor:
        """(B, 8, h, w), (B,), (B, MAX_TOKENS) -> predicted velocity (B, 8, h, w)."""
        return self.velocity(noisy, timesteps, self.context(token_ids))


Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""As :meth:`Denoiser.velocity` has it."""


def velocity_loss(predict: Velocity, latents: Tensor, context: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Mean squared error of the velocity v = sqrt(a) noise - sqrt(1 - a) latents (Salimans & Ho, 2022, eq. 12)."""
    timesteps = stratified_timesteps(len(latents), len(alphas_cumprod)).to(latents.device)
    signal = alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    noise = torch.randn_like(latents)
    noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
    velocity = signal.sqrt() * noise - (1 - signal).sqrt() * latents
    error: Tensor = predict(noisy, timesteps, context).float() - velocity
    return error.square().mean()


def stratified_timesteps(count: int, num_train_timesteps: int) -> Tensor:
    """One uniform timestep from each of ``count`` equal strata: the same mean as independent draws, less variance."""
    spread = (torch.arange(count) + torch.rand(count)) * (num_train_timesteps / count)
    return spread.long().clamp(max=num_train_timesteps - 1)


def train_denoiser(
    settings: TrainSettings,
    work: Path,
    data: list[LatentScenes],
    tokenizer: CLIPTokenizer,
    start: Path | None = None,
    look: Look[Denoiser] | None = None,
    look_every: int = 500,
    *,
    made_from: str = "",
) -> Denoiser:
    """Train on normalised ``data`` of the autoencoder ``made_from``, resuming from ``work/denoiser.pt``, or else from
    the weights in ``start``, or else from nothing.
    """
    torch.manual_seed(settings.seed)
    denoiser = Denoiser(tokenizer)
    if start is not None:
        denoiser.load(start, tokenizer)
    denoiser.to(settings.device)
    return _train(Run("denoiser", denoiser, settings, work, made_from=made_from), data, tokenizer, look, look_every)


def continue_denoiser(
    stage: str,
    start: Denoiser,
    settings: TrainSettings,
    work: Path,
    data: list[LatentScenes],
    tokenizer: CLIPTokenizer,
    look: Look[Denoiser] | None = None,
    look_every: int = 500,
) -> Denoiser:
    """Train ``start`` on at a rate that rises and falls once more, resuming from ``work/<stage>.pt``.

    finish  with single objects of plain size drawn more often; the weights returned lie ``FINISH_SHARE`` of the way
            there. Between the weights before and after a tuning lie some that are better than either (Wortsman et al.,
            2022, "Robust fine-tuning of zero-shot models", arXiv 2109.01903).
    tune    with the scenes that people ask for first
    """
    last = copy.deepcopy(start).requires_grad_(True)
    run = Run(stage, last, settings, work, made_from=fingerprint(start))
    last = _train(run, data, tokenizer, look, look_every, weigh=CONTINUED[stage])
    return interpolate(start, last, FINISH_SHARE) if stage == "finish" else last


@torch.no_grad()
def interpolate(start: Denoiser, end: Denoiser, share: float) -> Denoiser:
    """The weights that lie ``share`` of the way from ``start`` to ``end``, 0 to 1."""
    net = copy.deepcopy(start)
    torch._foreach_lerp_(list(net.parameters()), list(end.parameters()), share)
    return net


def _train(
    run: Run[Denoiser],
    data: list[LatentScenes],
    tokenizer: CLIPTokenizer,
    look: Look[Denoiser] | None,
    look_every: int,
    *,
    weigh: Callable[[Scene], float] = emphasis,
) -> Denoiser:
    settings, denoiser = run.settings, run.net.train()
    torch.manual_seed(settings.seed + 1 + run.iteration)
    source = batches(data, tokenizer, settings, settings.seed + run.iteration, weigh)
    alphas = build_scheduler().alphas_cumprod.to(settings.device)

    def losses() -> list[Tensor]:
        latents, token_ids, layouts = next(source)
        with run.autocast():
            context = denoiser.context(token_ids)
            loss = velocity_loss(denoiser.velocity, latents, context, alphas)
            return [loss, LAYOUT_WEIGHT * denoiser.layout_head.loss(context, layouts)]

    return run.train(losses, look, look_every)

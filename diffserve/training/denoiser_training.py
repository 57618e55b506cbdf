"""The denoiser stage: train text encoder and UNet together on the latents of scenes.

v-prediction with a zero-terminal-SNR schedule (Lin et al., 2024, arXiv 2305.08891): flat, strongly colored backgrounds
need a last timestep that is pure noise. A tenth of the captions is dropped, so that classifier-free guidance works.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from diffserve.training.latents import LAYOUT_WEIGHT, LatentScenes, LayoutHead, batches, emphasis, tuning_emphasis
from diffserve.training.training_loop import Look, Run, TrainSettings, fingerprint
from diffserve.training.vae_training import LATENT_CHANNELS
from diffserve.world.captions import caption
from diffserve.world.scenes import Scene, scenes

MAX_TOKENS = 32
VOCABULARY_SIZE = 1200
START, END = "<|startoftext|>", "<|endoftext|>"
WORD = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def train_tokenizer(directory: Path, *, seed: int = 0, num_captions: int = 20_000) -> Path:
    """Write ``vocab.json``, ``merges.txt`` and the tokenizer's configs, readable by transformers' CLIPTokenizer."""
    rng = random.Random(seed)
    source = scenes(seed, held_out=False)
    corpus = [caption(next(source), rng) for _ in range(num_captions)]
    bpe = Tokenizer(models.BPE(unk_token=END, end_of_word_suffix="</w>"))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(False, False, False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        initial_alphabet=alphabet,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    tokens = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*tokens, START, END]))}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = "\n".join(" ".join(pair) for pair in merges)
    (directory / "merges.txt").write_text(f"#version: 0.2\n{lines}\n", encoding="utf-8")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": MAX_TOKENS,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory


TEXT_WIDTH = 192
FINISH_SHARE, FINISH_PLAIN = 0.7, 2.5
CONTINUED: dict[str, Callable[[Scene], float]] = {
    "finish": partial(emphasis, plain=FINISH_PLAIN),
    "tune": tuning_emphasis,
}
"""Sampling weight of each scene in the stages that continue a denoiser's training."""


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Build a causal CLIP text encoder with 3 layers of width 192."""
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
    """Build the UNet: plain blocks at 16 x 16, cross-attention at 8 x 8."""
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
    """Build the noise schedule for training and sampling of the denoiser."""
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
    """Text encoder and UNet as one trainable network.

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
        """Load exported weights; embeddings are matched by token, and new tokens keep their initial embedding."""
        self.unet.load_state_dict(UNet2DConditionModel.from_pretrained(directory / "unet").state_dict())
        exported_vocabulary = CLIPTokenizer.from_pretrained(directory / "tokenizer").get_vocab()
        state = CLIPTextModel.from_pretrained(directory / "text_encoder").state_dict()
        (table,) = (name for name in state if name.endswith("token_embedding.weight"))
        embedding = self.text_encoder.state_dict()[table].clone()
        for token, index in tokenizer.get_vocab().items():
            if token in exported_vocabulary:
                embedding[index] = state[table][exported_vocabulary[token]]
        self.text_encoder.load_state_dict(state | {table: embedding})

    def context(self, token_ids: Tensor) -> Tensor:
        """Encode token ids (B, MAX_TOKENS) to hidden states (B, MAX_TOKENS, TEXT_WIDTH)."""
        states: Tensor = self.text_encoder(token_ids).last_hidden_state
        return states

    def velocity(self, noisy: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        """Predict the velocity (B, 8, h, w) from noisy latents (B, 8, h, w), timesteps (B,) and hidden states."""
        velocity: Tensor = self.unet(noisy, timesteps, encoder_hidden_states=context).sample
        return velocity

    def forward(self, noisy: Tensor, timesteps: Tensor, token_ids: Tensor) -> Tensor:
        """Predict the velocity (B, 8, h, w) from latents (B, 8, h, w), timesteps (B,) and token ids (B, MAX_TOKENS)."""
        return self.velocity(noisy, timesteps, self.context(token_ids))


Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Signature of :meth:`Denoiser.velocity`."""


def velocity_loss(predict: Velocity, latents: Tensor, context: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Compute the mean squared error of the velocity v = sqrt(a) noise - sqrt(1 - a) latents.

    The target is eq. 12 of Salimans & Ho, 2022 (arXiv 2202.00512).
    """
    timesteps = stratified_timesteps(len(latents), len(alphas_cumprod)).to(latents.device)
    signal = alphas_cumprod[timesteps].view(-1, 1, 1, 1)
    noise = torch.randn_like(latents)
    noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
    velocity = signal.sqrt() * noise - (1 - signal).sqrt() * latents
    error: Tensor = predict(noisy, timesteps, context).float() - velocity
    return error.square().mean()


def stratified_timesteps(count: int, num_train_timesteps: int) -> Tensor:
    """Draw one uniform timestep from each of ``count`` equal strata.

    The mean is that of independent draws, the variance is lower.
    """
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
    """Train a denoiser on the normalised latents ``data`` of the autoencoder with fingerprint ``made_from``.

    Training resumes from ``work/denoiser.pt``, else begins from the weights in ``start``, else from random weights.
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
    """Continue the training of ``start`` with a new learning-rate cycle, resuming from ``work/<stage>.pt``.

    Args:
        stage: "finish" draws single objects of plain size more often and returns weights ``FINISH_SHARE`` of the way
            from ``start`` to the trained ones (Wortsman et al., 2022, arXiv 2109.01903: some weights between those
            before and after fine-tuning are better than either). "tune" draws the most common prompts more often.
        start: the denoiser to train; it is not modified.
        settings: of this stage.
        work: directory of the checkpoints.
        data: scenes with normalised latents.
        tokenizer: the denoiser's.
        look: called with the averaged weights every ``look_every`` iterations.
        look_every: iterations between calls of ``look``.
    """
    last = copy.deepcopy(start).requires_grad_(True)
    run = Run(stage, last, settings, work, made_from=fingerprint(start))
    last = _train(run, data, tokenizer, look, look_every, weigh=CONTINUED[stage])
    return interpolate(start, last, FINISH_SHARE) if stage == "finish" else last


@torch.no_grad()
def interpolate(start: Denoiser, end: Denoiser, share: float) -> Denoiser:
    """Return the weights at ``share`` (0 to 1) of the way from ``start`` to ``end``."""
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

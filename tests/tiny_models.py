"""Tiny random models of the real classes, saved as real checkpoints, one for each layout that diffserve serves.

Widths are the least that keep the published layouts readable: 32 channels for groups of 32, heads of 64 where the
family has them, four VAE levels so that a latent cell is 8 pixels. Weights are random but seeded, so numbers repeat.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import pre_tokenizers

from diffserve.runtime.loading.library_imports import hushed, import_quietly

START, END = "<|startoftext|>", "<|endoftext|>"
MERGES: Final = (
    "c a",
    "ca t</w>",
    "d o",
    "do g</w>",
    "r e",
    "re d</w>",
    "o n</w>",
    "t h",
    "th e</w>",
    "f o",
    "fo x</w>",
)
KINDS: Final = ("sd15", "sd2", "sdxl", "inpaint9")
EMBEDDED: Final = "embedded"  # the layout of the model that ships inside: 8 latent channels, prompts of 30 tokens
REFINER: Final = "refiner"  # SDXL's: of its two text encoders the second, the very same
ONE_LEVEL: Final = "one-level"  # SD 1.x with as small a UNet as can have cross-attention, for compilers
WINDOW: Final = 77
EMBEDDED_WINDOW: Final = 32


def vocabulary() -> dict[str, int]:
    """Token -> id in the order of the published CLIP vocabulary: bytes, bytes at a word's end, merges, marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [
        *alphabet,
        *(f"{letter}</w>" for letter in alphabet),
        *(merge.replace(" ", "") for merge in MERGES),
        START,
        END,
    ]
    return {token: index for index, token in enumerate(tokens)}


def write_tokenizer(directory: Path, *, pad: str = END, window: int = WINDOW) -> Path:
    """Write a CLIP tokenizer's four files; ``pad`` is ``!`` for SD 2 and for SDXL's second encoder."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.json").write_text(json.dumps(vocabulary(), ensure_ascii=False), encoding="utf-8")
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")
    marks = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad}
    (directory / "special_tokens_map.json").write_text(json.dumps(marks), encoding="utf-8")
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": window, "do_lower_case": True, **marks}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def tokenizer(directory: Path, *, pad: str = END, window: int = WINDOW) -> Any:
    """Return transformers' CLIPTokenizer over the tiny vocabulary."""
    written = write_tokenizer(directory, pad=pad, window=window)
    return import_quietly("transformers", "CLIPTokenizer").from_pretrained(str(written))


def text_encoder(
    *,
    width: int = 32,
    layers: int = 3,
    act: str = "quick_gelu",
    projection: int | None = None,
    vocabulary_size: int | None = None,
    window: int = WINDOW,
) -> Any:
    """Return a CLIP text encoder; with ``projection``, one with a pooled projection of that width."""
    size = vocabulary_size or len(vocabulary())
    config = import_quietly("transformers", "CLIPTextConfig")(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        projection_dim=projection or width,
        max_position_embeddings=window,
        hidden_act=act,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
    )
    name = "CLIPTextModelWithProjection" if projection else "CLIPTextModel"
    network = import_quietly("transformers", name)(config)
    with torch.no_grad():  # transformers starts at 0.02, where every prompt looks the same
        for parameter in network.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
        last_norm = network.text_model.final_layer_norm if projection else network.final_layer_norm
        last_norm.bias.fill_(-0.1)  # about CLIP's own mean, which prompt weighting restores
    return network.eval()


def vae(**config: Any) -> Any:
    """Return an AutoencoderKL with 8 pixels to a cell."""
    defaults = {"latent_channels": 4, "norm_num_groups": 32}
    return import_quietly("diffusers", "AutoencoderKL")(
        block_out_channels=(32, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        sample_size=64,
        **(defaults | config),
    ).eval()


def save_clip(directory: Path) -> Path:
    """Save a random CLIP model of text and vision for images of 32x32 pixels, as transformers writes it."""
    shared = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    size = len(vocabulary())
    config = import_quietly("transformers", "CLIPConfig")(
        text_config={**shared, "vocab_size": size, "bos_token_id": size - 2, "eos_token_id": size - 1},
        vision_config={**shared, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    torch.manual_seed(0)
    with hushed("transformers"):
        import_quietly("transformers", "CLIPModel")(config).save_pretrained(directory)
        processor = import_quietly("transformers", "CLIPImageProcessorPil")
        processor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(directory)
    return write_tokenizer(directory)


def unet(kind: str, *, context: int) -> Any:
    """Return a UNet of the family ``kind``, with a native latent size of 8x8 and two levels by default."""
    shared = {"layers_per_block": 1, "sample_size": 8, "cross_attention_dim": context, "norm_num_groups": 32}
    plain = {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "attention_head_dim": 8,
    }
    linear = {**plain, "block_out_channels": (64, 128), "attention_head_dim": (1, 2), "use_linear_projection": True}
    kind_fields: dict[str, dict[str, Any]] = {
        "sd15": plain,
        "inpaint9": {**plain, "in_channels": 9},
        ONE_LEVEL: {
            **plain,
            "block_out_channels": (32,),
            "down_block_types": ("CrossAttnDownBlock2D",),
            "mid_block_type": None,
            "up_block_types": ("UpBlock2D",),
        },
        EMBEDDED: {
            **plain,
            "in_channels": 8,
            "out_channels": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        "sd2": linear,
        "sdxl": {
            **linear,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2),
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 32,
        },
    }
    kind_fields[REFINER] = {**kind_fields["sdxl"], "projection_class_embeddings_input_dim": 5 * 8 + 32}
    return import_quietly("diffusers", "UNet2DConditionModel")(**shared, **kind_fields[kind]).eval()


def scheduler(kind: str) -> Any:
    """DDIM with the family's noise schedule; SD 2 and embedded: v-prediction, zero terminal SNR, trailing."""
    extra: dict[str, Any] = {}
    if kind in ("sd2", EMBEDDED):
        extra = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return import_quietly("diffusers", "DDIMScheduler")(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        **extra,
    )


def build_pipeline(kind: str, workspace: Path, *, seed: int = 0) -> Any:
    """Diffusers' own pipeline of family ``kind`` with random weights. ``workspace`` takes the tokenizers' files."""
    torch.manual_seed(seed)
    parts: dict[str, Any] = {"scheduler": scheduler(kind)}
    window = EMBEDDED_WINDOW if kind == EMBEDDED else WINDOW
    parts["tokenizer"] = tokenizer(workspace / "tokenizer", pad="!" if kind == "sd2" else END, window=window)
    optional: dict[str, bool] = {}
    if kind in ("sdxl", REFINER):
        parts["text_encoder"] = text_encoder(width=64)
        parts["text_encoder_2"] = text_encoder(width=64, layers=4, act="gelu", projection=32)
        parts["tokenizer_2"] = tokenizer(workspace / "tokenizer_2", pad="!")
        parts["unet"] = unet(kind, context=128 if kind == "sdxl" else 64)
        parts["vae"] = vae(scaling_factor=0.13025)
        name = "StableDiffusionXLPipeline"
        if kind == REFINER:
            parts |= {"text_encoder": None, "tokenizer": None}
            optional = {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
            name = "StableDiffusionXLImg2ImgPipeline"
    else:
        parts["text_encoder"] = text_encoder(width=64, act="gelu" if kind == "sd2" else "quick_gelu", window=window)
        parts["unet"] = unet(kind, context=64)
        fields = {"latent_channels": 8, "norm_num_groups": 16, "mid_block_add_attention": False, "scaling_factor": 1.0}
        parts["vae"] = vae(**fields) if kind == EMBEDDED else vae()
        parts |= {"safety_checker": None, "feature_extractor": None}
        name = "StableDiffusionInpaintPipeline" if kind == "inpaint9" else "StableDiffusionPipeline"
        optional = {"requires_safety_checker": False}
    pipeline = import_quietly("diffusers", name)(**parts, **optional)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_model(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """Build the pipeline of family ``kind`` and save it as a diffusers directory of safetensors."""
    with hushed("transformers", "diffusers"):
        build_pipeline(kind, directory.parent / f"{directory.name}-parts", seed=seed).save_pretrained(str(directory))
    return directory


def save_safety_checker(directory: Path, threshold: float) -> Path:
    """Save a Stable Diffusion safety checker and its feature extractor in ``directory``.

    It blocks images whose cosines are above ``threshold``.
    """
    checker = import_quietly("diffusers.pipelines.stable_diffusion.safety_checker", "StableDiffusionSafetyChecker")
    config, vision = import_quietly("transformers", "CLIPConfig"), import_quietly("transformers", "CLIPVisionConfig")
    vision_config = vision(
        hidden_size=32, intermediate_size=37, projection_dim=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=32, patch_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    checker_model = checker(config(vision_config=vision_config.to_dict(), projection_dim=16))
    with torch.no_grad():
        for embeds in (checker_model.concept_embeds, checker_model.special_care_embeds):
            embeds.copy_(torch.randn_like(embeds))
        checker_model.concept_embeds_weights.fill_(threshold)
        checker_model.special_care_embeds_weights.fill_(2.0)
    checker_model.save_pretrained(directory / "safety_checker")
    processor = import_quietly("transformers", "CLIPImageProcessor")
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor(**size).save_pretrained(directory / "feature_extractor")
    return directory

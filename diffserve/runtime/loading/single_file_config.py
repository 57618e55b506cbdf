"""Configurations of a single-file checkpoint, inferred from the shapes of its tensors.

Head counts, activation and noise schedule are not visible in shapes, so they are those of the family.
"""

from __future__ import annotations

import re
from typing import Any, Final

from diffserve.api.errors import ModelLoadError
from diffserve.api.micro_conditioning import NUM_REFINER_IDS, NUM_SDXL_IDS
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.family import REFINER, SD1, SD2, SDXL
from diffserve.runtime.loading.single_file_keys import UNET_PREFIX

HEAD_WIDTH: Final = 64
SD1_HEADS: Final = 8
TIME_IDS: Final = {SDXL: NUM_SDXL_IDS, REFINER: NUM_REFINER_IDS}
CLIP_WINDOW: Final = 77
SCALING_FACTORS: Final = {SD1: 0.18215, SD2: 0.18215, SDXL: 0.13025, REFINER: 0.13025}
SAMPLE_SIZES: Final = {SD1: 64, SD2: 64, SDXL: 128, REFINER: 128}


def detect_layout(checkpoint: Checkpoint, *, needs_text: bool = True) -> str:
    """Return the family of a single file, by its text encoders, or else (unless ``needs_text``) by its UNet.

    Raises ModelLoadError if it is not supported.
    """
    keys = checkpoint.entries
    where = checkpoint.where()
    if f"{UNET_PREFIX}input_blocks.0.0.weight" not in keys:
        shown = ", ".join(list(keys)[:3])
        raise ModelLoadError(
            f"{where} is not a Stable Diffusion checkpoint: it has no {UNET_PREFIX}* tensors (it begins with {shown})."
        )
    for family, prefix in (
        (SDXL, "conditioner.embedders.1.model."),
        (REFINER, "conditioner.embedders.0.model."),
        (SD2, "cond_stage_model.model."),
        (SD1, "cond_stage_model.transformer."),
    ):
        if any(key.startswith(prefix) for key in keys):
            return family
    if needs_text:
        raise ModelLoadError(
            f"{where} holds a UNet but no text encoder; give a complete checkpoint, or name the directory of a model "
            "that has the same (--text-encoder, model.text_encoder)."
        )
    if f"{UNET_PREFIX}label_emb.0.0.weight" in keys:
        return SDXL
    return SD2 if len(_projection(checkpoint)) == 2 else SD1


def infer_unet(checkpoint: Checkpoint, family: str, pooled_width: int) -> dict[str, Any]:
    """Return the configuration of ``UNet2DConditionModel``; ``pooled_width``: size of the pooled text vector (SDXL)."""
    channels, depths, layers = _read_levels(checkpoint)
    context = _shape(
        checkpoint, _first_match(checkpoint, r"input_blocks\.\d+\.1\.transformer_blocks\.0\.attn2\.to_k\.weight")
    )
    mid_depth = _count(checkpoint, f"{UNET_PREFIX}middle_block.1.transformer_blocks.")
    config: dict[str, Any] = {
        "in_channels": _shape(checkpoint, f"{UNET_PREFIX}input_blocks.0.0.weight")[1],
        "out_channels": _shape(checkpoint, f"{UNET_PREFIX}out.2.weight")[0],
        "block_out_channels": channels,
        "layers_per_block": layers,
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)],
        "transformer_layers_per_block": [depth or 1 for depth in depths[:-1]] + [mid_depth or 1],
        "attention_head_dim": SD1_HEADS if family == SD1 else [max(1, width // HEAD_WIDTH) for width in channels],
        "cross_attention_dim": context[1],
        "use_linear_projection": len(_projection(checkpoint)) == 2,
        "upcast_attention": family == SD2,
        "sample_size": SAMPLE_SIZES[family],
    }
    if family in TIME_IDS:
        joint = _shape(checkpoint, f"{UNET_PREFIX}label_emb.0.0.weight")[1]
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": (joint - pooled_width) // TIME_IDS[family],
            "projection_class_embeddings_input_dim": joint,
        }
    return config


def _read_levels(checkpoint: Checkpoint) -> tuple[list[int], list[int], int]:
    """Return channels and transformer depth of each level, and the resnets per level, from the input blocks."""
    channels: list[int] = []
    depths: list[int] = []
    counts: list[int] = [0]
    number = 1
    while True:
        block = f"{UNET_PREFIX}input_blocks.{number}."
        if f"{block}0.in_layers.2.weight" in checkpoint:
            counts[-1] += 1
            if counts[-1] == 1:
                channels.append(_shape(checkpoint, f"{block}0.in_layers.2.weight")[0])
                depths.append(_count(checkpoint, f"{block}1.transformer_blocks."))
        elif f"{block}0.op.weight" in checkpoint:
            counts.append(0)
        else:
            return channels, depths, counts[0]
        number += 1


def infer_vae(checkpoint: Checkpoint, prefix: str, *, is_sdxl: bool) -> dict[str, Any]:
    """Return the configuration of ``AutoencoderKL`` for the tensors below ``prefix``."""
    encoder, family = f"{prefix}encoder.", SDXL if is_sdxl else SD1
    num_levels = _count(checkpoint, f"{encoder}down.")
    channels = [_shape(checkpoint, f"{encoder}down.{level}.block.0.conv1.weight")[0] for level in range(num_levels)]
    return {
        "block_out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * num_levels,
        "up_block_types": ["UpDecoderBlock2D"] * num_levels,
        "layers_per_block": _count(checkpoint, f"{encoder}down.0.block."),
        "latent_channels": _shape(checkpoint, f"{encoder}conv_out.weight")[0] // 2,
        "scaling_factor": SCALING_FACTORS[family],
        "force_upcast": is_sdxl,
        "sample_size": SAMPLE_SIZES[family] * 2 ** (num_levels - 1),
    }


def infer_clip(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    """Return the configuration of a text encoder in transformers' layout under ``prefix`` (CLIP, quick GELU)."""
    return _text_config(
        checkpoint,
        tokens=f"{prefix}embeddings.token_embedding.weight",
        inner=f"{prefix}encoder.layers.0.mlp.fc1.weight",
        layers=_count(checkpoint, f"{prefix}encoder.layers."),
        act="quick_gelu",
    )


def infer_open_clip(checkpoint: Checkpoint, prefix: str, *, drop_last: bool) -> dict[str, Any]:
    """Return the configuration of a text encoder in OpenCLIP's layout; ``drop_last``: without its last layer (SD 2)."""
    config = _text_config(
        checkpoint,
        tokens=f"{prefix}token_embedding.weight",
        inner=f"{prefix}transformer.resblocks.0.mlp.c_fc.weight",
        layers=_count(checkpoint, f"{prefix}transformer.resblocks.") - int(drop_last),
        act="gelu",
    )
    if f"{prefix}text_projection" in checkpoint:
        config["projection_dim"] = _shape(checkpoint, f"{prefix}text_projection")[1]
    return config


def _text_config(checkpoint: Checkpoint, *, tokens: str, inner: str, layers: int, act: str) -> dict[str, Any]:
    size, width = _shape(checkpoint, tokens)
    return {
        "vocab_size": size,
        "hidden_size": width,
        "intermediate_size": _shape(checkpoint, inner)[0],
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // HEAD_WIDTH),
        "max_position_embeddings": CLIP_WINDOW,
        "hidden_act": act,
        "bos_token_id": size - 2,
        "eos_token_id": size - 1,
        "pad_token_id": size - 1,
    }


def infer_scheduler(family: str, *, velocity: bool, zero_snr: bool) -> dict[str, Any]:
    """Return the noise schedule of all three families, with the spacing of SDXL's configuration.

    Stable Diffusion 1 and 2 name no spacing, so each sampler has its own.
    """
    spacing = "trailing" if zero_snr else "leading" if family in TIME_IDS else None
    return {
        "_class_name": "DDIMScheduler",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000,
        "prediction_type": "v_prediction" if velocity else "epsilon",
        "rescale_betas_zero_snr": zero_snr,
        **({} if spacing is None else {"timestep_spacing": spacing}),
        "steps_offset": 1,
        "clip_sample": False,
        "set_alpha_to_one": False,
    }


def _projection(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the shape of the input projection of the UNet's first transformer: a matrix from Stable Diffusion 2 on."""
    return _shape(checkpoint, _first_match(checkpoint, r"input_blocks\.\d+\.1\.proj_in\.weight"))


def _shape(checkpoint: Checkpoint, key: str) -> tuple[int, ...]:
    if key not in checkpoint:
        raise ModelLoadError(f"tensor {key!r} is missing from {checkpoint.where()}.")
    return checkpoint.entries[key].shape


def _count(checkpoint: Checkpoint, prefix: str) -> int:
    """Return how many different numbers follow ``prefix`` in the keys."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    return len({match[1] for key in checkpoint.entries if (match := pattern.match(key))})


def _first_match(checkpoint: Checkpoint, pattern: str) -> str:
    compiled = re.compile(re.escape(UNET_PREFIX) + pattern)
    return next((key for key in checkpoint.entries if compiled.fullmatch(key)), f"{UNET_PREFIX}{pattern}")

"""Original Stable Diffusion layout: names of the tensors, and configurations inferred from their shapes.

The original code numbers a UNet's blocks in one list (``input_blocks.4.0``) and a VAE's up blocks from the finest, and
OpenCLIP stores query, key and value in one tensor. Some files have diffusers' or EMA names, which are renamed first.
Head counts, activation and noise schedule are not visible in shapes, so they are those of the family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from diffserve.api.errors import ModelLoadError
from diffserve.api.micro_conditioning import NUM_REFINER_IDS, NUM_SDXL_IDS
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.family import REFINER, SD1, SD2, SDXL
from diffserve.runtime.loading.weight_loading import TensorSource

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."

_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_WORDS = {
    "mid_block.resnets.0.": "mid.block_1.",
    "mid_block.resnets.1.": "mid.block_2.",
    "mid_block.attentions.0.": "mid.attn_1.",
    "conv_norm_out.": "norm_out.",
    "conv_shortcut.": "nin_shortcut.",
    ".downsamplers.0.": ".downsample.",
    ".upsamplers.0.": ".upsample.",
    ".resnets.": ".block.",
    ".group_norm.": ".norm.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    ".to_out.0.": ".proj_out.",
}
_OPEN_CLIP_WORDS = {
    "embeddings.token_embedding.": "token_embedding.",
    "embeddings.position_embedding.weight": "positional_embedding",
    "encoder.layers.": "transformer.resblocks.",
    "layer_norm1.": "ln_1.",
    "layer_norm2.": "ln_2.",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
    "self_attn.out_proj.": "attn.out_proj.",
    "final_layer_norm.": "ln_final.",
    "text_projection.weight": "text_projection",
}
_SLICES = ("q", "k", "v")


def unet_key(name: str, layers_per_block: int, attention_up: frozenset[int]) -> str:
    """Return the original key of the UNet parameter ``name``; ``attention_up``: indices of up blocks with attention."""
    for start, original in _UNET_ENDS.items():
        if name.startswith(start + "."):
            return UNET_PREFIX + original + name[len(start) :]
    match = re.match(r"(down_blocks|up_blocks|mid_block)\.(?:(\d+)\.)?(\w+)\.(\d+)\.(.+)", name)
    if match is None:
        return UNET_PREFIX + name
    part, kind, tail = match[1], match[3], match[5]
    level, index = int(match[2] or 0), int(match[4])
    if kind == "resnets":
        head, _, tail = tail.partition(".")
        tail = f"{_UNET_RESNET.get(head, head)}.{tail}"
    if part == "mid_block":
        return f"{UNET_PREFIX}middle_block.{1 if kind == 'attentions' else 2 * index}.{tail}"
    place = 1 if kind == "attentions" else 0
    if part == "down_blocks":
        tail = "op" + tail.removeprefix("conv") if kind == "downsamplers" else tail
        number = 1 + level * (layers_per_block + 1) + (layers_per_block if kind == "downsamplers" else index)
        return f"{UNET_PREFIX}input_blocks.{number}.{place}.{tail}"
    number = level * (layers_per_block + 1) + (layers_per_block if kind == "upsamplers" else index)
    if kind == "upsamplers":
        place = 2 if level in attention_up else 1
    return f"{UNET_PREFIX}output_blocks.{number}.{place}.{tail}"


def vae_key(name: str, num_levels: int) -> str:
    """Return the original key of the VAE parameter ``name``, without ``VAE_PREFIX``."""
    key = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{num_levels - 1 - int(match[1])}", name)
    key = key.replace("down_blocks.", "down.")
    for word, original in _VAE_WORDS.items():
        key = key.replace(word, original)
    return key


def open_clip_key(name: str) -> tuple[str, int | None]:
    """Return OpenCLIP's key of the text parameter ``name``, and its third of that tensor or ``None`` for all of it."""
    key = name.removeprefix("text_model.")
    match = re.search(r"self_attn\.([qkv])_proj\.(weight|bias)$", key)
    third = None
    if match:
        third = _SLICES.index(match[1])
        key = f"{key[: match.start()]}attn.in_proj_{match[2]}"
    for word, original in _OPEN_CLIP_WORDS.items():
        key = key.replace(word, original)
    return key, third


def add_vae_tensor(source: TensorSource, name: str, key: str) -> str:
    """Add VAE parameter ``name``; attention weights that are 1x1 convolutions (C, C, 1, 1) become matrices."""
    shape = source.checkpoint.entries[key].shape
    if ".mid.attn_1." in key and shape[2:] == (1, 1):
        return source.add(name, key, shape[:2], lambda tensor: tensor.flatten(1))
    return source.add(name, key)


def add_open_clip_tensor(source: TensorSource, name: str, key: str, third: int | None) -> str:
    """Add text parameter ``name``: a third of the joint projection, the transposed text projection, or the tensor."""
    shape = source.checkpoint.entries[key].shape
    if third is not None:
        rows = shape[0] // 3
        return source.add(name, key, (rows, *shape[1:]), lambda tensor: tensor[third * rows : (third + 1) * rows])
    if name == "text_projection.weight":
        return source.add(name, key, shape[::-1], lambda tensor: tensor.T)
    return source.add(name, key)


FIRST: Final = "input_blocks.0.0.weight"
ROOTS: Final = ("input_blocks.", "middle_block.", "output_blocks.", "time_embed.", "label_emb.", "out.")
FIRST_OF_DIFFUSERS: Final = "conv_in.weight"

EMA_PREFIX: Final = "model_ema.diffusion_model"
EMA_NAME: Final = re.compile(
    r"(?P<root>input_blocks\d+(?=\d)|output_blocks\d+(?=\d)|middle_block(?=\d)|time_embed|label_emb0|out(?=\d))"
    r"(?P<index>\d)(?P<inner>.*?)(?P<end>weight|bias)"
)
EMA_INNER: Final = re.compile(
    r"(in_layers|emb_layers|out_layers|skip_connection|proj_in|proj_out|norm[123]?|op|conv"
    r"|transformer_blocks|attn[12]|to_[qkv]|to_out|ff|net|proj)(\d*)"
)


def use_original_names(checkpoint: Checkpoint) -> None:
    """Rename the tensors of ``checkpoint`` to original names if its UNet has diffusers' or EMA names."""
    keys = checkpoint.entries
    if UNET_PREFIX + FIRST in keys:
        return
    if FIRST in keys:
        checkpoint.rename({key: UNET_PREFIX + key for key in keys if key.startswith(ROOTS)})
    elif FIRST_OF_DIFFUSERS in keys:
        checkpoint.rename(keys_of_diffusers(keys))
    elif EMA_PREFIX + FIRST.replace(".", "") in keys:
        names = {key: original_name(key.removeprefix(EMA_PREFIX)) for key in keys if key.startswith(EMA_PREFIX)}
        checkpoint.rename({key: UNET_PREFIX + name for key, name in names.items() if name})


def keys_of_diffusers(names: Iterable[str]) -> dict[str, str]:
    """Return the original key of each of ``names``: diffusers' names of a UNet's parameters, or layers with a dot."""
    names = [*names]
    num_layers = len({name.split(".")[3] for name in names if name.startswith("down_blocks.0.resnets.")})
    attentions = (re.match(r"up_blocks\.(\d+)\.attentions\.", name) for name in names)
    with_attention = frozenset(int(match[1]) for match in attentions if match)
    return {name: unet_key(name, num_layers, with_attention) for name in names}


def original_name(name: str) -> str:
    """Return the original name of an EMA tensor, whose name lacks the dots; empty if it is none."""
    match = EMA_NAME.fullmatch(name)
    if match is None:
        return ""
    root = re.sub(r"(?<=[a-z])(\d+)$", r".\1", match["root"])
    inner, at = [], 0
    while at < len(match["inner"]):
        part = EMA_INNER.match(match["inner"], at)
        if part is None:
            return ""
        inner += [part[1], part[2]] if part[2] else [part[1]]  # the number is a place in a list of layers
        at = part.end()
    return ".".join([root, match["index"], *inner, match["end"]])


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

"""Names of the original Stable Diffusion layout for each parameter of diffusers' networks.

The original code numbers a UNet's blocks in one list (``input_blocks.4.0``) and a VAE's up blocks from the finest, and
OpenCLIP stores query, key and value in one tensor. Some files have diffusers' or EMA names, which are renamed first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from diffserve.runtime.loading.checkpoint import Checkpoint
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
        checkpoint.rename(_from_diffusers(keys))
    elif EMA_PREFIX + FIRST.replace(".", "") in keys:
        names = {key: original_name(key.removeprefix(EMA_PREFIX)) for key in keys if key.startswith(EMA_PREFIX)}
        checkpoint.rename({key: UNET_PREFIX + name for key, name in names.items() if name})


def _from_diffusers(keys: Iterable[str]) -> dict[str, str]:
    """Return the original name of each of diffusers' names ``keys``."""
    keys = [*keys]
    num_layers = len({key.split(".")[3] for key in keys if key.startswith("down_blocks.0.resnets.")})
    attentions = (re.match(r"up_blocks\.(\d+)\.attentions\.", key) for key in keys)
    with_attention = frozenset(int(match[1]) for match in attentions if match)
    return {key: unet_key(key, num_layers, with_attention) for key in keys}


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

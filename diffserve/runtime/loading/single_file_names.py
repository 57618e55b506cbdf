"""Bring the UNet of a single file to the original names under ``model.diffusion_model.``, whatever it is called there.

Files that hold a UNet alone name it without that prefix, or as diffusers does. Files of training may hold only the
average of the weights (EMA), whose names were written without dots.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.single_file_keys import UNET_PREFIX, unet_key

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
    """Rename the tensors of ``checkpoint`` where its UNet has other names; otherwise change nothing."""
    keys = checkpoint.entries
    if UNET_PREFIX + FIRST in keys:
        return
    if FIRST in keys:
        checkpoint.rename({key: UNET_PREFIX + key for key in keys if key.startswith(ROOTS)})
    elif FIRST_OF_DIFFUSERS in keys:
        checkpoint.rename(_from_diffusers(keys))
    elif EMA_PREFIX + FIRST.replace(".", "") in keys:
        found = {key: original_name(key.removeprefix(EMA_PREFIX)) for key in keys if key.startswith(EMA_PREFIX)}
        checkpoint.rename({key: UNET_PREFIX + name for key, name in found.items() if name})


def _from_diffusers(keys: Iterable[str]) -> dict[str, str]:
    """Return the original name of each tensor that diffusers' names call ``keys``."""
    keys = [*keys]
    num_layers = len({key.split(".")[3] for key in keys if key.startswith("down_blocks.0.resnets.")})
    attentions = (re.match(r"up_blocks\.(\d+)\.attentions\.", key) for key in keys)
    with_attention = frozenset(int(found[1]) for found in attentions if found)
    return {key: unet_key(key, num_layers, with_attention) for key in keys}


def original_name(name: str) -> str:
    """Return the original name of ``name``, which is that name without its dots; empty where it is none."""
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

"""Write a diffusers pipeline as one file in the original Stable Diffusion layout: the loader's opposite, written apart.

Walks the networks in the order the original code numbers their blocks. The tests also read the result with diffusers'
own converter, so that both this file and the loader are held to the published layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

Tensors = dict[str, torch.Tensor]
Pairs = Iterator[tuple[str, torch.Tensor]]
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
VAE_RESNET = {"conv_shortcut": "nin_shortcut"}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v"}


def save_single_file(pipeline: Any, file: Path, extra: Tensors | None = None) -> Path:
    """Write ``pipeline`` (SD 1.x, SD 2.x, SDXL or its refiner: its parts tell) to ``file``, with ``extra`` tensors."""
    tensors: Tensors = dict(unet_tensors(pipeline.unet)) | dict(vae_tensors(pipeline.vae)) | (extra or {})
    if pipeline.text_encoder is None:  # SDXL's refiner
        tensors |= open_clip_tensors(pipeline.text_encoder_2, "conditioner.embedders.0.model.")
    elif hasattr(pipeline, "text_encoder_2"):
        tensors |= clip_tensors(pipeline.text_encoder, "conditioner.embedders.0.transformer.text_model.")
        tensors |= open_clip_tensors(pipeline.text_encoder_2, "conditioner.embedders.1.model.")
    elif pipeline.text_encoder.config.hidden_act == "gelu":
        tensors |= open_clip_tensors(pipeline.text_encoder, "cond_stage_model.model.", extra_layer=True)
    else:
        tensors |= clip_tensors(pipeline.text_encoder, "cond_stage_model.transformer.text_model.")
    save_file({key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}, file)
    return file


def _under(prefix: str, module: nn.Module, words: dict[str, str] | None = None) -> Pairs:
    """Parameters of ``module`` below ``prefix``, the first word of each name exchanged by ``words``."""
    for name, tensor in module.state_dict().items():
        head, dot, tail = name.partition(".")
        yield f"{prefix}.{(words or {}).get(head, head)}{dot}{tail}", tensor


def unet_tensors(unet: Any) -> Pairs:
    """Key and tensor of every UNet parameter."""
    root = "model.diffusion_model"
    yield from _under(f"{root}.time_embed.0", unet.time_embedding.linear_1)
    yield from _under(f"{root}.time_embed.2", unet.time_embedding.linear_2)
    if unet.config.addition_embed_type:
        yield from _under(f"{root}.label_emb.0.0", unet.add_embedding.linear_1)
        yield from _under(f"{root}.label_emb.0.2", unet.add_embedding.linear_2)
    yield from _under(f"{root}.input_blocks.0.0", unet.conv_in)
    number = 1
    for block in unet.down_blocks:
        for index, resnet in enumerate(block.resnets):
            yield from _under(f"{root}.input_blocks.{number}.0", resnet, RESNET)
            if hasattr(block, "attentions"):
                yield from _under(f"{root}.input_blocks.{number}.1", block.attentions[index])
            number += 1
        if block.downsamplers is not None:
            yield from _under(f"{root}.input_blocks.{number}.0", block.downsamplers[0], {"conv": "op"})
            number += 1
    yield from _under(f"{root}.middle_block.0", unet.mid_block.resnets[0], RESNET)
    yield from _under(f"{root}.middle_block.1", unet.mid_block.attentions[0])
    yield from _under(f"{root}.middle_block.2", unet.mid_block.resnets[1], RESNET)
    yield from _up_tensors(f"{root}.output_blocks", unet.up_blocks)
    yield from _under(f"{root}.out.0", unet.conv_norm_out)
    yield from _under(f"{root}.out.2", unet.conv_out)


def _up_tensors(root: str, blocks: Any) -> Pairs:
    number = 0
    for block in blocks:
        for index, resnet in enumerate(block.resnets):
            parts: list[tuple[nn.Module, dict[str, str]]] = [(resnet, RESNET)]
            if hasattr(block, "attentions"):
                parts.append((block.attentions[index], {}))
            if index == len(block.resnets) - 1 and block.upsamplers is not None:
                parts.append((block.upsamplers[0], {}))
            for place, (part, words) in enumerate(parts):
                yield from _under(f"{root}.{number}.{place}", part, words)
            number += 1


def vae_tensors(vae: Any) -> Pairs:
    """Key and tensor of every VAE parameter; attention matrices become 1x1 convolutions."""
    root = "first_stage_model"
    for side, half, blocks in (
        ("encoder", vae.encoder, vae.encoder.down_blocks),
        ("decoder", vae.decoder, vae.decoder.up_blocks),
    ):
        yield from _under(f"{root}.{side}.conv_in", half.conv_in)
        yield from _under(f"{root}.{side}.norm_out", half.conv_norm_out)
        yield from _under(f"{root}.{side}.conv_out", half.conv_out)
        yield from _under(f"{root}.{side}.mid.block_1", half.mid_block.resnets[0], VAE_RESNET)
        yield from _under(f"{root}.{side}.mid.block_2", half.mid_block.resnets[1], VAE_RESNET)
        yield from _attention_tensors(f"{root}.{side}.mid.attn_1", half.mid_block.attentions[0])
        direction = "down" if side == "encoder" else "up"
        for index, block in enumerate(blocks):
            level = index if side == "encoder" else len(blocks) - 1 - index
            for place, resnet in enumerate(block.resnets):
                yield from _under(f"{root}.{side}.{direction}.{level}.block.{place}", resnet, VAE_RESNET)
            scaler = getattr(block, f"{direction}samplers")
            if scaler is not None:
                yield from _under(f"{root}.{side}.{direction}.{level}.{direction}sample", scaler[0])
    yield from _under(f"{root}.quant_conv", vae.quant_conv)
    yield from _under(f"{root}.post_quant_conv", vae.post_quant_conv)


def _attention_tensors(root: str, attention: nn.Module) -> Pairs:
    for key, tensor in _under(root, attention, VAE_ATTENTION):
        is_matrix = tensor.ndim == 2
        yield key.replace("to_out.0", "proj_out"), tensor[:, :, None, None] if is_matrix else tensor


def clip_tensors(encoder: Any, root: str) -> Tensors:
    """Parameters of a CLIP text encoder in transformers' own names under ``root``, with the old position buffer."""
    tensors = {root + name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}
    return tensors | {f"{root}embeddings.position_ids": torch.arange(77)[None]}


def open_clip_tensors(encoder: Any, root: str, *, extra_layer: bool = False) -> Tensors:
    """Rename encoder tensors to OpenCLIP's names; ``extra_layer`` adds the unused last layer of SD 2 files."""
    bare = {name.removeprefix("text_model."): tensor for name, tensor in encoder.state_dict().items()}
    tensors = {
        "token_embedding.weight": bare["embeddings.token_embedding.weight"],
        "positional_embedding": bare["embeddings.position_embedding.weight"],
        "ln_final.weight": bare["final_layer_norm.weight"],
        "ln_final.bias": bare["final_layer_norm.bias"],
        "logit_scale": torch.tensor(4.6),
    }
    num_layers = encoder.config.num_hidden_layers
    for layer in range(num_layers + int(extra_layer)):
        target, source = f"encoder.layers.{min(layer, num_layers - 1)}", f"transformer.resblocks.{layer}"
        for kind in ("weight", "bias"):
            joint = torch.cat([bare[f"{target}.self_attn.{part}_proj.{kind}"] for part in "qkv"])
            tensors[f"{source}.attn.in_proj_{kind}"] = joint
            tensors[f"{source}.attn.out_proj.{kind}"] = bare[f"{target}.self_attn.out_proj.{kind}"]
            for old, new in (
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                tensors[f"{source}.{new}.{kind}"] = bare[f"{target}.{old}.{kind}"]
    if "text_projection.weight" in bare:
        tensors["text_projection"] = bare["text_projection.weight"].T
    return {root + name: tensor for name, tensor in tensors.items()}

"""DeepCache: shallow UNet calls between full ones, on features kept from the last full call.

The lower resolutions are most of the work and change little between steps. A full call keeps the input of the last
``NUM_SKIPS`` layers of its last up block; a shallow call recomputes only the first ``NUM_SKIPS`` skip connections.
(Ma, Fang and Wang, "DeepCache: Accelerating Diffusion Models for Free", CVPR 2024, with ``NUM_SKIPS = 1``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Final

import torch
from torch import Tensor

from diffserve.runtime.unet.call import GUIDANCE, UNetArguments, conditions
from diffserve.runtime.unet.cross_attention import Contexts

NUM_SKIPS: Final = 2
DOWN_BLOCKS: Final = ("DownBlock2D", "CrossAttnDownBlock2D")
UP_BLOCKS: Final = ("UpBlock2D", "CrossAttnUpBlock2D")

UNUSUAL: Final = ("class_embedding", "encoder_hid_proj", "position_net")
"""Attributes of ``UNet2DConditionModel`` beyond the Stable Diffusion families that affect the shallow part."""

Layer = tuple[Any, Any]
"""A ``ResnetBlock2D`` and the ``Transformer2DModel`` behind it, or ``None``."""


class ShallowPart:
    """The part of a ``UNet2DConditionModel`` that a shallow call runs; :meth:`find` checks whether it exists.

    Attributes:
        num_channels: Channels of the kept features (R, num_channels, h, w), at the resolution of the latents.
        share: Work of a shallow row over that of a full one: weights times the positions that each is applied to.
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self._down = layers_of(network.down_blocks[0])[: NUM_SKIPS - 1]
        self._up = layers_of(network.up_blocks[-1])[-NUM_SKIPS:]
        self.num_channels: int = self._up[0][0].in_channels - network.config.block_out_channels[0]
        self.share = self._work() / _work_of(network)

    @classmethod
    def find(cls, network: Any) -> ShallowPart | None:
        """Return the shallow part of ``network``; ``None`` if it has too few blocks, or unsupported ones."""
        first, last = network.down_blocks[0], network.up_blocks[-1]
        fits = (
            len(network.up_blocks) > 1
            and type(first).__name__ in DOWN_BLOCKS
            and type(last).__name__ in UP_BLOCKS
            and len(first.resnets) >= NUM_SKIPS - 1
            and len(last.resnets) >= NUM_SKIPS
            and not any(getattr(network, name, None) for name in UNUSUAL)
            and not network.config.center_input_sample
            and network.config.addition_embed_type in (None, "text_time")
        )
        return cls(network) if fits else None

    @contextmanager
    def keeping(self) -> Iterator[list[Tensor]]:
        """Collect the features (R, num_channels, h, w) of every full call in the block, as views of larger tensors."""
        collected: list[Tensor] = []
        first_resnet = self._up[0][0]
        handle = first_resnet.register_forward_pre_hook(
            lambda _, args: collected.append(args[0][:, : self.num_channels])
        )
        try:
            yield collected
        finally:
            handle.remove()

    def predict(self, call: UNetArguments) -> Tensor:
        """Run the shallow part on the features of ``call``; returns (R, C, h, w)."""
        network = self.network
        sample, timesteps, contexts, added, *_ = call
        condition_arguments = conditions(added)
        times = network.get_time_embed(sample=sample, timestep=timesteps)
        embedding = network.time_embedding(times, condition_arguments.pop(GUIDANCE))
        further = network.get_aug_embed(emb=embedding, encoder_hidden_states=contexts, **condition_arguments)
        embedding = embedding if further is None else embedding + further
        embedding = embedding if network.time_embed_act is None else network.time_embed_act(embedding)
        hidden = network.conv_in(sample)
        skips = [hidden]
        for layer in self._down:
            hidden = _run(layer, hidden, embedding, contexts)
            skips.append(hidden)
        assert call.features is not None
        hidden = call.features
        for layer in self._up:
            hidden = _run(layer, torch.cat([hidden, skips.pop()], dim=1), embedding, contexts)
        if network.conv_norm_out is not None:
            hidden = network.conv_act(network.conv_norm_out(hidden))
        output: Tensor = network.conv_out(hidden)
        return output

    def _work(self) -> float:
        run = [part for layer in (*self._down, *self._up) for part in layer if part is not None]
        return sum(map(_num_weights, (self.network.conv_in, *run, self.network.conv_out)))


def layers_of(block: Any) -> list[Layer]:
    """Return the layers of a down or up block, in the order in which they run."""
    attentions: Iterable[Any] = getattr(block, "attentions", repeat(None))
    return list(zip(block.resnets, attentions, strict=False))


def _run(layer: Layer, hidden: Tensor, embedding: Tensor, contexts: Contexts) -> Tensor:
    resnet, attention = layer
    hidden = resnet(hidden, embedding)
    if attention is not None:
        hidden = attention(hidden, encoder_hidden_states=contexts, return_dict=False)[0]
    return hidden


def _work_of(network: Any) -> float:
    """Return the sum of weights times the positions that each is applied to, over the positions of the latents."""
    work: float = _num_weights(network.conv_in) + _num_weights(network.conv_out)
    deepest = len(network.down_blocks) - 1
    levels = [*enumerate(network.down_blocks), (deepest, network.mid_block)]
    levels += [(deepest - index, block) for index, block in enumerate(network.up_blocks)]
    for level, block in levels:
        work += 0.0 if block is None else _num_weights(block) / 4.0**level
    return work


def _num_weights(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

"""DeepCache: between full calls of a UNet only its shallow part runs, on features that the last full call left.

What a UNet computes at its lower resolutions changes little from one step to the next, and is most of the work. So a
full call keeps what enters the last ``NUM_SKIPS`` layers of its last up block, and a shallow call computes the first
``NUM_SKIPS`` skip connections anew and goes on from the kept features. (Ma, Fang and Wang, "DeepCache: Accelerating
Diffusion Models for Free", CVPR 2024; theirs is ``NUM_SKIPS = 1``.)
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
"""What ``UNet2DConditionModel`` may have beyond the Stable Diffusion families on the way into its shallow part."""

Layer = tuple[Any, Any]
"""A ``ResnetBlock2D`` and the ``Transformer2DModel`` behind it, or ``None``."""


class ShallowPart:
    """What a shallow call runs of ``network``, a ``UNet2DConditionModel``; :meth:`find` says whether it can.

    num_channels  of the kept features (R, num_channels, h, w), which have the resolution of the latents
    share         work of a shallow row over that of a full one: weights times the positions that each is applied to
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self._down = layers_of(network.down_blocks[0])[: NUM_SKIPS - 1]
        self._up = layers_of(network.up_blocks[-1])[-NUM_SKIPS:]
        self.num_channels: int = self._up[0][0].in_channels - network.config.block_out_channels[0]
        self.share = self._work() / _work_of(network)

    @classmethod
    def find(cls, network: Any) -> ShallowPart | None:
        """Of ``network``; ``None`` where it has too few blocks, or other ones than Stable Diffusion's."""
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
        """The features (R, num_channels, h, w) of every full call made inside, views that are not to be kept long."""
        kept: list[Tensor] = []
        first_resnet = self._up[0][0]
        handle = first_resnet.register_forward_pre_hook(lambda _, args: kept.append(args[0][:, : self.num_channels]))
        try:
            yield kept
        finally:
            handle.remove()

    def predict(self, call: UNetArguments) -> Tensor:
        """Run the shallow part on the features of ``call``; returns (R, C, h, w)."""
        network = self.network
        sample, timesteps, contexts, added, *_ = call
        told = conditions(added)
        times = network.get_time_embed(sample=sample, timestep=timesteps)
        embedding = network.time_embedding(times, told.pop(GUIDANCE))
        further = network.get_aug_embed(emb=embedding, encoder_hidden_states=contexts, **told)
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
    """The layers of a down or up block, in the order in which they run."""
    attentions: Iterable[Any] = getattr(block, "attentions", repeat(None))
    return list(zip(block.resnets, attentions, strict=False))


def _run(layer: Layer, hidden: Tensor, embedding: Tensor, contexts: Contexts) -> Tensor:
    resnet, attention = layer
    hidden = resnet(hidden, embedding)
    if attention is not None:
        hidden = attention(hidden, encoder_hidden_states=contexts, return_dict=False)[0]
    return hidden


def _work_of(network: Any) -> float:
    """Weights times the positions that each is applied to, over the positions of the latents."""
    work: float = _num_weights(network.conv_in) + _num_weights(network.conv_out)
    deepest = len(network.down_blocks) - 1
    levels = [*enumerate(network.down_blocks), (deepest, network.mid_block)]
    levels += [(deepest - index, block) for index, block in enumerate(network.up_blocks)]
    for level, block in levels:
        work += 0.0 if block is None else _num_weights(block) / 4.0**level
    return work


def _num_weights(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

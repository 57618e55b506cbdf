"""ControlNets: copies of a UNet's first half that read a picture, and add to what the UNet's own first half leaves.

(Zhang, Rao and Agrawala, "Adding Conditional Control to Text-to-Image Diffusion Models", ICCV 2023.) What a ControlNet
makes of its picture before it meets the latents, the *hint*, does not change from step to step: it is computed once for
each image, alone, and not by every call anew as diffusers does. Keys and values of its cross-attention are made within
its calls, of the texts' embeddings: no page holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffserve.api.errors import ModelLoadError

Residuals = tuple[Tensor, ...]
"""(R, C, h, w) each: what is added to the skips of a UNet's first half, in order, and behind them to its middle."""


class ControlNetRunner:
    """Runs diffusers' ``ControlNetModel``, whose own embedding of the picture is taken out of it.

    name    of its folder
    digest  of its files, 64 hexadecimal digits
    """

    def __init__(self, name: str, digest: str, network: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self.name = name
        self.digest = digest
        self.network = network
        self.device = device
        self.dtype = dtype
        self.has_size_conditioning: bool = network.config.addition_embed_type == "text_time"
        self._embedding = network.controlnet_cond_embedding
        self._is_bgr: bool = network.config.controlnet_conditioning_channel_order == "bgr"
        network.controlnet_cond_embedding = nn.Identity()
        network.register_to_config(controlnet_conditioning_channel_order="rgb")  # of hints there is none

    @property
    def num_bytes(self) -> int:
        """Memory that its weights take."""
        parts = (*self.network.parameters(), *self._embedding.parameters())
        return sum(parameter.nbytes for parameter in parts)

    @property
    def hint_channels(self) -> int:
        """Of a hint."""
        return int(self._embedding.conv_out.out_channels)

    @torch.inference_mode()
    def hint(self, pixels: Tensor) -> Tensor:
        """(C, h, w) of a control map (3, height, width) in [0, 1]."""
        pixels = pixels.to(self.device, self.dtype)
        found: Tensor = self._embedding((pixels.flip(0) if self._is_bgr else pixels)[None])[0]
        return found

    @torch.inference_mode()
    def predict(
        self,
        model_input: Tensor,
        timesteps: Tensor,
        contexts: Tensor,
        hints: Tensor,
        scales: Tensor,
        *,
        pooled: Tensor | None = None,
        time_ids: Tensor | None = None,
    ) -> Residuals:
        """What is added to the UNet's rows, in the dtype of the networks.

        model_input, timesteps  as ``UNetRunner.predict`` has them, without what an inpainting UNet reads beside
        contexts          embeddings of the texts (R, tokens, dim)
        hints             (R, C, h, w) of ``hint``
        scales            (R,) of what is added
        pooled, time_ids  (R, P) and (R, 6): SDXL only, and needed there
        """
        added = None
        if self.has_size_conditioning:
            if pooled is None or time_ids is None:
                raise ValueError("this ControlNet needs pooled text embeddings and time_ids for every row")
            added = {"text_embeds": pooled.to(self.device, self.dtype), "time_ids": time_ids.to(self.device)}
        down, middle = self.network(
            model_input.to(self.device, self.dtype),
            timesteps.to(self.device, torch.float32),
            encoder_hidden_states=contexts.to(self.device, self.dtype),
            controlnet_cond=hints,
            conditioning_scale=scales.to(self.device, self.dtype).view(-1, 1, 1, 1),
            added_cond_kwargs=added,
            return_dict=False,
        )
        return (*down, middle)


def residual_shapes(network: Any, height: int, width: int) -> tuple[tuple[int, int, int], ...]:
    """(C, h, w) of each residual of ``network``, a UNet or a ControlNet, for latents of ``height`` x ``width``."""
    shapes = [(int(network.conv_in.out_channels), height, width)]
    for block in network.down_blocks:
        channels = int(block.resnets[-1].conv2.out_channels)
        shapes += [(int(resnet.conv2.out_channels), height, width) for resnet in block.resnets]
        if block.downsamplers:
            height, width = (height + 1) // 2, (width + 1) // 2
            shapes.append((channels, height, width))
    return (*shapes, (shapes[-1][0], height, width))


def random_residuals(network: Any, cells: tuple[int, int], rows: Sequence[int], like: Tensor) -> Residuals:
    """Of random ``rows``, by whose numbers they are the same every time, with dtype and device of ``like``."""
    rngs = [torch.Generator("cpu").manual_seed(row) for row in rows]
    return tuple(
        torch.stack([torch.randn(shape, generator=rng) for rng in rngs]).to(like.device, like.dtype) / 8
        for shape in residual_shapes(network, *cells)
    )


def check_fits(controlnet: Any, unet: Any, vae_factor: int) -> None:
    """ModelLoadError, a clause, where ``controlnet`` was not made for such a UNet, or needs what is not given here."""
    own, its = controlnet.config, unet.config
    shrinks = 2 ** (len(own.conditioning_embedding_out_channels) - 1)
    told = own.addition_embed_type == "text_time"
    numbers = "projection_class_embeddings_input_dim"
    if own.cross_attention_dim != its.cross_attention_dim:
        said = f"it reads texts of {own.cross_attention_dim} numbers a token, the UNet of {its.cross_attention_dim}"
    elif own.in_channels != its.out_channels:
        said = f"it reads latents of {own.in_channels} channels, the UNet paints {its.out_channels}"
    elif residual_shapes(controlnet, 64, 64) != residual_shapes(unet, 64, 64):
        said = "its blocks are not those of this UNet"
    elif told and (its.addition_embed_type != "text_time" or getattr(own, numbers) != getattr(its, numbers)):
        said = "it is told sizes that this UNet is not"
    elif own.conditioning_channels != 3 or shrinks != vae_factor:
        read = f"{own.conditioning_channels} channels at {shrinks} pixels a cell"
        said = f"it reads pictures of {read}, not of 3 at {vae_factor}"
    else:
        return
    raise ModelLoadError(said)

"""ControlNets: copies of a UNet's down and middle blocks that read a control map and add residuals to the UNet.

(Zhang, Rao and Agrawala, "Adding Conditional Control to Text-to-Image Diffusion Models", ICCV 2023.) The embedding of
the control map, the *hint*, is the same at every step, so it is computed once per image and not in each call as in
diffusers. Keys and values of the cross-attention are computed in each call from the embeddings, not kept in pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffserve.api.errors import ModelLoadError

Residuals = tuple[Tensor, ...]
"""(R, C, h, w) each: added to the skip connections of a UNet in order, and last to its middle block."""


class ControlNetRunner:
    """Runs diffusers' ``ControlNetModel``, whose embedding of the control map is moved out of the network.

    Attributes:
        name: Name of its folder.
        digest: Digest of its files, 64 hexadecimal digits.
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
        network.register_to_config(controlnet_conditioning_channel_order="rgb")  # hints have no channel order

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes."""
        parts = (*self.network.parameters(), *self._embedding.parameters())
        return sum(parameter.nbytes for parameter in parts)

    @property
    def hint_channels(self) -> int:
        """Number of channels of a hint."""
        return int(self._embedding.conv_out.out_channels)

    @torch.inference_mode()
    def hint(self, pixels: Tensor) -> Tensor:
        """Return the hint (C, h, w) of a control map (3, height, width) in [0, 1]."""
        pixels = pixels.to(self.device, self.dtype)
        hint: Tensor = self._embedding((pixels.flip(0) if self._is_bgr else pixels)[None])[0]
        return hint

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
        """Return what is added to the UNet's rows, in the dtype of the networks.

        Args:
            model_input: (R, C, h, w) as in ``UNetRunner.predict``, without the extra channels of an inpainting UNet.
            timesteps: (R,) training timesteps.
            contexts: Embeddings of the texts (R, tokens, dim).
            hints: (R, C, h, w), made by ``hint``.
            scales: (R,) factors of the residuals.
            pooled: (R, P), required for SDXL only.
            time_ids: (R, 6), required for SDXL only.
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
    """Return (C, h, w) of each residual of a UNet or ControlNet for latents of ``height`` x ``width``."""
    shapes = [(int(network.conv_in.out_channels), height, width)]
    for block in network.down_blocks:
        channels = int(block.resnets[-1].conv2.out_channels)
        shapes += [(int(resnet.conv2.out_channels), height, width) for resnet in block.resnets]
        if block.downsamplers:
            height, width = (height + 1) // 2, (width + 1) // 2
            shapes.append((channels, height, width))
    return (*shapes, (shapes[-1][0], height, width))


def random_residuals(network: Any, cells: tuple[int, int], rows: Sequence[int], like: Tensor) -> Residuals:
    """Return residuals of random numbers seeded by the row numbers, with dtype and device of ``like``."""
    rngs = [torch.Generator("cpu").manual_seed(row) for row in rows]
    return tuple(
        torch.stack([torch.randn(shape, generator=rng) for rng in rngs]).to(like.device, like.dtype) / 8
        for shape in residual_shapes(network, *cells)
    )


def check_fits(controlnet: Any, unet: Any, vae_factor: int) -> None:
    """Raise ModelLoadError if ``controlnet`` was made for another UNet or needs unsupported inputs.

    The message is a clause for the caller to complete.
    """
    config, unet_config = controlnet.config, unet.config
    shrinks = 2 ** (len(config.conditioning_embedding_out_channels) - 1)
    has_sizes = config.addition_embed_type == "text_time"
    numbers = "projection_class_embeddings_input_dim"
    if config.cross_attention_dim != unet_config.cross_attention_dim:
        width = unet_config.cross_attention_dim
        problem = f"it reads texts of {config.cross_attention_dim} numbers per token, the UNet of {width}"
    elif config.in_channels != unet_config.out_channels:
        problem = f"it reads latents of {config.in_channels} channels, the UNet writes {unet_config.out_channels}"
    elif residual_shapes(controlnet, 64, 64) != residual_shapes(unet, 64, 64):
        problem = "its blocks are not those of this UNet"
    elif has_sizes and (
        unet_config.addition_embed_type != "text_time" or getattr(config, numbers) != getattr(unet_config, numbers)
    ):
        problem = "its size conditioning differs from that of this UNet"
    elif config.conditioning_channels != 3 or shrinks != vae_factor:
        read = f"{config.conditioning_channels} channels at {shrinks} pixels per cell"
        problem = f"it reads images of {read}, not of 3 at {vae_factor}"
    else:
        return
    raise ModelLoadError(problem)

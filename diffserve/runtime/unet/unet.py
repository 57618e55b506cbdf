"""The UNet on a batch of rows: each row its own timestep, text and size conditioning."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from diffserve.runtime.unet.call import Compiled, UNetArguments
from diffserve.runtime.unet.cross_attention import Contexts, CrossAttention
from diffserve.runtime.unet.deep_cache import ShallowPart
from diffserve.runtime.unet.token_merging import merging


class UNetRunner:
    """Runs diffusers' ``UNet2DConditionModel``. Rows of one call share latent shape and token count, nothing else.

    latent_channels  channels of the latents (and of the prediction)
    extra_channels   channels beyond them that an inpainting UNet reads: mask and masked image's latents, 5 or 0
    """

    def __init__(self, network: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self.network = network
        self.device = device
        self.dtype = dtype
        self.latent_channels: int = network.config.out_channels
        self.extra_channels: int = network.config.in_channels - network.config.out_channels
        self.has_size_conditioning: bool = network.config.addition_embed_type == "text_time"

    @cached_property
    def cross_attention(self) -> CrossAttention:
        """The layers that look at the text, from then on ready for keys and values made beforehand.

        Raises ConfigError for a UNet that cannot be used so.
        """
        return CrossAttention(self.network)

    @cached_property
    def shallow(self) -> ShallowPart | None:
        """What runs between full calls under DeepCache; ``None`` for a UNet that has no such part."""
        return ShallowPart.find(self.network)

    @torch.inference_mode()
    def predict(
        self,
        model_input: torch.Tensor,
        timesteps: torch.Tensor,
        contexts: Contexts,
        *,
        pooled: torch.Tensor | None = None,
        time_ids: torch.Tensor | None = None,
        extra: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        merged_share: float = 0.0,
        compiled: Compiled | None = None,
    ) -> torch.Tensor:
        """The network's output (R, C, h, w) in float32, in whatever prediction type it was trained for.

        model_input  (R, C, h, w) float32, scaled by the sampler's c_in
        timesteps    (R,) training timesteps, whole or fractional
        contexts     embeddings (R, tokens, dim), or the ``KeysValues`` that ``cross_attention`` made of them
        pooled       (R, P), time_ids (R, 6): SDXL only, and needed there
        extra        (R, extra_channels, h, w): inpainting UNets only, and needed there
        features     (R, F, h, w) that ``shallow`` kept of a full call: only the shallow part runs, on them
        merged_share of the tokens in self-attention at the highest resolution (see ``token_merging``); 0: all stay
        compiled     makes a full call where it can; the network itself does else
        """
        call = self.call(model_input, timesteps, contexts, pooled=pooled, time_ids=time_ids, extra=extra)
        height, width = call.sample.shape[-2:]
        with merging(self.network, height, width, merged_share):
            return self._run(call, features, compiled if merged_share == 0.0 else None).float()

    def _run(self, call: UNetArguments, features: torch.Tensor | None, compiled: Compiled | None) -> torch.Tensor:
        if features is not None:
            if self.shallow is None:
                raise ValueError("this UNet has no shallow part to run on kept features")
            return self.shallow.predict(call, features)
        output = compiled(call) if compiled else None
        return self.plain(call) if output is None else output

    def plain(self, call: UNetArguments) -> torch.Tensor:
        """What the network itself gives (R, C, h, w) for ``call``, in its dtype."""
        output: torch.Tensor = self.network(
            call.sample,
            call.timesteps,
            encoder_hidden_states=call.contexts,
            added_cond_kwargs=call.added,
            return_dict=False,
        )[0]
        return output

    def call(
        self,
        model_input: torch.Tensor,
        timesteps: torch.Tensor,
        contexts: Contexts,
        *,
        pooled: torch.Tensor | None = None,
        time_ids: torch.Tensor | None = None,
        extra: torch.Tensor | None = None,
    ) -> UNetArguments:
        """The arguments of :meth:`predict` as the network takes them. ValueError where one is missing."""
        added = None
        if self.has_size_conditioning:
            if pooled is None or time_ids is None:
                raise ValueError("this UNet needs pooled text embeddings and time_ids for every row")
            added = {"text_embeds": pooled.to(self.device, self.dtype), "time_ids": time_ids.to(self.device)}
        if (extra is None) != (self.extra_channels == 0):
            raise ValueError(f"this UNet takes {self.extra_channels} extra channels")
        if isinstance(contexts, torch.Tensor):
            contexts = contexts.to(self.device, self.dtype)
        sample = model_input.to(self.device)
        if extra is not None:
            sample = torch.cat([sample, extra.to(self.device)], dim=1)
        return UNetArguments(sample.to(self.dtype), timesteps.to(self.device, torch.float32), contexts, added)

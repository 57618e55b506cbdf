"""The UNet on a batch of rows: each row its own timestep, text and size conditioning."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch

from diffserve.runtime.low_rank import RowLoRAs, adapting, of_pictures
from diffserve.runtime.unet.call import GUIDANCE, Compiled, Outputs, Recorder, UNetArguments, conditions
from diffserve.runtime.unet.controlnet import Residuals
from diffserve.runtime.unet.cross_attention import Contexts, CrossAttention, KeysValues, find_difference
from diffserve.runtime.unet.deep_cache import ShallowPart


class UNetRunner:
    """Runs diffusers' ``UNet2DConditionModel``. Rows of one call share latent shape and token count, nothing else.

    Attributes:
        latent_channels: Channels of the latents and of the prediction.
        extra_channels: Further channels of an inpainting UNet (mask and masked image's latents): 5, else 0.
        guidance_dim: Size of the guidance embedding (latent consistency models); 0 if guidance takes a second row.
    """

    def __init__(
        self,
        network: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        is_hollow: bool = False,
        is_split: bool = False,
    ) -> None:
        """Initialize the runner; ``is_split``: some blocks are on other devices, so only the whole network can run."""
        self.network = network
        self._is_split = is_split
        self.device = device
        self.dtype = dtype
        self.is_hollow = is_hollow
        self._layers: dict[bool, tuple[torch.nn.Module, ...]] = {}
        self.latent_channels: int = network.config.out_channels
        self.extra_channels: int = network.config.in_channels - network.config.out_channels
        self.guidance_dim: int = network.config.time_cond_proj_dim or 0
        self.has_size_conditioning: bool = network.config.addition_embed_type == "text_time"

    @property
    def memory_format(self) -> str:
        """The layout of the convolution weights, "contiguous" or "channels_last"."""
        return "contiguous" if self.network.conv_in.weight.is_contiguous() else "channels_last"

    @cached_property
    def cross_attention(self) -> CrossAttention:
        """The cross-attention layers, which accept precomputed keys and values from then on."""
        return CrossAttention(self.network)

    @cached_property
    def unpaged_reason(self) -> str | None:
        """The reason why keys and values of prompts cannot be kept in pages; ``None`` if they can."""
        return find_difference(self.network)

    @cached_property
    def shallow(self) -> ShallowPart | None:
        """The part that DeepCache runs between full calls; ``None`` if the UNet has none, or is split."""
        return None if self._is_split else ShallowPart.find(self.network)

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
        guidance: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        compiled: Compiled | None = None,
        recorder: Recorder | None = None,
        loras: RowLoRAs | None = None,
        residuals: Residuals | None = None,
        kept_features: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the network's output (R, C, h, w) in float32, in the prediction type that it was trained for.

        Args:
            model_input: (R, C, h, w) float32, scaled by the sampler's c_in.
            timesteps: (R,) training timesteps, possibly fractional.
            contexts: Embeddings (R, tokens, dim), or ``KeysValues`` made by ``cross_attention``.
            pooled: (R, P), required for SDXL only.
            time_ids: (R, 6), required for SDXL only.
            extra: (R, extra_channels, h, w), required for inpainting UNets only.
            guidance: (R,) scales for UNets with a ``guidance_dim``; by default 1, which is no guidance.
            features: (R, F, h, w) kept of a full call; then only the shallow part runs.
            compiled: Makes full calls without references that it can; otherwise the network does.
            recorder: Replays a recording of a call without references if it can.
            loras: Changes of the network for each row.
            residuals: ControlNet residuals for each row; such calls are never compiled ones.
            kept_features: A list to which the features (R, F, h, w) of this full call are added.
        """
        conditioning = {"pooled": pooled, "time_ids": time_ids, "extra": extra, "guidance": guidance}
        call = self.call(model_input, timesteps, contexts, **conditioning)
        call = call._replace(residuals=residuals or (), features=features)
        layers, rank = (loras.layers, loras.rank) if loras else ((), 0)
        keeps_features = kept_features is not None
        if isinstance(contexts, KeysValues) and contexts.images:
            compiled = recorder = None  # neither knows the arguments of references

        def make(call: UNetArguments, loras: RowLoRAs | None) -> Outputs:
            if compiled and call.is_whole and not keeps_features:
                output = compiled(self.with_factors(call, loras))
                if output is not None:
                    return (output,)
            return self._run(call, loras, keeps_features=keeps_features)

        def make_recorded(call: UNetArguments) -> Outputs:
            factors = dict(zip(layers, call.factors, strict=True))
            return make(call._replace(factors=()), RowLoRAs.of_factors(factors, rank) if factors else None)

        outputs = None
        if recorder is not None and (loras is None or loras.is_kept):
            factors = tuple(map(loras.stacked, layers)) if loras else ()
            outputs = recorder(call._replace(factors=factors), make_recorded, (layers, keeps_features))
        output, *features_of_call = make(call, loras) if outputs is None else outputs
        if kept_features is not None:
            kept_features += features_of_call
        return output.float()

    def _run(self, call: UNetArguments, loras: RowLoRAs | None, *, keeps_features: bool) -> Outputs:
        """Run the network itself, or its shallow part."""
        shallow = self.shallow if keeps_features or call.features is not None else None
        keeping = shallow.keeping() if shallow is not None and keeps_features else nullcontext(())
        with adapting(loras), keeping as features:
            if call.features is None:
                return (self.plain(call), *features)
            if shallow is None:
                raise ValueError("this UNet has no shallow part to run on kept features")
            return (shallow.predict(call),)

    def with_factors(self, call: UNetArguments, loras: RowLoRAs | None) -> UNetArguments:
        """Return ``call`` with the factors of ``loras`` as arguments, for compiled calls."""
        if loras is None:
            return call
        if (is_paged := isinstance(call.contexts, KeysValues)) not in self._layers:
            self._layers[is_paged] = of_pictures(self.network, has_keys_values=is_paged)
        return call._replace(factors=loras.of_all(self._layers[is_paged]))

    def plain(self, call: UNetArguments) -> torch.Tensor:
        """Run the whole network on ``call``; returns (R, C, h, w) in its dtype."""
        added: dict[str, Any] = {}
        if call.residuals:
            *down, middle = call.residuals
            added = {"down_block_additional_residuals": tuple(down), "mid_block_additional_residual": middle}
        output: torch.Tensor = self.network(
            call.sample,
            call.timesteps,
            encoder_hidden_states=call.contexts,
            **conditions(call.added),
            **added,
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
        guidance: torch.Tensor | None = None,
    ) -> UNetArguments:
        """Return the arguments of :meth:`predict` as the network takes them. Raises ValueError if one is missing."""
        added: dict[str, torch.Tensor] = {}
        if self.has_size_conditioning:
            if pooled is None or time_ids is None:
                raise ValueError("this UNet needs pooled text embeddings and time_ids for every row")
            added |= {"text_embeds": pooled.to(self.device, self.dtype), "time_ids": time_ids.to(self.device)}
        if self.guidance_dim:
            scales = torch.ones(len(model_input)) if guidance is None else guidance
            added[GUIDANCE] = guidance_vectors(scales.to(self.device), self.guidance_dim).to(self.dtype)
        if (extra is None) != (self.extra_channels == 0):
            raise ValueError(f"this UNet takes {self.extra_channels} extra channels")
        if isinstance(contexts, torch.Tensor):
            contexts = contexts.to(self.device, self.dtype)
        sample = model_input.to(self.device)
        if extra is not None:
            sample = torch.cat([sample, extra.to(self.device)], dim=1)
        return UNetArguments(sample.to(self.dtype), timesteps.to(self.device, torch.float32), contexts, added or None)


def guidance_vectors(scales: torch.Tensor, dim: int) -> torch.Tensor:
    """Return sinusoidal embeddings (R, dim) float32 of guidance ``scales`` (R,).

    Sines and cosines of 1000 (scale - 1) (Luo et al. 2023, arXiv 2310.04378, section 4.2).
    """
    half = dim // 2
    rates = torch.exp(torch.arange(half, device=scales.device) * (-math.log(10000.0) / (half - 1)))
    angles = (scales.float() - 1.0)[:, None] * 1000.0 * rates
    return torch.nn.functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, dim % 2))

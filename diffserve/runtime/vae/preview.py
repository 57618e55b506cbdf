"""Live previews for a small part of what the VAE costs: a tiny decoder from latents to pixels.

It lies in ``preview/`` beside ``unet/`` and ``vae/``: config.json and diffusion_pytorch_model.safetensors. Two classes
are read, told apart by ``_class_name``: our own ``PreviewDecoder``, and diffusers' ``AutoencoderTiny`` (TAESD), of
which only the decoder is built. A model without one is previewed by its VAE.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diffserve.errors import ModelLoadError
from diffserve.runtime.loading.checkpoint import Checkpoint, find_weights, read_json
from diffserve.runtime.loading.components import ALLOWED_CLASSES, build_tiny_autoencoder
from diffserve.runtime.loading.directory import DIFFUSERS_STEM
from diffserve.runtime.loading.weight_loading import TensorSource, build_on_meta, fill
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.vae.preview_decoder import PreviewConfig, PreviewDecoder
from diffserve.runtime.vae.vae import shrunk, to_pixels

PREVIEW_DIRECTORY: Final = "preview"
OWN_CLASS: Final = "PreviewDecoder"
TINY_PREFIX: Final = "decoder."


class PreviewRunner:
    """Runs a decoder that gives pictures in -1..1 of ``latents / scaling_factor + shift_factor``.

    latent_channels  that it takes
    factor           pixels of a preview to a cell
    """

    def __init__(
        self,
        network: Any,
        *,
        latent_channels: int,
        factor: int,
        device: torch.device,
        dtype: torch.dtype,
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
    ) -> None:
        self.network = network
        self.latent_channels, self.factor = latent_channels, factor
        self.device, self.dtype = device, dtype
        self._scale, self._shift = scaling_factor, shift_factor

    @torch.inference_mode()
    def preview(self, latents: Tensor) -> NDArray[np.uint8]:
        """Pictures (B, H, W, 3) of ``latents`` (B, C, h, w) float32, pooled to at most 32 cells a side, in one call.

        A preview never fails for its numbers: where they are not numbers it is gray.
        """
        z = shrunk(latents).to(self.device, torch.float32) / self._scale + self._shift
        return to_pixels(self.network(z.to(self.dtype)).float().nan_to_num(nan=0.0))


def load_preview(directory: Path, choice: DeviceChoice) -> PreviewRunner | None:
    """The preview decoder in ``directory``, or ``None`` when no config.json is there.

    Raises ModelLoadError when its config.json names another class, or does not fit its weights.
    """
    file = directory / "config.json"
    if not file.is_file():
        return None
    config = read_json(file)
    name = config.get("_class_name")
    if name not in ALLOWED_CLASSES["preview"]:
        known = " or ".join(ALLOWED_CLASSES["preview"])
        raise ModelLoadError(f"{file}: _class_name is {name!r}; diffserve builds {known} there and runs no other code.")
    return (_load_own if name == OWN_CLASS else _load_tiny)(directory, config, choice)


def _load_own(directory: Path, config: Mapping[str, Any], choice: DeviceChoice) -> PreviewRunner:
    try:
        shape = PreviewConfig.from_dict(config)
    except ValueError as error:
        raise ModelLoadError(f"{directory / 'config.json'} is not that of a {OWN_CLASS}: {error}.") from error
    network = build_on_meta(lambda: PreviewDecoder(shape))
    _fill(network, directory, "", choice)
    return PreviewRunner(
        network,
        latent_channels=shape.latent_channels,
        factor=shape.factor,
        device=choice.device,
        dtype=choice.compute_dtype,
    )


def _load_tiny(directory: Path, config: Mapping[str, Any], choice: DeviceChoice) -> PreviewRunner:
    whole = build_tiny_autoencoder(config, str(directory / "config.json"))
    _fill(whole.decoder, directory, TINY_PREFIX, choice)
    settings = whole.config
    return PreviewRunner(
        whole.decoder,
        latent_channels=int(settings.latent_channels),
        factor=int(settings.upsampling_scaling_factor) ** (len(settings.num_decoder_blocks) - 1),
        device=choice.device,
        dtype=choice.compute_dtype,
        scaling_factor=float(settings.scaling_factor),
        shift_factor=float(settings.shift_factor),
    )


def _fill(network: nn.Module, directory: Path, prefix: str, choice: DeviceChoice) -> None:
    """Fill ``network`` with the tensors whose names begin with ``prefix``; the others are never read."""
    checkpoint = Checkpoint.open(find_weights(directory, DIFFUSERS_STEM, prefer_fp16=choice.dtype == "float16"))
    names = {key.removeprefix(prefix): key for key in checkpoint.entries if key.startswith(prefix)}
    fill(network, TensorSource.renamed(checkpoint, names), choice, channels_last=True)

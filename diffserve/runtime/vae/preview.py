"""Live previews by a small decoder from latents to pixels, at a fraction of the VAE's cost.

It is in ``preview/`` of a model: config.json and diffusion_pytorch_model.safetensors. ``_class_name`` is diffserve's
``PreviewDecoder`` or diffusers' ``AutoencoderTiny`` (TAESD), of which only the decoder is built. Other models are
previewed by their VAE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.api.errors import ModelLoadError
from diffserve.models.model_files import DIFFUSERS_STEM, find_weights, read_json
from diffserve.runtime.loading.checkpoint import Checkpoint
from diffserve.runtime.loading.components import ALLOWED_CLASSES, build_vae
from diffserve.runtime.loading.weight_loading import TensorSource, build_on_meta, fill
from diffserve.runtime.precision import DeviceChoice
from diffserve.runtime.vae.vae import Decoded, shrunk, to_bytes

MAX_NUMBER: Final = 4096
PREVIEW_DIRECTORY: Final = "preview"
OWN_CLASS: Final = "PreviewDecoder"
TINY_PREFIX: Final = "decoder."


Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
Counts = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]


class PreviewConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of a :class:`PreviewDecoder`.

    Attributes:
        latent_channels: Channels of the latents.
        widths: Channels at each level, from coarse to fine; each level has twice the resolution of the one before.
        num_blocks: Residual blocks at each level.
        factor: Pixels per latent cell; a multiple of 2 ** (levels - 1).
    """

    latent_channels: Count
    widths: Counts
    num_blocks: Counts
    factor: Count

    def __post_init__(self) -> None:
        levels = len(self.widths)
        if len(self.num_blocks) != levels:
            raise ValueError(f"num_blocks has {len(self.num_blocks)} entries; give one for each of {levels} widths")
        if self.factor % self._doublings:
            raise ValueError(f"factor is {self.factor}; with {levels} widths, give a multiple of {self._doublings}")

    @property
    def last_factor(self) -> int:
        """Factor of the final enlargement."""
        return self.factor // self._doublings

    @property
    def _doublings(self) -> int:
        return 1 << (len(self.widths) - 1)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a skip connection: (B, width, h, w) to the same shape.

    No ReLU is on the skip connection (He et al., 2016, arXiv 1603.05027): in such a narrow network a few training steps
    could otherwise turn channels off permanently.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + second(relu(first(relu(x))))."""
        inner: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + inner


class PreviewDecoder(nn.Module):
    """Convolutions, widest at the latents' resolution and narrower at each finer one.

    Pixel shuffles (Shi et al., 2016, arXiv 1609.05158) go to finer cells and pixels, so that no convolution runs at the
    image's resolution, where a VAE spends most of its time.
    """

    def __init__(self, config: PreviewConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.widths
        self.conv_in = nn.Conv2d(config.latent_channels, widths[0], 3, padding=1)
        self.levels = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(count)))
            for width, count in zip(widths, config.num_blocks, strict=True)
        )
        self.finer = nn.ModuleList(nn.Conv2d(width, 4 * next_width, 1) for width, next_width in pairwise(widths))
        self.conv_out = nn.Conv2d(widths[-1], 3 * config.last_factor**2, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Decode (B, latent_channels, h, w) as the UNet sees them to (B, 3, factor h, factor w), about -1..1."""
        hidden: Tensor = self.levels[0](self.conv_in(latents))
        for finer, level in zip(self.finer, self.levels[1:], strict=True):
            hidden = level(F.pixel_shuffle(finer(hidden), 2))
        return F.pixel_shuffle(self.conv_out(hidden), self.config.last_factor)


@dataclass(frozen=True)
class PreviewRunner:
    """Runs a decoder from ``latents / scaling_factor + shift_factor`` to images in -1..1.

    Attributes:
        latent_channels: Channels of its input.
        factor: Preview pixels per cell.
    """

    network: Any
    latent_channels: int
    factor: int
    device: torch.device
    dtype: torch.dtype
    scaling_factor: float = 1.0
    shift_factor: float = 0.0

    @torch.inference_mode()
    def preview_later(self, latents: Tensor) -> Decoded:
        """Start ``preview`` without waiting for the device."""
        z = shrunk(latents).to(self.device, torch.float32) / self.scaling_factor + self.shift_factor
        return Decoded.of(to_bytes(self.network(z.to(self.dtype)).float().nan_to_num(nan=0.0)))


def load_preview(directory: Path, choice: DeviceChoice) -> PreviewRunner | None:
    """Load the preview decoder in ``directory``; ``None`` without a config.json.

    Raises ModelLoadError if its config.json names another class, or does not fit its weights.
    """
    file = directory / "config.json"
    if not file.is_file():
        return None
    config = read_json(file)
    name = config.get("_class_name")
    if name not in ALLOWED_CLASSES["preview"]:
        classes = " or ".join(ALLOWED_CLASSES["preview"])
        raise ModelLoadError(
            f"{file}: _class_name is {name!r}; diffserve builds {classes} there and runs no other code."
        )
    runner = _preview_decoder(file, config, choice) if name == OWN_CLASS else _tiny_decoder(file, config, choice)
    prefix = "" if name == OWN_CLASS else TINY_PREFIX  # tensors of other names are never read
    checkpoint = Checkpoint.open(find_weights(directory, DIFFUSERS_STEM, dtype=choice.dtype))
    names = {key.removeprefix(prefix): key for key in checkpoint.entries if key.startswith(prefix)}
    fill(runner.network, TensorSource.renamed(checkpoint, names), choice, channels_last=True)
    return runner


def _preview_decoder(file: Path, config: Mapping[str, Any], choice: DeviceChoice) -> PreviewRunner:
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    try:
        shape = msgspec.convert(settings, PreviewConfig)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{file} is not that of a {OWN_CLASS}: {error}.") from error
    network = build_on_meta(lambda: PreviewDecoder(shape))
    return PreviewRunner(network, shape.latent_channels, shape.factor, choice.device, choice.compute_dtype)


def _tiny_decoder(file: Path, config: Mapping[str, Any], choice: DeviceChoice) -> PreviewRunner:
    autoencoder = build_vae(config, str(file))
    settings = autoencoder.config
    return PreviewRunner(
        autoencoder.decoder,
        int(settings.latent_channels),
        int(settings.upsampling_scaling_factor) ** (len(settings.num_decoder_blocks) - 1),
        choice.device,
        choice.compute_dtype,
        scaling_factor=float(settings.scaling_factor),
        shift_factor=float(settings.shift_factor),
    )

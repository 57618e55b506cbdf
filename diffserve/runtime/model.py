"""Load a model and hold its parts: text encoders, UNet, VAE, noise schedule, and what is said about it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffserve.errors import ModelLoadError, ModelNotFound
from diffserve.runtime.checkpoint import digest_files, refuse_pickle
from diffserve.runtime.directory import LoadedParts, load_directory
from diffserve.runtime.family import default_profile, detect_family
from diffserve.runtime.precision import DeviceChoice, choose_device
from diffserve.runtime.quantisation import tensor_bytes
from diffserve.runtime.text import TextRunner
from diffserve.runtime.unet import UNetRunner
from diffserve.runtime.vae import VAERunner
from diffserve.types import ModelInfo, ModelProfile
from schedulers import NoiseSchedule

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
EMBEDDED_DIRECTORY = Path(__file__).resolve().parent.parent / "embedded" / "weights"


class MemoryEntry(NamedTuple):
    """What one component holds."""

    component: str
    num_parameters: int
    weights_bytes: int


@dataclass(frozen=True)
class DiffusionModel:
    """A loaded model. The runners share nothing but the device; ``digest`` is sha256 over the weight files."""

    info: ModelInfo
    schedule: NoiseSchedule
    scheduler_config: dict[str, Any]
    text: TextRunner
    unet: UNetRunner
    vae: VAERunner
    choice: DeviceChoice
    digest: str

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return self.choice.device

    @property
    def dtype(self) -> torch.dtype:
        """What the networks compute in."""
        return self.choice.compute_dtype

    def memory_report(self) -> list[MemoryEntry]:
        """Parameters and bytes of each component, for ``diffserve doctor``."""
        encoders = [encoder.network for encoder in self.text.encoders]
        return list(_memory(encoders, self.unet.network, self.vae.network))


def load_model(
    path: str | Path = EMBEDDED,
    *,
    dtype: str = "auto",
    device: str = "auto",
    model_id: str | None = None,
    profile: ModelProfile | None = None,
) -> DiffusionModel:
    """Load ``path``: "embedded", a diffusers directory, or a single safetensors file of SD 1.x, SD 2.x or SDXL.

    ``profile`` gives the defaults and good sizes; without it the family's own are taken. Nothing is fetched from anywhere.
    Raises ModelNotFound when nothing is there, ModelLoadError when it cannot be used, ConfigError for a wrong dtype or
    device.
    """
    choice = choose_device(device, dtype)
    location = EMBEDDED_DIRECTORY if str(path) == EMBEDDED else Path(path).expanduser()
    parts = _load_parts(location, choice)
    family = EMBEDDED if str(path) == EMBEDDED else detect_family(parts)
    schedule = _noise_schedule(parts.scheduler_config, location)
    digest = digest_files(parts.files)
    unet = UNetRunner(parts.unet, device=choice.device, dtype=choice.compute_dtype)
    vae = VAERunner(parts.vae, device=choice.device, dtype=parts.vae_dtype)
    text = TextRunner(
        parts.encoders, device=choice.device, digest=digest, zero_empty_negative=parts.zero_empty_negative
    )
    _check_fit(text, unet, vae, location)
    name = model_id or (profile.model_id if profile else location.stem if str(path) != EMBEDDED else EMBEDDED)
    used = profile or default_profile(family, name, str(path), parts, vae.factor)
    info = _describe(name, family, digest, schedule, used, parts, choice, unet, vae)
    logger.info("%s (%s, %s): %s", name, family, digest[:12], choice.reason)
    return DiffusionModel(info, schedule, parts.scheduler_config, text, unet, vae, choice, digest)


def _load_parts(location: Path, choice: DeviceChoice) -> LoadedParts:
    if location.is_dir():
        return load_directory(location, choice)
    refuse_pickle(location)
    if not location.exists():
        raise ModelNotFound(f"there is no model at {location}; give a diffusers directory or a .safetensors file.")
    if location.suffix != ".safetensors":
        raise ModelLoadError(f"{location} is neither a diffusers directory nor a .safetensors file.")
    raise ModelLoadError(f"{location}: single files come next")


def _noise_schedule(config: dict[str, Any], location: Path) -> NoiseSchedule:
    try:
        return NoiseSchedule.from_config(config)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(f"{location}: the scheduler's configuration cannot be used ({error}).") from error


def _check_fit(text: TextRunner, unet: UNetRunner, vae: VAERunner, location: Path) -> None:
    """Components that were trained apart are found out here rather than in the middle of a request."""
    config = unet.network.config
    width = sum(int(encoder.network.config.hidden_size) for encoder in text.encoders)
    if width != config.cross_attention_dim:
        raise ModelLoadError(
            f"{location}: the text encoder gives {width} features, the UNet reads {config.cross_attention_dim}."
        )
    if unet.latent_channels != vae.latent_channels:
        raise ModelLoadError(
            f"{location}: the VAE has {vae.latent_channels} latent channels, the UNet paints {unet.latent_channels}."
        )
    if unet.extra_channels not in (0, 1 + vae.latent_channels):
        raise ModelLoadError(
            f"{location}: the UNet reads {config.in_channels} channels; diffserve serves {vae.latent_channels} "
            f"(text to image) and {2 * vae.latent_channels + 1} (inpainting)."
        )
    if unet.has_size_conditioning != text.is_pair:
        raise ModelLoadError(
            f"{location}: size conditioning and a second text encoder come together (SDXL) or not at all."
        )


def _memory(encoders: list[Any], unet: Any, vae: Any) -> Iterator[MemoryEntry]:
    named = [(f"text_encoder{f'_{index + 1}' if index else ''}", part) for index, part in enumerate(encoders)]
    for name, network in [*named, ("unet", unet), ("vae", vae)]:
        parameters = list(network.parameters())
        yield MemoryEntry(name, sum(p.numel() for p in parameters), sum(map(tensor_bytes, parameters)))


def _describe(
    name: str,
    family: str,
    digest: str,
    schedule: NoiseSchedule,
    profile: ModelProfile,
    parts: LoadedParts,
    choice: DeviceChoice,
    unet: UNetRunner,
    vae: VAERunner,
) -> ModelInfo:
    memory = list(_memory([encoder.network for encoder in parts.encoders], parts.unet, parts.vae))
    native = default_profile(family, name, profile.path, parts, vae.factor)
    return ModelInfo(
        model_id=name,
        family=family,
        digest=digest[:12],
        prediction_type=schedule.prediction_type,
        vae_factor=vae.factor,
        latent_channels=vae.latent_channels,
        size_multiple_px=vae.factor,
        good_sizes=profile.good_sizes or native.good_sizes,
        max_side_px=profile.max_side_px,
        train_timesteps=len(schedule.alphas_cumprod),
        is_inpainting=unet.extra_channels > 0,
        default_sampler=profile.sampler,
        default_num_steps=profile.num_steps,
        default_guidance_scale=profile.guidance_scale,
        default_spacing=profile.spacing,
        device=str(choice.device),
        dtype=choice.dtype,
        choice_reason=choice.reason,
        num_parameters=sum(entry.num_parameters for entry in memory),
        weights_bytes=sum(entry.weights_bytes for entry in memory),
    )

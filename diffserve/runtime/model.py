"""Load a model and hold its parts: text encoders, UNet, VAE, noise schedule, and what is said about it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from diffserve.config import DTYPE_ALIASES
from diffserve.disk_cache import DiskCache
from diffserve.errors import ModelLoadError, ModelNotFound
from diffserve.fewest_steps import FewestSteps, read_fewest_steps
from diffserve.runtime.arithmetic import choose_for
from diffserve.runtime.calibration import CALIBRATION_EDITION, kept_or_measured, measure_ranges, prompts_of
from diffserve.runtime.loading.adapter import load_adapted, read_adapter
from diffserve.runtime.loading.checkpoint import digest_files, refuse_pickle
from diffserve.runtime.loading.directory import load_directory
from diffserve.runtime.loading.family import (
    BUILT_IN,
    EMBEDDED,
    default_profile,
    detect_family,
    location_of,
    native_size,
)
from diffserve.runtime.loading.formulation import noise_schedule
from diffserve.runtime.loading.plausibility import Plausibility, judge, kept_or_probed, predicts_velocity, probe
from diffserve.runtime.loading.single_file import load_single_file
from diffserve.runtime.loading.weight_loading import LoadedParts
from diffserve.runtime.memory import give_heap_back
from diffserve.runtime.precision import INT8_STATIC, TORCH_DTYPES, DeviceChoice, weights_bytes
from diffserve.runtime.quantisation import ONCE_A_PROMPT, THE_PIXELS, convert_static, describe_left, schemes
from diffserve.runtime.text.encoding import TextEncoderRunner
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.preview import PREVIEW_DIRECTORY, PreviewRunner, load_preview
from diffserve.runtime.vae.vae import Decoded, VAERunner
from diffserve.types import ModelInfo, ModelProfile
from diffserve.vocabulary import Vocabulary, knows_embedded_world, read_vocabulary
from schedulers import NoiseSchedule

logger = logging.getLogger(__name__)

VELOCITY_SAMPLE_SIZE: Final = 96  # SD 2 with v-prediction was trained at 768 pixels


class MemoryEntry(NamedTuple):
    """What one component holds."""

    component: str
    num_parameters: int
    weights_bytes: int


@dataclass(frozen=True)
class DiffusionModel:
    """A loaded model; its runners share nothing but the device.

    profile      defaults for requests, as given to :func:`load_model` or the family's own
    native_size  (width, height) in pixels that the UNet was trained at
    digest       sha256 over the weight files, an adapter's included, 64 hexadecimal digits
    world        what it knows, where that is a closed world
    fewest_steps  from how many steps on each sampler paints right, where that was measured
    plausibility  whether it answers as its files say, where that was tried
    previewer    the tiny decoder for live previews, where there is one; it changes no picture, so not the digest
    """

    model_id: str
    family: str
    profile: ModelProfile
    native_size: tuple[int, int]
    schedule: NoiseSchedule
    scheduler_config: dict[str, Any]
    text: TextEncoderRunner
    unet: UNetRunner
    vae: VAERunner
    choice: DeviceChoice
    digest: str
    previewer: PreviewRunner | None = None
    world: Vocabulary | None = None
    fewest_steps: FewestSteps | None = None
    plausibility: Plausibility | None = None

    def preview(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Small pictures (B, H, W, 3) of denoised estimates (B, C, h, w), by the previewer or else by the VAE."""
        return (self.previewer or self.vae).preview(latents)

    def preview_later(self, latents: torch.Tensor) -> Decoded:
        """The same without waiting for the device."""
        return (self.previewer or self.vae).preview_later(latents)

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
        named = [("text_encoder" if index == 0 else "text_encoder_2", part) for index, part in enumerate(encoders)]
        named += [("unet", self.unet.network), ("vae", self.vae.network)]
        named += [("preview", self.previewer.network)] if self.previewer else []
        report = []
        for name, network in named:
            num_parameters = sum(parameter.numel() for parameter in network.parameters())
            report.append(MemoryEntry(name, num_parameters, weights_bytes(network)))
        return report

    def left_in_full(self) -> list[str]:
        """Sentences about the layers that do not hold what ``choice.dtype`` asks for; none where nothing was asked."""
        asked = self.choice.unet_scheme
        if asked is None:
            return []
        said = [f"unet: {line}" for line in describe_left(self.unet.network, asked)]
        text = self.choice.text_scheme
        for index, encoder in enumerate(self.text.encoders):
            name = "text_encoder" if index == 0 else f"text_encoder_{index + 1}"
            if text is None:
                said.append(f"{name}: {ONCE_A_PROMPT}")
            else:
                said += [f"{name}: {line}" for line in describe_left(encoder.network, text)]
        return [*said, f"vae: {THE_PIXELS}"]

    @cached_property
    def info(self) -> ModelInfo:
        """What the CLI and the HTTP process are told."""
        memory = self.memory_report()
        return ModelInfo(
            model_id=self.model_id,
            family=self.family,
            digest=self.digest[:12],
            prediction_type=self.schedule.prediction_type,
            vae_factor=self.vae.factor,
            latent_channels=self.vae.latent_channels,
            size_multiple_px=self.vae.factor,
            good_sizes=self.profile.good_sizes or (self.native_size,),
            max_side_px=self.profile.max_side_px,
            train_timesteps=len(self.schedule.alphas_cumprod),
            is_inpainting=self.unet.extra_channels > 0,
            default_sampler=self.profile.sampler,
            default_num_steps=self.profile.num_steps,
            default_guidance_scale=self.profile.guidance_scale,
            default_spacing=self.profile.spacing,
            device=str(self.choice.device),
            dtype=self.choice.dtype,
            choice_reason=self.choice.reason,
            num_parameters=sum(entry.num_parameters for entry in memory),
            weights_bytes=sum(entry.weights_bytes for entry in memory),
            world=self.world,
            other_aspects=self.profile.other_aspects,
            fewest_steps=self.fewest_steps,
            shallow_share=None if self.unet.shallow is None else self.unet.shallow.share,
        )


def load_model(
    path: str | Path = EMBEDDED,
    *,
    dtype: str = "auto",
    device: str = "auto",
    offload: str = "none",
    model_id: str | None = None,
    profile: ModelProfile | None = None,
    cache: DiskCache | None = None,
) -> DiffusionModel:
    """Load ``path``: "embedded", "embedded-turbo", a diffusers directory, a directory with an adapter (see
    ``loading.adapter``), or a single safetensors file of SD 1.x, SD 2.x or SDXL.

    ``offload`` says where weights rest while their layer does not run: none (on the device), auto, cpu or disk.
    ``profile`` gives the defaults and good sizes (its own path, device and dtype are not read); without it the family's
    own are taken. ``cache`` keeps digests of large files, and what trials found, for the next start. Nothing is
    fetched from anywhere. On the device "meta" a model has shapes and no numbers (``runtime.dry_run``).

    Raises ModelNotFound when nothing is there, ModelLoadError when it cannot be used or answers as another kind than
    its files say, ConfigError for a wrong dtype or device.
    """
    choice = choose_for(path, device, dtype, offload, cache)
    if profile is not None:
        choice = replace(choice, vae_dtype=TORCH_DTYPES.get(DTYPE_ALIASES.get(profile.vae_dtype, profile.vae_dtype)))
    location = location_of(path)
    adapter = read_adapter(location)
    parts = load_adapted(adapter, choice) if adapter else _load_parts(location, choice)
    unet = UNetRunner(parts.unet, device=choice.device, dtype=choice.compute_dtype)
    vae = VAERunner(parts.vae, device=choice.device, dtype=parts.vae_dtype)
    is_hollow = choice.device.type == "meta"
    digest = "" if is_hollow else digest_files(parts.files, cache)
    digest = adapter.digest(digest, cache) if adapter and not is_hollow else digest
    text = TextEncoderRunner(
        parts.encoders, device=choice.device, digest=digest, zero_empty_negative=parts.zero_empty_negative
    )
    # where things about the model lie: its directory, an adapter's base, or a directory named as the single file
    home = adapter.base if adapter else location if location.is_dir() else location.with_suffix("")
    previewer = load_preview(home / PREVIEW_DIRECTORY, choice)
    _check_fit(text, unet, vae, previewer, location)
    scheduler_config = _settle_prediction(parts, unet, location)
    family = EMBEDDED if knows_embedded_world(home) else detect_family(unet.network.config, len(parts.encoders))
    native = native_size(unet.network.config, vae.factor)
    name = model_id or (profile.model_id if profile else str(path) if str(path) in BUILT_IN else location.stem)
    logger.info("%s is %s (%s): %s", name, family, digest[:12], choice.reason)
    if profile is None:
        profile = default_profile(
            family, model_id=name, path=str(path), native=native, scheduler_config=scheduler_config
        )
        profile = msgspec.structs.replace(profile, **adapter.spec.defaults) if adapter else profile
    schedule = noise_schedule(scheduler_config, location)
    plausibility = None
    if profile.probe and not is_hollow:
        key = f"{digest} {schedule.preconditioning} {choice.dtype} {choice.device.type}"
        plausibility = kept_or_probed(cache, key, partial(probe, unet, vae, text, schedule, native))
        judge(plausibility, location)
    world = read_vocabulary(home)
    if choice.unet_scheme == INT8_STATIC and not is_hollow:
        size_px = profile.good_sizes[0] if profile.good_sizes else native
        names = [name for name, one in schemes(unet.network, INT8_STATIC).items() if one == INT8_STATIC]
        measure = partial(measure_ranges, names, unet, text, schedule, prompts_of(world), size_px, vae.factor)
        key = f"{CALIBRATION_EDITION} {digest} {schedule.preconditioning} {choice.compute_dtype} {size_px}"
        ranges = kept_or_measured(cache, key, measure)
        give_heap_back()
        convert_static(unet.network, ranges)
        give_heap_back()
    model = DiffusionModel(
        model_id=name,
        family=family,
        profile=profile,
        native_size=native,
        schedule=schedule,
        scheduler_config=scheduler_config,
        text=text,
        unet=unet,
        vae=vae,
        choice=choice,
        digest=digest,
        previewer=previewer,
        world=world,
        fewest_steps=read_fewest_steps(location if adapter else home),
        plausibility=plausibility,
    )
    for line in [] if is_hollow else model.left_in_full():
        logger.info("not in %s: %s", choice.dtype, line)
    return model


def _load_parts(location: Path, choice: DeviceChoice) -> LoadedParts:
    if location.is_dir():
        return load_directory(location, choice)
    if not location.exists():
        raise ModelNotFound(f"there is no model at {location}; give a diffusers directory or a .safetensors file.")
    refuse_pickle(location)
    if location.suffix != ".safetensors":
        raise ModelLoadError(f"{location} is neither a diffusers directory nor a .safetensors file.")
    return load_single_file(location, choice)


def _settle_prediction(parts: LoadedParts, unet: UNetRunner, location: Path) -> dict[str, Any]:
    """The scheduler's configuration, its prediction type found out from the UNet where nothing on disk states it."""
    config = dict(parts.scheduler_config)
    if parts.guess_prediction and unet.device.type != "meta":
        velocity = predicts_velocity(unet, unet.network.config.cross_attention_dim)
        config["prediction_type"] = "v_prediction" if velocity else "epsilon"
        if velocity:
            unet.network.register_to_config(sample_size=VELOCITY_SAMPLE_SIZE)
        logger.warning(
            "%s does not say what its UNet predicts; asked with pure noise it behaves like %s",
            location,
            config["prediction_type"],
        )
    return config


def _check_fit(
    text: TextEncoderRunner, unet: UNetRunner, vae: VAERunner, previewer: PreviewRunner | None, location: Path
) -> None:
    """Components that were not trained together are found out here rather than in the middle of a request."""
    config = unet.network.config
    width = sum(int(encoder.network.config.hidden_size) for encoder in text.encoders)
    cells = vae.latent_channels
    if width != config.cross_attention_dim:
        problem = f"the text encoder gives {width} features, the UNet reads {config.cross_attention_dim}"
    elif unet.latent_channels != cells:
        problem = f"the VAE has {cells} latent channels, the UNet paints {unet.latent_channels}"
    elif unet.extra_channels not in (0, 1 + cells):
        served = f"{cells} (text to image) and {2 * cells + 1} (inpainting)"
        problem = f"the UNet reads {config.in_channels} channels; diffserve serves {served}"
    elif unet.has_size_conditioning != text.is_pair:
        problem = "size conditioning and a second text encoder come together (SDXL) or not at all"
    elif previewer is not None and previewer.latent_channels != cells:
        problem = f"its preview decoder reads {previewer.latent_channels} latent channels, the VAE has {cells}"
    else:
        return
    raise ModelLoadError(f"{location}: {problem}.")

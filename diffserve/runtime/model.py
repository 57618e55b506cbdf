"""Loading of a model, and its parts: text encoders, UNet, VAE, noise schedule and metadata."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from diffserve.api.errors import ConfigError, ModelLoadError, ModelNotFound
from diffserve.api.types import CHECKER, ModelInfo, ModelProfile
from diffserve.disk_cache import DiskCache
from diffserve.models.learned_samplers import OWN_SAMPLERS
from diffserve.models.model_files import refuse_pickle
from diffserve.models.profiles import find_few_step
from diffserve.models.vocabulary import (
    FewestSteps,
    Vocabulary,
    knows_embedded_world,
    read_fewest_steps,
    read_vocabulary,
)
from diffserve.runtime.auto_precision import choose_for
from diffserve.runtime.clip_scorer import ClipScorer
from diffserve.runtime.loading.checkpoint import digest_files
from diffserve.runtime.loading.components import ComponentOverrides, LoadedVAE
from diffserve.runtime.loading.directory import load_adapted, load_directory, read_adapter
from diffserve.runtime.loading.family import (
    BUILT_IN,
    EMBEDDED,
    default_profile,
    detect_family,
    location_of,
    native_size,
    noise_schedule,
)
from diffserve.runtime.loading.placement import with_spread
from diffserve.runtime.loading.plausibility import PLAUSIBILITY, Plausibility, judge, predicts_velocity, probe
from diffserve.runtime.loading.single_file import load_single_file
from diffserve.runtime.loading.weight_loading import LoadedParts
from diffserve.runtime.memory import give_heap_back
from diffserve.runtime.model_checks import check_latents, check_noise, check_parts, share_encoders
from diffserve.runtime.precision import INT8_STATIC, TORCH_DTYPES, DeviceChoice, weights_bytes
from diffserve.runtime.quantization import (
    CALIBRATION_EDITION,
    INPUT_RANGES,
    ONCE_A_PROMPT,
    THE_PIXELS,
    convert_static,
    describe_unquantized,
    measure_ranges,
    prompts_of,
    schemes,
)
from diffserve.runtime.quantized_layers import InputRange
from diffserve.runtime.text.encoding import TextEncoder, TextEncoderRunner
from diffserve.runtime.text.learnt_words import read_words, teach
from diffserve.runtime.text.transferred_encodings import NO_ENCODINGS
from diffserve.runtime.unet.unet import UNetRunner
from diffserve.runtime.vae.preview import PREVIEW_DIRECTORY, PreviewRunner, load_preview
from diffserve.runtime.vae.vae import Decoded, VAERunner
from diffserve.settings.config import DTYPE_ALIASES
from schedulers import NoiseSchedule

logger = logging.getLogger(__name__)

ADDITIONAL_MODELS: Final = ("refiner", "scorer")
"""Prefixes of the components of other models that are loaded with a model."""

VELOCITY_SAMPLE_SIZE: Final = 96  # SD 2 with v-prediction was trained at 768 pixels


class MemoryEntry(NamedTuple):
    """Parameters and memory of one component."""

    component: str
    num_parameters: int
    weights_bytes: int


OWN_LORAS: Final = "loras"
"""Folder in a model's directory with its own adapters."""


@dataclass(frozen=True)
class DiffusionModel:
    """A loaded model; its runners share nothing but the device.

    Attributes:
        profile: Defaults for requests, as given to :func:`load_model` or the family's own.
        native_size: (width, height) in pixels that the UNet was trained at.
        digest: sha256 of the weight files, an adapter's included, 64 hexadecimal digits.
        previewer: Small decoder for live previews; not part of the digest, because it does not affect images.
        own_loras: The folder of adapters among its files; empty without one.
        own_samplers: The folder of learned samplers among its files; empty without one.
        world: Its vocabulary, if it knows a closed world.
        fewest_steps: Measured number of steps that each sampler needs.
        plausibility: Result of the plausibility check, if it was made.
        part_digests: Digests of text encoders and VAE by component, if several models are loaded.
        refiner: A model that can take over for the last steps, with this one's VAE.
        scorer: A CLIP model that selects images.
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
    own_loras: str = ""
    own_samplers: str = ""
    world: Vocabulary | None = None
    fewest_steps: FewestSteps | None = None
    plausibility: Plausibility | None = None
    part_digests: Mapping[str, str] = field(default_factory=dict)
    refiner: DiffusionModel | None = None
    scorer: ClipScorer | None = None

    @property
    def encoder_names(self) -> tuple[str, ...]:
        """Component names of the text encoders."""
        return ("text_encoder", "text_encoder_2")[: len(self.text.encoders)]

    def preview(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Return small images (B, H, W, 3) of denoised estimates (B, C, h, w), by the previewer or else by the VAE."""
        decoded = self.preview_later(latents)
        return np.stack([decoded.picture(row) for row in range(len(latents))])

    def preview_later(self, latents: torch.Tensor) -> Decoded:
        """Start ``preview`` without waiting for the device."""
        return (self.previewer or self.vae).preview_later(latents)

    @property
    def lora_dirs(self) -> tuple[str, ...]:
        """Folders of adapters, the user's before the model's own."""
        return tuple(folder for folder in (self.profile.lora_dir, self.own_loras) if folder)

    @property
    def text_width(self) -> int:
        """Numbers of each prompt token that the UNet reads."""
        return int(self.unet.network.config.cross_attention_dim)

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        return self.choice.device

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the networks."""
        return self.choice.compute_dtype

    @property
    def sampler_dirs(self) -> tuple[str, ...]:
        """Folders of learned samplers, the user's before the model's own."""
        return tuple(folder for folder in (self.profile.sampler_dir, self.own_samplers) if folder)

    def memory_report(self) -> list[MemoryEntry]:
        """Return parameters and bytes of each component, for ``diffserve doctor``; shared ones count for the base."""
        networks = self._networks()
        shared = {id(network) for _, network in networks}
        if self.refiner is not None:
            further = self.refiner._networks()
            networks += [(f"refiner {name}", network) for name, network in further if id(network) not in shared]
        report = []
        for name, network in networks:
            num_parameters = sum(parameter.numel() for parameter in network.parameters())
            is_here = not any(part in name for part in self.choice.hollow)
            report.append(MemoryEntry(name, num_parameters, weights_bytes(network) * is_here))
        return report

    def _networks(self) -> list[tuple[str, Any]]:
        """Return its own networks with their component names."""
        networks = list(zip(self.encoder_names, (encoder.network for encoder in self.text.encoders), strict=True))
        networks += [("unet", self.unet.network), ("vae", self.vae.network)]
        networks += [("preview", self.previewer.network)] if self.previewer else []
        return networks + ([("scorer", self.scorer.network)] if self.scorer else [])

    def unquantized_layers(self) -> list[str]:
        """Return sentences about the layers that are not quantized as configured; none without quantization."""
        scheme = self.choice.unet_scheme
        if scheme is None:
            return []
        lines = [f"unet: {line}" for line in describe_unquantized(self.unet.network, scheme)]
        text = self.choice.text_scheme
        for name, encoder in zip(self.encoder_names, self.text.encoders, strict=True):
            if text is None:
                lines.append(f"{name}: {ONCE_A_PROMPT}")
            else:
                lines += [f"{name}: {line}" for line in describe_unquantized(encoder.network, text)]
        return [*lines, f"vae: {THE_PIXELS}"]

    @property
    def _shallow_share(self) -> float | None:
        parts = [model.unet.shallow for model in (self, self.refiner) if model is not None]
        return None if parts[0] is None or None in parts else parts[0].share

    @cached_property
    def info(self) -> ModelInfo:
        """Metadata for the CLI and the HTTP process."""
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
            num_parameters=sum(
                entry.num_parameters for entry in memory if not entry.component.startswith(ADDITIONAL_MODELS)
            ),
            weights_bytes=sum(entry.weights_bytes for entry in memory),
            world=self.world,
            other_aspects=self.profile.other_aspects,
            fewest_steps=self.fewest_steps,
            shallow_share=self._shallow_share,
            has_size_conditioning=self.unet.has_size_conditioning,
            text_width=self.text_width,
            most_clip_skip=min(model.text.most_clip_skip for model in (self, self.refiner) if model is not None),
            embeds_guidance=self.unet.guidance_dim > 0,
            learnt_words=self.text.learnt_words,
            refused_words=self.text.refused_words,
            lora_dirs=self.lora_dirs,
            sampler_dirs=self.sampler_dirs,
            quality_profile=self.profile.quality_profile,
            controlnet_dir=self.profile.controlnet_dir,
            reference_dir=self.profile.reference_dir,
            wildcard_dir=self.profile.wildcard_dir,
            upscaler_dir=self.profile.upscaler_dir,
            refiner="" if self.refiner is None else f"{self.refiner.model_id} [{self.refiner.digest[:10]}]",
            scorer=self.profile.scorer if self.scorer is None else self.scorer.name,
        )


def load_model(
    path: str | Path = EMBEDDED,
    *,
    dtype: str = "auto",
    device: str = "auto",
    offload: str = "none",
    device_map: str = "none",
    model_id: str | None = None,
    profile: ModelProfile | None = None,
    cache: DiskCache | None = None,
    refines: DiffusionModel | None = None,
    hollow: Collection[str] = (),
) -> DiffusionModel:
    """Load a model from disk; nothing is downloaded.

    Args:
        path: "embedded", "embedded-turbo", a diffusers directory, a directory with an adapter (see
            ``loading.directory``), or a single safetensors file of SD 1.x, SD 2.x or SDXL.
        dtype: Precision, or "auto".
        device: Device, or "auto"; on "meta" a model has shapes and no values (``runtime.dry_run``).
        offload: Where weights are stored while their layer does not run: none (on the device), auto, cpu or disk.
        device_map: Distribution over all devices of that kind: none, auto or balanced (see ``loading.placement``).
        model_id: Name of the model; by default that of the profile or the path.
        profile: Defaults, good sizes, and paths of other components and of a refiner (its own path, device and dtype
            are not read); by default the family's.
        cache: Stores digests of large files and results of measurements for the next start.
        refines: Load the model as the refiner of this one.
        hollow: Parts that another process runs (see ``DeviceChoice``); such a model is not checked for plausibility.

    Raises:
        ModelNotFound: There is no model at ``path``.
        ModelLoadError: The model cannot be used, or its outputs contradict its files.
        ConfigError: The dtype or device is not valid.
    """
    cache = cache or DiskCache(None)
    choice = replace(choose_for(path, device, dtype, offload, cache), hollow=frozenset(hollow))
    if device_map != "none" and choice.device.type != "meta":
        outline = load_model(path, dtype=choice.dtype, device="meta", profile=profile)
        choice = with_spread(choice, outline.memory_report(), device_map)
    if profile is not None:
        choice = replace(choice, vae_dtype=TORCH_DTYPES.get(DTYPE_ALIASES.get(profile.vae_dtype, profile.vae_dtype)))
    location = location_of(path)
    adapter = read_adapter(location)
    loaded_vae = None if refines is None else LoadedVAE(refines.vae.network, refines.vae.dtype, [])
    overrides = ComponentOverrides.of(profile) if loaded_vae is None else ComponentOverrides(loaded_vae=loaded_vae)
    parts = load_adapted(adapter, choice, overrides) if adapter else _load_parts(location, choice, overrides)
    unet = UNetRunner(
        parts.unet,
        device=choice.device,
        dtype=choice.compute_dtype,
        is_hollow="unet" in choice.hollow,
        is_split=bool(choice.spread) and not choice.is_unet_whole,
    )
    vae_device = choice.device if choice.spread is None else choice.of("vae").device
    vae = VAERunner(parts.vae, device=vae_device, dtype=parts.vae_dtype)
    is_hollow = choice.device.type == "meta"
    label = "" if refines is None else "refiner"  # distinguishes pages of a base and its refiner
    digest = label if is_hollow else digest_files(parts.files, cache)
    digest = adapter.digest(digest, cache) if adapter and not is_hollow else digest
    encoders = share_encoders(parts.encoders, refines.text.encoders) if refines else _taught(parts.encoders, profile)
    text = TextEncoderRunner(
        encoders,
        device=choice.device,
        digest=digest,
        num_time_ids=_num_time_ids(unet, encoders),
        zero_empty_negative=parts.zero_empty_negative,
    )
    if "text" in choice.hollow:
        text.encodings = NO_ENCODINGS
    # the folder of further files: the model's directory, an adapter's base, or a directory named as the single file
    home = adapter.base if adapter else location if location.is_dir() else location.with_suffix("")
    previewer = None if refines else load_preview(home / PREVIEW_DIRECTORY, choice)
    if refines is not None:
        check_latents(location, unet, refines.unet)
    check_parts(text, unet, vae, previewer, location)
    scheduler_config = _settle_prediction(parts, unet, location)
    family = EMBEDDED if knows_embedded_world(home) else detect_family(unet.network.config)
    native = native_size(unet.network.config, vae.factor)
    own_name = str(path) if str(path) in BUILT_IN else location.stem
    name = model_id or (profile.model_id if profile and not refines else own_name)
    logger.info("%s is %s (%s): %s", name, family, digest[:12], choice.reason)
    few_step = find_few_step(location)
    if profile is None:
        profile = default_profile(
            family, model_id=name, path=str(path), native=native, scheduler_config=scheduler_config
        )
        defaults_of_files = (few_step.entries if few_step else {}) | (adapter.spec.defaults if adapter else {})
        profile = msgspec.structs.replace(profile, **defaults_of_files)
    if few_step:
        logger.info("%s is a few-step model (%s), recognized by %s", name, few_step.kind, few_step.reason)
        defaults = profile.sampler, profile.num_steps, profile.spacing, profile.guidance_scale
        logger.info("%s: defaults are sampler %s, steps %d, spacing %s, guidance %g", name, *defaults)
    schedule = noise_schedule(scheduler_config, location)
    if refines is not None:
        check_noise(location, schedule, refines.schedule)
    plausibility = None
    if profile.probe and not (is_hollow or hollow or text.has_score):  # a refiner never met much noise
        key = f"{digest} {schedule.preconditioning} {choice.dtype} {choice.device.type}"
        run_probe = partial(probe, unet, vae, text, schedule, native)
        plausibility = cache.read_or_compute(PLAUSIBILITY, key, Plausibility, run_probe)
        judge(plausibility, location)
    world = read_vocabulary(home)
    if choice.unet_scheme == INT8_STATIC and hollow:
        raise ConfigError(f"{INT8_STATIC} is calibrated with all of a model; choose another dtype for remote stages.")
    if choice.unet_scheme == INT8_STATIC and not is_hollow:
        size_px = profile.good_sizes[0] if profile.good_sizes else native
        names = [name for name, scheme in schemes(unet.network, INT8_STATIC).items() if scheme == INT8_STATIC]
        measure = partial(measure_ranges, names, unet, text, schedule, prompts_of(world), size_px, vae.factor)
        key = f"{CALIBRATION_EDITION} {digest} {schedule.preconditioning} {choice.compute_dtype} {size_px}"
        ranges = cache.read_or_compute(INPUT_RANGES, key, dict[str, InputRange], measure)
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
        own_loras=str(home / OWN_LORAS) if (home / OWN_LORAS).is_dir() else "",
        own_samplers=str(home / OWN_SAMPLERS) if (home / OWN_SAMPLERS).is_dir() else "",
        world=world and world.learning(text.learnt_words),
        fewest_steps=read_fewest_steps(location if adapter else home),
        plausibility=plausibility,
        scorer=None if refines else _scorer(profile, choice, world, location),
    )
    for line in [] if is_hollow or hollow else model.unquantized_layers():
        logger.info("not in %s: %s", choice.dtype, line)
    if profile.refiner and refines is None:
        refiner = load_model(
            profile.refiner,
            dtype=choice.dtype,
            device=str(choice.device),
            offload=offload,
            profile=profile,
            cache=cache,
            refines=model,
            hollow=hollow,
        )
        model = replace(model, refiner=refiner)
    return model


def _scorer(profile: ModelProfile, choice: DeviceChoice, world: Vocabulary | None, location: Path) -> ClipScorer | None:
    """Load the model that ``profile`` names to select images; ``None`` without one, or if the checker selects."""
    if profile.scorer == CHECKER and world is None:
        raise ModelLoadError(
            f"{location}: the {CHECKER} only scores images of the embedded model; "
            "name the directory of a CLIP model (model.scorer)."
        )
    return ClipScorer.load(profile.scorer, choice) if profile.scorer not in ("", CHECKER) else None


def _num_time_ids(unet: UNetRunner, encoders: Sequence[TextEncoder]) -> int:
    """Return how many size values ``unet`` reads in addition to the pooled vector of the last encoder."""
    if not unet.has_size_conditioning:
        return 0
    config, pooled = unet.network.config, int(encoders[-1].network.config.projection_dim)
    return (int(config.projection_class_embeddings_input_dim) - pooled) // int(config.addition_time_embed_dim)


def _taught(encoders: Sequence[TextEncoder], profile: ModelProfile | None) -> list[TextEncoder]:
    """Return ``encoders`` with the learned words of the profile's folder, if it names one."""
    if profile is None or not profile.embeddings_dir:
        return list(encoders)
    widths = [int(encoder.network.config.hidden_size) for encoder in encoders]
    words = read_words(Path(profile.embeddings_dir).expanduser(), widths)
    return [
        encoder._replace(learnt=teach(encoder.network, words, place, encoder.special.end)) if words else encoder
        for place, encoder in enumerate(encoders)
    ]


def _load_parts(location: Path, choice: DeviceChoice, overrides: ComponentOverrides) -> LoadedParts:
    if location.is_dir():
        return load_directory(location, choice, overrides)
    if not location.exists():
        raise ModelNotFound(f"there is no model at {location}; give a diffusers directory or a .safetensors file.")
    refuse_pickle(location)
    if location.suffix != ".safetensors":
        raise ModelLoadError(f"{location} is neither a diffusers directory nor a .safetensors file.")
    return load_single_file(location, choice, overrides)


def _settle_prediction(parts: LoadedParts, unet: UNetRunner, location: Path) -> dict[str, Any]:
    """Return the scheduler's configuration; an unknown prediction type is determined by a call of the UNet."""
    config = dict(parts.scheduler_config)
    if parts.guess_prediction and not unet.is_hollow and unet.device.type != "meta":
        velocity = predicts_velocity(unet, unet.network.config.cross_attention_dim)
        config["prediction_type"] = "v_prediction" if velocity else "epsilon"
        if velocity:
            unet.network.register_to_config(sample_size=VELOCITY_SAMPLE_SIZE)
        logger.warning(
            "%s does not say what its UNet predicts; its output for pure noise looks like %s",
            location,
            config["prediction_type"],
        )
    return config

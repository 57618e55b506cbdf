"""Model families: built-in models, default settings, native sizes, and noise schedules from configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from diffserve.api.errors import ModelLoadError
from diffserve.api.types import AUTO_SPACING, ModelProfile
from diffserve.models.learned_samplers import OWN_SAMPLERS, LearnedSamplers
from diffserve.models.model_files import model_path, read_json
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.runtime.loading.checkpoint import Checkpoint
from schedulers import NoiseSchedule
from schedulers.formulations import is_edm

SD1, SD2, SDXL, EMBEDDED = "sd1", "sd2", "sdxl", "embedded"
REFINER: Final = "sdxl-refiner"  # a layout of single files; loaded, it is of SDXL's family
EMBEDDED_TURBO: Final = "embedded-turbo"
#: The models that ship inside -> their directories.
BUILT_IN: Final[Mapping[str, Path]] = {
    EMBEDDED: EMBEDDED_DIRECTORY,
    EMBEDDED_TURBO: EMBEDDED_DIRECTORY.with_name("turbo"),
}
SD2_TEXT_WIDTH: Final = 1024

#: Family -> (steps, guidance scale). The built-in configuration files say more; this is for a bare ``load_model``.
DEFAULTS: Final = {SD1: (25, 7.5), SD2: (25, 7.5), SDXL: (25, 6.0), EMBEDDED: (25, 3.0)}


def location_of(path: str | Path) -> Path:
    """Return the location of the model ``path``: a built-in one, or a place on disk, which need not exist."""
    return BUILT_IN.get(str(path)) or model_path(path)


def learned_samplers_of(path: str | Path, sampler_dir: str = "") -> LearnedSamplers:
    """Return the learned samplers of a model that is not loaded; whether they fit its weights is not known yet."""
    return LearnedSamplers(filter(None, (sampler_dir, str(location_of(path) / OWN_SAMPLERS))))


def detect_family(unet_config: Any) -> str:
    """Return sdxl for size conditioning, sd2 for linear projections or OpenCLIP's width, else sd1."""
    if unet_config.addition_embed_type is not None:
        return SDXL
    is_sd2 = unet_config.use_linear_projection or unet_config.cross_attention_dim == SD2_TEXT_WIDTH
    return SD2 if is_sd2 else SD1


def native_size(unet_config: Any, vae_factor: int) -> tuple[int, int]:
    """Return (width, height) in pixels that the UNet was trained at."""
    sample_size = unet_config.sample_size or 64
    height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
    return int(width) * vae_factor, int(height) * vae_factor


def default_profile(
    family: str, *, model_id: str, path: str, native: tuple[int, int], scheduler_config: dict[str, Any]
) -> ModelProfile:
    """Return the family's defaults, with the spacing in the model's scheduler configuration, if it has one."""
    num_steps, guidance_scale = DEFAULTS[family]
    return ModelProfile(
        model_id=model_id,
        path=path,
        device="auto",
        dtype="auto",
        sampler="dpmpp_2m",
        num_steps=num_steps,
        guidance_scale=guidance_scale,
        spacing=str(scheduler_config.get("timestep_spacing") or AUTO_SPACING),
        good_sizes=(native,),
        max_side_px=2 * max(native),
    )


SCHEDULER_FILE: Final = "scheduler/scheduler_config.json"
PLAYGROUND_SCALING_FACTOR: Final = 0.5
EDM_TENSORS: Final = ("edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min")


def read_scheduler(directory: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheduler's configuration of a diffusers directory; ``index`` gives its class if it has none.

    Raises ModelLoadError for an unsupported formulation, and if the two files name different ones.
    """
    file = directory / SCHEDULER_FILE
    config = read_json(file)
    class_name = (index.get("scheduler") or [None, None])[1]
    if class_name is not None:
        config.setdefault("_class_name", class_name)
    noise_schedule(config, file)
    if class_name is not None:
        noise_schedule({"_class_name": class_name}, directory / "model_index.json")
        if is_edm(config) != is_edm({"_class_name": class_name}):
            raise ModelLoadError(
                f"{file} says {config['_class_name']}, model_index.json says {class_name}; one of them describes "
                "another model: correct it."
            )
    return config


def noise_schedule(config: Mapping[str, Any], where: Path) -> NoiseSchedule:
    """Return the schedule that ``config`` describes. Raises ModelLoadError, with ``where``, if it is not supported."""
    try:
        return NoiseSchedule.from_config(config)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(f"{where}: the scheduler's configuration cannot be used ({error})") from error


def edm_scheduler(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the scheduler of a single file with EDM's tensors, ``None`` without them.

    ``edm_vpred.sigma_max`` marks CosXL's velocity (sigma_data 1), ``edm_mean`` and ``edm_std`` Playground 2.5.
    """
    tensors = [key for key in EDM_TENSORS if key in checkpoint]
    if not tensors:
        return None
    if "edm_vpred.sigma_max" in checkpoint:
        return {
            "_class_name": "EDMEulerScheduler",
            "prediction_type": "v_prediction",
            "sigma_data": 1.0,
            "sigma_max": _number(checkpoint, "edm_vpred.sigma_max"),
            "sigma_min": _number(checkpoint, "edm_vpred.sigma_min") if "edm_vpred.sigma_min" in checkpoint else 0.002,
            "sigma_schedule": "exponential",
        }
    if not {"edm_mean", "edm_std"} <= set(tensors):
        raise ModelLoadError(
            f"{checkpoint.where()} holds {tensors[0]} alone; edm_mean and edm_std come together (Playground 2.5), "
            "edm_vpred.sigma_min with edm_vpred.sigma_max (CosXL)."
        )
    return {
        "_class_name": "EDMDPMSolverMultistepScheduler",
        "prediction_type": "epsilon",
        "sigma_data": 0.5,
        "sigma_max": 80.0,
        "sigma_min": 0.002,
        "sigma_schedule": "karras",
    }


def edm_normalization(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the VAE's configuration entries from ``edm_mean`` and ``edm_std``; none without these."""
    if "edm_mean" not in checkpoint or "edm_std" not in checkpoint:
        return {}
    return {
        "latents_mean": checkpoint.read("edm_mean").double().flatten().tolist(),
        "latents_std": checkpoint.read("edm_std").double().flatten().tolist(),
        "scaling_factor": PLAYGROUND_SCALING_FACTOR,
    }


def _number(checkpoint: Checkpoint, key: str) -> float:
    tensor = checkpoint.read(key)
    if tensor.numel() != 1:
        raise ModelLoadError(f"{key} of {checkpoint.where()} has shape {tuple(tensor.shape)}; it holds one number.")
    return float(tensor)

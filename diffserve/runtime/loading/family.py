"""Model families, and their defaults for models without a profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from diffserve.api.types import AUTO_SPACING, ModelProfile
from diffserve.models.model_files import model_path
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY

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

"""Which family a model belongs to, and how each is best used when no profile says so."""

from __future__ import annotations

from typing import Final

from diffserve.runtime.directory import LoadedParts
from diffserve.types import ModelProfile

SD1, SD2, SDXL = "sd1", "sd2", "sdxl"
SD2_TEXT_WIDTH = 1024

#: Family -> (steps, guidance scale). "embedded" has its own file in configs/; this is for a bare ``load_model``.
DEFAULTS: Final = {SD1: (25, 7.5), SD2: (25, 7.5), SDXL: (25, 6.0), "embedded": (25, 3.0)}


def detect_family(parts: LoadedParts) -> str:
    """ "sdxl" for two text encoders, "sd2" for linear projections or OpenCLIP's width, else "sd1"."""
    if len(parts.encoders) == 2:
        return SDXL
    config = parts.unet.config
    return SD2 if config.use_linear_projection or config.cross_attention_dim == SD2_TEXT_WIDTH else SD1


def default_profile(family: str, model_id: str, path: str, parts: LoadedParts, vae_factor: int) -> ModelProfile:
    """The family's defaults; the native size is the one the UNet was trained at."""
    num_steps, guidance_scale = DEFAULTS[family]
    sample_size = parts.unet.config.sample_size or 64
    height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
    native = (width * vae_factor, height * vae_factor)
    spacing = parts.scheduler_config.get("timestep_spacing", "leading")
    return ModelProfile(
        model_id=model_id,
        path=path,
        device="auto",
        dtype="auto",
        sampler="dpmpp_2m",
        num_steps=num_steps,
        guidance_scale=guidance_scale,
        spacing=spacing if spacing in ("leading", "trailing", "linspace") else "leading",
        good_sizes=(native,),
        max_side_px=2 * max(native),
    )

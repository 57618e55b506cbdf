"""What the loaded models can do, for those who build a page or a tool on the API: in ``GET /v1/models``."""

from __future__ import annotations

from typing import Any

import msgspec

from diffserve.config import ServeConfig
from diffserve.quality import quality_steps
from diffserve.service.texts.rewriter_choice import styles
from diffserve.text_types import LanguageModelInfo
from diffserve.types import MAX_IMAGES, ModelInfo
from schedulers import SAMPLERS, SIGMA_SCHEDULES, Sampler, resolve_sampler


def capabilities_of(
    info: ModelInfo, language: LanguageModelInfo | None, config: ServeConfig
) -> dict[str, dict[str, Any]]:
    """By the name of each loaded model, ``{"image": ...}`` or ``{"language": ...}``."""
    found = {info.model_id: {"image": image_capabilities(info, config)}}
    if language is not None:
        found.setdefault(language.model_id, {})["language"] = language_capabilities(language)
    return found


def image_capabilities(info: ModelInfo, config: ServeConfig) -> dict[str, Any]:
    """Sizes are [width, height] in pixels, the native one first."""
    sampler, sigma_schedule = resolve_sampler(info.default_sampler)
    return {
        "family": info.family,
        "digest": info.digest,
        "device": info.device,
        "dtype": info.dtype,
        "samplers": [_sampler(choice) for choice in SAMPLERS.values()],
        "sigma_schedules": list(SIGMA_SCHEDULES),
        "sizes": [list(size) for size in info.good_sizes],
        "min_side_px": config.min_size_px,
        "max_side_px": config.max_size_px,
        "quality_steps": quality_steps(info),
        "default_sampler": sampler,
        "default_sigma_schedule": sigma_schedule,
        "default_num_steps": info.default_num_steps,
        "default_guidance_scale": info.default_guidance_scale,
        "default_spacing": info.default_spacing,
        "train_timesteps": info.train_timesteps,
        "max_images": MAX_IMAGES,
        "world": msgspec.to_builtins(info.world),
    }


def language_capabilities(info: LanguageModelInfo) -> dict[str, Any]:
    """A model without a chat template writes texts, but no prompts."""
    return {
        "architecture": info.architecture,
        "digest": info.digest,
        "device": info.device,
        "dtype": info.dtype,
        "context_tokens": info.context_tokens,
        "styles": list(styles()),
        "can_rewrite": info.has_chat_template,
    }


def _sampler(sampler: Sampler) -> dict[str, Any]:
    return {
        "name": sampler.name,
        "label": sampler.label,
        "summary": sampler.summary,
        "takes_eta": sampler.takes_eta,
        "is_stochastic": sampler.stochastic,
        "evaluations_per_step": sampler.evaluations_per_step,
    }

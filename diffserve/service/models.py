"""Model names: the loaded models under their own ids, and those that clients have written into their code; and what the
models can do, for those who build a page or a tool on the API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from diffserve.config import ServeConfig
from diffserve.errors import EngineUnavailable, ModelNotFound
from diffserve.quality import quality_steps
from diffserve.service.http.bodies import show
from diffserve.service.texts.schemas import styles
from diffserve.text_types import LanguageModelInfo
from diffserve.types import MAX_IMAGES, ModelInfo
from schedulers import SAMPLERS, SIGMA_SCHEDULES, Sampler, resolve_sampler

ALIASES: Final = (
    "dall-e-2",
    "dall-e-3",
    "gpt-image-1",
    "gpt-image-1-mini",
    "gpt-image-1.5",
    "gpt-image-2",
    "chatgpt-image-latest",
)
"""The names that are listed; every ``gpt-image-...`` is one."""

_ALIAS: Final = re.compile(r"gpt-image-[A-Za-z0-9][A-Za-z0-9._\-]{0,63}")
URL_BY_DEFAULT: Final = frozenset({"dall-e-2", "dall-e-3"})
"""Whoever asks for these without a ``response_format`` expects URLs."""


NO_LANGUAGE_MODEL: Final = (
    "no language model is loaded; name one as [text] model in the configuration, or as DIFFSERVE_TEXT_MODEL: "
    '"embedded" is the rewriter that ships inside.'
)


def is_alias(name: str) -> bool:
    """Whether ``name`` is one that clients have written into their code for whatever paints."""
    return name in ALIASES or _ALIAS.fullmatch(name) is not None


def check_model(name: str | None, info: ModelInfo, language: LanguageModelInfo | None = None) -> None:
    """ModelNotFound where ``name`` is neither the loaded image model nor an alias; ``None`` is the loaded model."""
    if name is None or name == info.model_id or is_alias(name):
        return
    writes = language is not None and name == language.model_id
    raise ModelNotFound(
        f"{show(name)} writes texts; the image model is {info.model_id}."
        if writes
        else f"there is no model {show(name)}; {info.model_id} is loaded, GET /v1/models lists its names.",
        param="model",
    )


def check_language_model(
    name: str | None, info: LanguageModelInfo | None, image_info: ModelInfo | None
) -> LanguageModelInfo:
    """The loaded language model, which ``name`` (``None``: whichever is there) must be. Raises ModelNotFound where
    there is none or it is another, EngineUnavailable while the engine (``image_info``) is loading."""
    if image_info is None:
        raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
    if info is None:
        raise ModelNotFound(NO_LANGUAGE_MODEL, param="model")
    if name is None or name == info.model_id:
        return info
    paints = name == image_info.model_id or is_alias(name)
    raise ModelNotFound(
        f"{show(name)} paints pictures; the language model is {info.model_id}."
        if paints
        else f"there is no language model {show(name)}; {info.model_id} is loaded.",
        param="model",
    )


def model_entry(name: str, created: int, capabilities: dict[str, Any] | None = None) -> dict[str, Any]:
    """A model as OpenAI describes one, and what it can do; ``created`` in seconds since 1970."""
    entry = {"id": name, "object": "model", "created": created, "owned_by": "diffserve"}
    return entry if capabilities is None else entry | {"capabilities": capabilities}


def model_names(info: ModelInfo, language: LanguageModelInfo | None) -> list[str]:
    """The image model first, then the language model where there is one, then the aliases of the image model."""
    return list(dict.fromkeys([info.model_id, *([language.model_id] if language else []), *ALIASES]))


def model_list(
    info: ModelInfo, language: LanguageModelInfo | None, created: int, capabilities: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Every name, as OpenAI lists models; ``capabilities`` by the name of the model that has them."""
    names = model_names(info, language)
    return {"object": "list", "data": [model_entry(name, created, capabilities.get(name)) for name in names]}


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
        **{name: getattr(info, name) for name in ("family", "digest", "device", "dtype")},
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
    own = ("architecture", "digest", "device", "dtype", "context_tokens")
    told = {name: getattr(info, name) for name in own}
    return told | {"styles": list(styles()), "can_rewrite": info.has_chat_template}


def _sampler(sampler: Sampler) -> dict[str, Any]:
    told = {name: getattr(sampler, name) for name in ("name", "label", "summary", "takes_eta")}
    return told | {"is_stochastic": sampler.stochastic, "evaluations_per_step": sampler.evaluations_per_step}

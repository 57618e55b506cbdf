"""Model names and aliases, and ``GET /v1/capabilities``: models, fields with bounds, limits and price."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from diffserve.api.errors import EngineUnavailable, ModelLoadError, ModelNotFound
from diffserve.api.json_schemas import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH
from diffserve.api.prompt_syntax import SYNTAXES
from diffserve.api.sampling_params import COUNTS, NUMBERS
from diffserve.api.text_types import LanguageModelInfo
from diffserve.api.types import MAX_IMAGES, ModelInfo, ServedModel
from diffserve.media.images import MEDIA_TYPES
from diffserve.media.provenance import header_of
from diffserve.models.controlnets import ControlNetFolder
from diffserve.models.learned_samplers import LearnedSamplers
from diffserve.models.loras import LoraFolders
from diffserve.models.references import ReferenceFolder
from diffserve.models.templates import Wildcards
from diffserve.models.upscalers import UpscalerFolders, default_upscaler
from diffserve.service.endpoint import Capability
from diffserve.service.http.bodies import MAX_JSON_DEPTH, Body, show
from diffserve.service.http.openapi import REFS
from diffserve.service.texts.schemas import Format, SamplingBody, styles
from diffserve.settings.config import ServeConfig
from diffserve.settings.quality import QUALITIES, quality_points, quality_steps
from diffserve.settings.quality_profile import QualityPoint
from diffserve.version import __version__
from schedulers import SAMPLERS, SIGMA_SCHEDULES, SPACINGS, Sampler, resolve_sampler
from schedulers.learned import LearnedSampler

ALIASES: Final = (
    "dall-e-2",
    "dall-e-3",
    "gpt-image-1",
    "gpt-image-1-mini",
    "gpt-image-1.5",
    "gpt-image-2",
    "chatgpt-image-latest",
)
"""Aliases in the list of models; every ``gpt-image-...`` name is accepted."""

Kind = Literal["image", "text", "embedding"]
_REST: Final = r"[A-Za-z0-9][A-Za-z0-9._\-]{0,63}"
_FOREIGN: Final[dict[Kind, re.Pattern[str]]] = {
    "image": re.compile(rf"dall-e-[23]|chatgpt-image-latest|gpt-image-{_REST}"),
    "text": re.compile(rf"(?:chat)?gpt-(?=[0-9]){_REST}|o[1-9](?:-{_REST})?"),
    "embedding": re.compile(rf"text-embedding-{_REST}"),
}
"""Patterns of OpenAI's model names by kind; such a name selects the default model of this kind."""

URL_BY_DEFAULT: Final = frozenset({"dall-e-2", "dall-e-3"})
"""Models whose clients expect URLs if there is no ``response_format``."""


NO_LANGUAGE_MODEL: Final = (
    "no language model is loaded; set [text] model in the configuration, or DIFFSERVE_TEXT_MODEL "
    '("embedded" is the included rewriter).'
)


def is_alias(name: str, kind: Kind = "image") -> bool:
    """Return whether ``name`` is one of OpenAI's names for models of ``kind``."""
    return _FOREIGN[kind].fullmatch(name) is not None


def find_model(
    name: str | None,
    models: Sequence[ServedModel],
    language: LanguageModelInfo | None = None,
    *,
    kind: Literal["image", "embedding"] = "image",
) -> ModelInfo:
    """Return the image model with this name; an alias or None means the first one.

    Raises:
        ModelNotFound: No model has this name.
        ModelLoadError: The model's files cannot be read.
        EngineUnavailable: The engine is still loading.
    """
    if not models:
        raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
    served = {model.name: model for model in models}
    is_first = name is None or (name not in served and is_alias(name, kind))
    entries = models[0] if is_first else served.get(name or "")
    if entries is None:
        several, writes = len(models) > 1, language is not None and name == language.model_id
        names = ", ".join(served)
        raise ModelNotFound(
            f"{show(name)} is a language model; the image model{'s are' if several else ' is'} {names}."
            if writes
            else f"there is no model {show(name)}; {names} {'are served' if several else 'is loaded'}, "
            f"GET /v1/models lists {'all' if several else 'its'} names.",
            param="model",
        )
    if entries.info is None:
        raise ModelLoadError(entries.problem, param="model")
    return entries.info


def check_language_model(
    name: str | None, info: LanguageModelInfo | None, models: Sequence[ServedModel]
) -> LanguageModelInfo:
    """Return the loaded language model if ``name`` is its name, an alias or None.

    Raises:
        ModelNotFound: There is no language model, or ``name`` is another one.
        EngineUnavailable: The engine is still loading.
    """
    if not models:
        raise EngineUnavailable("the engine is loading its model; please try again in a moment.")
    if info is None:
        raise ModelNotFound(NO_LANGUAGE_MODEL, param="model")
    paints = any(model.name == name for model in models)
    if name is None or name == info.model_id or (is_alias(name, "text") and not paints):
        return info
    paints = paints or is_alias(name)
    raise ModelNotFound(
        f"{show(name)} is an image model; the language model is {info.model_id}."
        if paints
        else f"there is no language model {show(name)}; {info.model_id} is loaded.",
        param="model",
    )


def model_entry(name: str, created: int, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return OpenAI's object for a model with the additional ``fields``; ``created`` in seconds since 1970."""
    return {"id": name, "object": "model", "created": created, "owned_by": "diffserve", **(fields or {})}


def model_list(created: int, models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return OpenAI's list of models: the loaded models in order, then the aliases."""
    names = dict.fromkeys([*models, *ALIASES])
    return {"object": "list", "data": [model_entry(name, created, models.get(name)) for name in names]}


def describe_models(
    offers: Mapping[str, Offer],
    models: Sequence[ServedModel],
    language: LanguageModelInfo | None,
    config: ServeConfig,
) -> dict[str, dict[str, Any]]:
    """Return, by model name, its capabilities, whether it is loaded, why it cannot be, and its endpoints."""
    entries: dict[str, dict[str, Any]] = {model.name: {"loaded": model.is_loaded} for model in models}
    for model in models:
        entries[model.name] |= {"problem": model.problem} if model.problem else {}
        if model.unet_paths or model.records_graphs:
            entries[model.name]["unet_calls"] = unet_calls(model)
    if language is not None:
        entries.setdefault(language.model_id, {"loaded": True})
    for name, capabilities in capabilities_of(models, language, config).items():
        entries[name]["capabilities"] = capabilities
    kinds: dict[str, list[Capability]] = {model.name: ["image"] for model in models}
    if language is not None:
        can: list[Capability] = ["text", "chat"] if language.has_chat_template else ["text"]
        kinds[language.model_id] = kinds.get(language.model_id, []) + can
    for name, entry in entries.items():
        entry["endpoints"] = [path for path, offer in offers.items() if offer.asks in kinds[name]]
    return entries


def unet_calls(model: ServedModel) -> dict[str, Any]:
    """Describe how the UNet of ``model`` is called: path and reason by shape, sizes in pixels."""
    shapes = [
        {
            "width": path.width_px,
            "height": path.height_px,
            "prompt_tokens": path.num_tokens,
            "lora_rank": path.lora_rank,
            "path": path.path,
            "reason": path.reason,
        }
        for path in model.unet_paths
    ]
    return {"shapes": shapes, "cuda_graphs": model.records_graphs}


def capabilities_of(
    models: Sequence[ServedModel], language: LanguageModelInfo | None, config: ServeConfig
) -> dict[str, dict[str, Any]]:
    """Return ``{"image": ...}`` or ``{"language": ...}`` by model name."""
    entries = {
        model.name: {"image": image_capabilities(model.info, config, keeps_latents=model.keeps_latents)}
        for model in models
        if model.info is not None
    }
    if language is not None:
        entries.setdefault(language.model_id, {})["language"] = language_capabilities(language)
    return entries


def image_capabilities(info: ModelInfo, config: ServeConfig, *, keeps_latents: bool = False) -> dict[str, Any]:
    """Describe an image model; sizes are [width, height] in pixels, the native one first."""
    sampler, sigma_schedule = resolve_sampler(info.default_sampler)
    loras = LoraFolders(info.lora_dirs, info.text_width)
    controlnets = ControlNetFolder(info.controlnet_dir, info.dtype, info.text_width)
    references = ReferenceFolder(info.reference_dir, info.dtype, info.text_width)
    upscalers = UpscalerFolders(info.upscaler_dir)
    return {
        **{name: getattr(info, name) for name in ("family", "digest", "device", "dtype")},
        "samplers": [*map(_sampler, SAMPLERS.values()), *map(_learned, LearnedSamplers.of(info).usable().values())],
        "sigma_schedules": list(SIGMA_SCHEDULES),
        "sizes": [list(size) for size in info.good_sizes],
        "min_side_px": config.min_size_px,
        "max_side_px": config.max_size_px,
        "quality_steps": quality_steps(info),
        "quality_points": {name: _point(point) for name, point in quality_points(info).items()},
        "default_sampler": sampler,
        "default_sigma_schedule": sigma_schedule,
        "default_num_steps": info.default_num_steps,
        "default_guidance_scale": info.default_guidance_scale,
        "default_spacing": info.default_spacing,
        "train_timesteps": info.train_timesteps,
        "max_images": MAX_IMAGES,
        "learnt_words": list(info.learnt_words),
        "refused_words": info.refused_words,
        "world": msgspec.to_builtins(info.world),
        "loras": list(loras.names()),
        "refused_loras": loras.refused(),
        "controlnets": list(controlnets.names()),
        "refused_controlnets": controlnets.refused(),
        "references": list(references.names()),
        "refused_references": references.refused(),
        "wildcards": Wildcards(info.wildcard_dir).names(),
        "upscalers": list(upscalers.names()),
        "default_upscaler": default_upscaler(info.upscaler_dir, has_world=info.world is not None),
        "refused_upscalers": upscalers.refused(),
        "refiner": info.refiner,
        "scorer": info.scorer,
        "safety_filter": config.safety_filter,
        "provenance": header_of(config).split(";"),
        "refused_fields": refused_fields(info, keeps_latents=keeps_latents),
    }


def refused_fields(info: ModelInfo, *, keeps_latents: bool) -> list[str]:
    """Return the fields that requests to this model must leave out."""
    takes = {
        "cache_interval": info.shallow_share is not None,
        "similarity_threshold": keeps_latents and not info.is_inpainting,
        "clip_skip": info.most_clip_skip > 1,
        "micro_conditioning": info.has_size_conditioning,
        "refiner": bool(info.refiner),
        "switch_at": bool(info.refiner),
        "best_of": bool(info.scorer),
    }
    return [name for name, is_taken in takes.items() if not is_taken]


def language_capabilities(info: LanguageModelInfo) -> dict[str, Any]:
    """Describe a language model; one without a chat template cannot rewrite prompts."""
    names = ("architecture", "digest", "device", "dtype", "context_tokens")
    fields = {name: getattr(info, name) for name in names}
    formats = get_args(Format.model_fields["type"].annotation) if info.speaks_json else ("text",)
    can = {"can_rewrite": info.has_chat_template, "response_formats": list(formats)}
    return fields | {"styles": list(styles()), **can}


def _sampler(sampler: Sampler) -> dict[str, Any]:
    fields = {name: getattr(sampler, name) for name in ("name", "label", "summary", "takes_eta")}
    return fields | {"is_stochastic": sampler.stochastic, "evaluations_per_step": sampler.evaluations_per_step}


def _point(point: QualityPoint) -> dict[str, Any]:
    fields = msgspec.structs.asdict(point)
    return {"num_inference_steps": fields.pop("num_steps"), **fields}


def _learned(sampler: LearnedSampler) -> dict[str, Any]:
    steps = f"{sampler.num_rows} steps, learned at guidance scale {sampler.guidance_scale:g}"
    names = {"name": sampler.sampler, "label": sampler.sampler, "summary": steps, "takes_eta": False}
    return names | {"is_stochastic": False, "evaluations_per_step": 1, "num_steps": sampler.num_rows}


OF_A_REQUEST: Final = ("max_body_bytes", "request_timeout_s", "max_backlog_s", "min_size_px", "max_size_px")
"""Settings in the answer that limit requests."""


class Offer(NamedTuple):
    """Endpoint: the kind of model that it needs, and its body."""

    asks: Capability
    body: type[Body]


def capabilities(
    created: int,
    offers: Mapping[str, Offer],
    models: Sequence[ServedModel],
    language: LanguageModelInfo | None,
    config: ServeConfig,
) -> dict[str, Any]:
    """Return the response; ``offers`` are by path."""
    models_by_name = describe_models(offers, models, language, config)
    price = config.price
    return {
        "object": "capabilities",
        "version": __version__,
        "models": [model_entry(name, created, item) for name, item in models_by_name.items()],
        "aliases": list(ALIASES),
        "endpoints": {path: {"asks": offer.asks, "fields": fields_of(offer.body)} for path, offer in offers.items()},
        "output_formats": list(MEDIA_TYPES),
        "prompt_syntaxes": list(SYNTAXES),
        "qualities": list(QUALITIES),
        "spacings": list(SPACINGS),
        "limits": {
            **{name: getattr(config, name) for name in OF_A_REQUEST},
            "max_json_depth": MAX_JSON_DEPTH,
            "max_schema_chars": MAX_SCHEMA_CHARS,
            "max_schema_depth": MAX_SCHEMA_DEPTH,
        },
        "price": None if price is None else {"per_hour": price.per_hour, "currency": price.currency},
    }


@cache
def fields_of(body: type[Body]) -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of each field of ``body``, including the bounds of the sampling parameters."""
    schema = body.model_json_schema(ref_template=REFS)
    required = schema.get("required", ())
    fields = {name: _field(stated) | {"required": name in required} for name, stated in schema["properties"].items()}
    for name, (low, high, _) in (NUMBERS | COUNTS).items():
        if issubclass(body, SamplingBody) and fields.get(name, {}).get("type") in ("integer", "number"):
            fields[name] = {"minimum": low, "maximum": high} | fields[name]
    return fields


def _field(stated: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema without its title, default and null alternative."""
    schema = {key: value for key, value in stated.items() if key not in ("title", "default", "anyOf")}
    kinds = [kind for kind in stated.get("anyOf", ()) if kind.get("type") != "null"]
    return schema | kinds[0] if len(kinds) == 1 else schema | ({"anyOf": kinds} if kinds else {})

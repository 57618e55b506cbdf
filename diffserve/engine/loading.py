"""Load the models of an engine as configured, create their shared page pool, and warm up."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from diffserve.api.errors import ConfigError, DiffserveError, ModelLoadError, ModelNotFound
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import TextRequest
from diffserve.api.types import ModelProfile
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.compiled_groups import is_deterministic
from diffserve.engine.image.engine import Engine
from diffserve.engine.image.engines import ImageEngines
from diffserve.engine.image.model_loading import Loader, ModelEntry, Survey
from diffserve.engine.image.room import format_bytes
from diffserve.engine.image.runner import LEAST_ROWS
from diffserve.engine.rewriter import Rewriter
from diffserve.engine.stages import HOLLOW
from diffserve.engine.text import TextEngine
from diffserve.engine.text.engine import draft_tenant
from diffserve.rewriting import TextWindow, find_rewriter, style_for_family
from diffserve.runtime import DiffusionModel, choose_for, load_model
from diffserve.runtime.footprint import footprint_of
from diffserve.runtime.kv import PagePool
from diffserve.runtime.language import LanguageModel, load_language_model
from diffserve.runtime.text.conditioning import image_tenants, make_pool
from diffserve.runtime.weight_sharing import sharing, with_digests
from diffserve.settings.config import AUTO_STYLE, EngineConfig, TextSettings

EMBEDDED: Final = "embedded"
EMBEDDED_ID: Final = "embedded-rewriter"
"""Model id of the embedded rewriter; the id "embedded" is that of the image model."""

TENANT: Final = "llm"

WARM_TOKENS: Final = (64, 16, 1)
"""Prompt lengths of the calls that measure costs at start."""

logger = logging.getLogger(__name__)

Parts = tuple[ImageEngines, TextEngine | None, Rewriter | None]


def load_parts(
    profile: ModelProfile,
    config: EngineConfig,
    text: TextSettings,
    other_models: Sequence[ModelProfile] = (),
    *,
    unload_after_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Parts:
    """Load an engine, a text engine if a language model is configured, and a rewriter if that model supports it.

    ``other_models`` are loaded on request. Errors in them are reported to requests that name them.

    Raises:
        ModelNotFound, ModelLoadError, ConfigError: The first model or the language model cannot be loaded.
    """
    cache = DiskCache.at(config.cache_dir)
    if config.stage == "decode":
        config = msgspec.structs.replace(config, cross_attention="plain")  # no texts, and no pool for them
    if config.stage in ("denoise", "decode"):
        text = msgspec.structs.replace(text, model="", draft_model="")
    model = load_for(profile, config, cache)
    languages = load_languages(text, str(model.device), cache, config.offload)
    model = with_digests(model) if other_models and config.stage == "all" else model
    served = [survey_or_problem(other, config, cache, clock) for other in other_models]
    surveys = [model_entry.survey for model_entry in served if model_entry.survey]
    pool = shared_pool(model, languages, config, text, surveys) if languages or surveys else None
    engine = Engine(model, config, profile=profile, pool=pool, clock=clock)
    has_loader = bool(served) or unload_after_s > 0.0
    engines = ImageEngines(
        engine,
        served,
        loader=make_loader(config, cache) if has_loader else None,
        unload_after_s=unload_after_s,
        clock=clock,
    )
    if not languages:
        return engines, None, None
    draft = languages[1] if len(languages) > 1 else None
    assert pool is not None
    texts = TextEngine(languages[0], pool, text, draft_model=draft, clock=clock, tenant=TENANT)
    return engines, texts, make_rewriter(texts, model, text)


def load_for(profile: ModelProfile, config: EngineConfig, cache: DiskCache) -> DiffusionModel:
    """Load the parts of the model of ``profile`` that this stage needs. Raises the errors of ``load_model``."""
    dtype, device, offload = profile.dtype, profile.device, config.offload
    return load_model(
        profile.path,
        dtype=dtype,
        device=device,
        offload=offload,
        device_map=config.device_map,
        profile=profile,
        cache=cache,
        hollow=HOLLOW[config.stage],
    )


def make_loader(config: EngineConfig, cache: DiskCache) -> Loader:
    """Return the loader of further models, which are read as the first one."""

    def load(profile: ModelProfile, loaded: Sequence[DiffusionModel]) -> DiffusionModel:
        model = load_for(profile, config, cache)
        return model if config.stage != "all" else sharing(with_digests(model), loaded)

    return Loader(partial(survey, config=config, cache=cache), load)


def survey(profile: ModelProfile, config: EngineConfig, cache: DiskCache) -> Survey:
    """Determine info and memory needs of the model of ``profile`` by a dry run. Raises the errors of ``load_model``."""
    choice = choose_for(profile.path, profile.device, profile.dtype, config.offload, cache)
    footprint = footprint_of(profile.path, dtype=choice.dtype, config=config, profile=profile, rows=(LEAST_ROWS,))
    model, is_paged = footprint.model, config.cross_attention == "paged"
    placement = {"device": str(choice.device), "dtype": choice.dtype, "choice_reason": choice.reason}
    return Survey(
        info=msgspec.structs.replace(model.info, **placement),
        needs_bytes=footprint.peak_bytes - footprint.page_pool_bytes,
        specs=tuple(itertools.chain(*image_tenants(model, is_exact=True))) if is_paged else (),
        window_tokens=model.text.window_tokens,
    )


def survey_or_problem(
    profile: ModelProfile, config: EngineConfig, cache: DiskCache, clock: Callable[[], float]
) -> ModelEntry:
    """Survey a model that is loaded on request; an error is logged and stored for requests that name the model."""
    try:
        model_survey = survey(profile, config, cache)
    except DiffserveError as error:
        logger.warning("%s cannot be loaded: %s", profile.model_id, error.message)
        load_error = ModelLoadError(error.message.replace(profile.path, profile.model_id))
        return ModelEntry(profile, error=load_error, failed_s=clock())
    logger.info(
        "%s is loaded on the first request; it takes %s", profile.model_id, format_bytes(model_survey.needs_bytes)
    )
    return ModelEntry(profile, survey=model_survey, info=model_survey.info)


def load_languages(
    text: TextSettings, device: str, cache: DiskCache | None = None, offload: str = "none"
) -> list[LanguageModel]:
    """Load the language model and its draft model, if configured.

    Returns no models, with a warning, if the embedded language model is missing. Raises ModelNotFound if a configured
    directory does not exist.
    """
    if not text.model:
        return []
    try:
        directory = find_rewriter(text.model)
    except ModelNotFound as error:
        if text.model != EMBEDDED:
            raise
        logger.warning("no language model is loaded: %s", error.message)
        return []
    model_id = EMBEDDED_ID if text.model == EMBEDDED else None
    load = partial(load_language_model, dtype=text.dtype, device=device, offload=offload, cache=cache)
    models = [load(directory, model_id=model_id)]
    if text.draft_model:
        models.append(load(find_rewriter(text.draft_model)))
    return models


def shared_pool(
    model: DiffusionModel,
    languages: Sequence[LanguageModel],
    config: EngineConfig,
    text: TextSettings,
    other_surveys: Sequence[Survey] = (),
) -> PagePool:
    """Create one page pool for all models, with pages that also suit ``other_surveys``, which are loaded later."""
    names = (TENANT, draft_tenant(TENANT))
    texts = [
        language.spec(name, page_tokens=text.page_tokens) for language, name in zip(languages, names, strict=False)
    ]
    further = [(other.specs, other.window_tokens) for other in other_surveys]
    is_exact = is_deterministic(model, config)
    return make_pool(
        model, config, is_exact=is_exact, texts=texts, max_sequences=text.max_sequences, other_tenants=further
    )


def make_rewriter(texts: TextEngine, model: DiffusionModel, text: TextSettings) -> Rewriter | None:
    """Create a rewriter for ``model``, or warn and return ``None`` if the language model has no chat template."""
    if not texts.info.has_chat_template:
        logger.warning("%s has no chat template: it can continue texts, but not rewrite prompts", texts.info.model_id)
        return None
    auto = text.rewriter_style == AUTO_STYLE
    style = style_for_family(model.family) if auto else text.rewriter_style
    try:
        window, entropy = TextWindow.of(model.text), text.rewriter_entropy
        return Rewriter(texts, style=style, window=window, max_entropy=entropy, follows=auto)
    except DiffserveError as error:  # an unknown style
        raise ConfigError(f"text.rewriter_style: {error.message}", param="rewriter_style") from None


def warm_up(texts: TextEngine | None, rewriter: Rewriter | None) -> None:
    """Make a first call of every length, and a rewrite. Errors are logged, as images may still work."""
    if texts is None:
        return
    try:
        for num_tokens in WARM_TOKENS:
            request = TextRequest(
                token_ids=(0,) * num_tokens,
                params=SamplingParams(temperature=0.0, max_tokens=4, min_tokens=4),
                cache_salt=b"warm-up",
            )
            texts.generate([request])
        if rewriter is not None:
            rewriter.rewrite("an image")
    except DiffserveError as error:
        logger.warning("the language model did not warm up: %s", error.message)

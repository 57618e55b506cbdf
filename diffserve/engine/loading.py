"""What a studio is made of: models loaded as the settings say, one page pool for all of them, everything warm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from diffserve.config import AUTO_STYLE, EngineConfig, TextSettings
from diffserve.disk_cache import DiskCache
from diffserve.engine.image.engine import Engine
from diffserve.engine.image.shape_groups import is_deterministic
from diffserve.engine.rewriter import Rewriter
from diffserve.engine.text import TextEngine
from diffserve.engine.text.engine import draft_tenant
from diffserve.errors import ConfigError, DiffserveError, ModelNotFound
from diffserve.rewriting import TextWindow, find_rewriter, style_for_family
from diffserve.runtime import DiffusionModel, load_model
from diffserve.runtime.kv import PagePool
from diffserve.runtime.language import LanguageModel, load_language_model
from diffserve.runtime.text.conditioning import image_specs, wanted_bytes
from diffserve.sampling_params import SamplingParams
from diffserve.text_types import TextRequest
from diffserve.types import ModelProfile

EMBEDDED: Final = "embedded"
EMBEDDED_ID: Final = "embedded-rewriter"
"""What the rewriter that ships inside is called; "embedded" is the image model."""

TENANT: Final = "llm"

WARM_TOKENS: Final = (64, 16, 1)
"""Lengths of the prompts that teach what a call costs."""

logger = logging.getLogger(__name__)

Parts = tuple[Engine, TextEngine | None, Rewriter | None]


def load_parts(
    profile: ModelProfile,
    config: EngineConfig,
    text: TextSettings,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Parts:
    """An engine, and a text engine and a rewriter where there is a language model that can.

    Raises ModelNotFound, ModelLoadError or ConfigError.
    """
    cache = DiskCache.at(config.cache_dir)
    device, offload = profile.device, config.offload
    model = load_model(profile.path, dtype=profile.dtype, device=device, offload=offload, profile=profile, cache=cache)
    languages = load_languages(text, str(model.device), cache, offload)
    if not languages:
        return Engine(model, config, profile=profile, clock=clock), None, None
    pool = make_pool(model, languages, config, text)
    draft = languages[1] if len(languages) > 1 else None
    texts = TextEngine(languages[0], pool, text, draft_model=draft, clock=clock, tenant=TENANT)
    engine = Engine(model, config, profile=profile, pool=pool, clock=clock)
    return engine, texts, make_rewriter(texts, model, text)


def load_languages(
    text: TextSettings, device: str, cache: DiskCache | None = None, offload: str = "none"
) -> list[LanguageModel]:
    """The language model and its draft model, as far as they are named; none, with a warning, where the embedded one
    was not shipped. Raises ModelNotFound for a directory that is not there."""
    if not text.model:
        return []
    try:
        directory = find_rewriter(text.model)
    except ModelNotFound as error:
        if text.model != EMBEDDED:
            raise
        logger.warning("there will be no language model: %s", error.message)
        return []
    model_id = EMBEDDED_ID if text.model == EMBEDDED else None
    load = partial(load_language_model, dtype=text.dtype, device=device, offload=offload, cache=cache)
    found = [load(directory, model_id=model_id)]
    if text.draft_model:
        found.append(load(find_rewriter(text.draft_model)))
    return found


def make_pool(
    model: DiffusionModel, languages: Sequence[LanguageModel], config: EngineConfig, text: TextSettings
) -> PagePool:
    """One pool for everybody, of ``config.kv_pool_bytes`` or of what each would like to have."""
    names = (TENANT, draft_tenant(TENANT))
    texts = [
        language.spec(name, page_tokens=text.page_tokens) for language, name in zip(languages, names, strict=False)
    ]
    images = (
        list(image_specs(model, is_exact=is_deterministic(model, config))) if config.cross_attention == "paged" else []
    )
    num_bytes = config.kv_pool_bytes or wanted_bytes(images, texts, model.text.window_tokens, text.max_sequences)
    return PagePool.for_specs(num_bytes, [*images, *texts], device=model.device)


def make_rewriter(texts: TextEngine, model: DiffusionModel, text: TextSettings) -> Rewriter | None:
    """A rewriter for ``model``; None, with a warning, where the language model was not trained on instructions."""
    if not texts.info.has_chat_template:
        logger.warning("%s has no chat template: it continues texts, prompts are not rewritten", texts.info.model_id)
        return None
    auto = text.rewriter_style == AUTO_STYLE
    style = style_for_family(model.family) if auto else text.rewriter_style
    try:
        return Rewriter(texts, style=style, window=TextWindow.of(model.text), max_entropy=text.rewriter_entropy)
    except DiffserveError as error:  # a style that is not there
        raise ConfigError(f"text.rewriter_style: {error.message}", param="rewriter_style") from None


def warm_up(texts: TextEngine | None, rewriter: Rewriter | None) -> None:
    """First calls of every length, and a rewrite. What goes wrong is logged: images may still be painted."""
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
            rewriter.rewrite("a picture")
    except DiffserveError as error:
        logger.warning("the language model did not warm up: %s", error.message)

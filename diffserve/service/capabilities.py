"""``GET /v1/capabilities``: fields with bounds, models with endpoints, limits and price, derived from the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from diffserve.api.json_schemas import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH
from diffserve.api.prompt_syntax import SYNTAXES
from diffserve.api.sampling_params import COUNTS, NUMBERS
from diffserve.api.text_types import LanguageModelInfo
from diffserve.api.types import ServedModel
from diffserve.media.images import MEDIA_TYPES
from diffserve.service.endpoint import Capability
from diffserve.service.http.bodies import MAX_JSON_DEPTH, Body
from diffserve.service.http.openapi import REFS
from diffserve.service.models import ALIASES, model_entry, told_of
from diffserve.service.texts.schemas import SamplingBody
from diffserve.settings.config import ServeConfig
from diffserve.settings.quality import QUALITIES
from diffserve.version import __version__
from schedulers import SPACINGS

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
    models_by_name = models_told(offers, models, language, config)
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


def models_told(
    offers: Mapping[str, Offer],
    models: Sequence[ServedModel],
    language: LanguageModelInfo | None,
    config: ServeConfig,
) -> dict[str, dict[str, Any]]:
    """Return what ``told_of`` returns for each model, with the ``endpoints`` that it serves."""
    kinds: dict[str, list[Capability]] = {model.name: ["image"] for model in models}
    if language is not None:
        can: list[Capability] = ["text", "chat"] if language.has_chat_template else ["text"]
        kinds[language.model_id] = kinds.get(language.model_id, []) + can
    return {
        name: item | {"endpoints": [path for path, offer in offers.items() if offer.asks in kinds[name]]}
        for name, item in told_of(models, language, config).items()
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

"""``GET /v1/capabilities``: what a server takes, told from what checks it: each endpoint's fields with their bounds,
the models with the endpoints they answer, what bounds a request as a whole, and the price.
"""

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
from diffserve.service.models import ALIASES, model_entry, told_of
from diffserve.service.texts.schemas import SamplingBody
from diffserve.settings.config import ServeConfig
from diffserve.settings.quality import QUALITIES
from diffserve.version import __version__
from schedulers import SPACINGS

REFS: Final = "#/components/schemas/{model}"
"""Where ``/openapi.json`` keeps what a field refers to."""

OF_A_REQUEST: Final = ("max_body_bytes", "request_timeout_s", "max_backlog_s", "min_size_px", "max_size_px")
"""Settings that a client should know of."""


class Offer(NamedTuple):
    """An endpoint: which kind of model it asks, and what it takes."""

    asks: Capability
    body: type[Body]


def capabilities(
    created: int,
    offers: Mapping[str, Offer],
    models: Sequence[ServedModel],
    language: LanguageModelInfo | None,
    config: ServeConfig,
) -> dict[str, Any]:
    """All of it. ``offers``: by path."""
    told = models_told(offers, models, language, config)
    price = config.price
    return {
        "object": "capabilities",
        "version": __version__,
        "models": [model_entry(name, created, one) for name, one in told.items()],
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
    """By the name of each model what ``told_of`` says, and the ``endpoints`` that it answers."""
    kinds: dict[str, list[Capability]] = {model.name: ["image"] for model in models}
    if language is not None:
        can: list[Capability] = ["text", "chat"] if language.has_chat_template else ["text"]
        kinds[language.model_id] = kinds.get(language.model_id, []) + can
    return {
        name: one | {"endpoints": [path for path, offer in offers.items() if offer.asks in kinds[name]]}
        for name, one in told_of(models, language, config).items()
    }


@cache
def fields_of(body: type[Body]) -> dict[str, dict[str, Any]]:
    """Each field of ``body`` as JSON Schema has it, by what the body itself and the sampling parameters are checked."""
    schema = body.model_json_schema(ref_template=REFS)
    required = schema.get("required", ())
    found = {name: _field(stated) | {"required": name in required} for name, stated in schema["properties"].items()}
    for name, (low, high, _) in (NUMBERS | COUNTS).items():
        if issubclass(body, SamplingBody) and found.get(name, {}).get("type") in ("integer", "number"):
            found[name] = {"minimum": low, "maximum": high} | found[name]
    return found


def _field(stated: dict[str, Any]) -> dict[str, Any]:
    """Without what every field has: a title, null as another way to say nothing, and that as the default."""
    own = {key: value for key, value in stated.items() if key not in ("title", "default", "anyOf")}
    kinds = [kind for kind in stated.get("anyOf", ()) if kind.get("type") != "null"]
    return own | kinds[0] if len(kinds) == 1 else own | ({"anyOf": kinds} if kinds else {})

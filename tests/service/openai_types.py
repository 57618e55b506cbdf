"""Strict reading of answers with the types of the ``openai`` package: unknown and missing fields are errors."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec
from jsonschema import Draft202012Validator, ValidationError
from pydantic import TypeAdapter

from diffserve.client import CompletedImage, ImageFile, Images, Model, PartialImage, TextUsage
from diffserve.client.recipe import ImageUsage, Recipe
from diffserve.client.responses import PaintedPicture
from diffserve.service.images.schemas import GenerateBody

REQUIRED: Final[dict[str, frozenset[str]]] = {
    "Response": frozenset(
        {
            *("background", "completed_at", "error", "frequency_penalty", "incomplete_details", "instructions"),
            *("max_output_tokens", "max_tool_calls", "metadata", "presence_penalty", "previous_response_id"),
            *("prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "status", "store", "temperature"),
            *("text", "top_logprobs", "top_p", "truncation", "usage", "user"),
        }
    ),
    "ResponseOutputText": frozenset({"logprobs"}),
    "Logprob": frozenset({"bytes"}),
    "LogprobTopLogprob": frozenset({"bytes"}),
    "ChatCompletionMessage": frozenset({"annotations"}),
}
"""Fields that OpenAI's specification 2.3.0 requires and that the package's types make optional or do not have, by the
name of the type."""


def _names(*kinds: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for kind in kinds for field in msgspec.structs.fields(kind))


MESSAGE: Final = frozenset({"images", "revised_prompt", "seed", "variation_seed"})
TEXT: Final = frozenset({"timings", "warnings"})
OURS: Final[dict[str, frozenset[str]]] = {
    "Response": TEXT | {"frequency_penalty", "presence_penalty", "store"},
    "ImageGeneration": frozenset(GenerateBody.model_fields),
    "ImageGenerationCall": _names(PaintedPicture, Recipe, ImageFile),
    "ToolUsageImageGen": _names(ImageUsage),
    "ChatCompletionMessage": MESSAGE,
    "ChoiceDelta": MESSAGE,
    "Logprob": frozenset({"bytes"}),
    "LogprobTopLogprob": frozenset({"bytes"}),
    "CompletionUsage": _names(TextUsage, ImageUsage),
    "Usage": _names(ImageUsage),
    "ChatCompletion": TEXT,
    "Completion": TEXT,
    "CreateEmbeddingResponse": frozenset({"warnings"}),
    "Model": _names(Model) | {"unet_calls"},
    "ImagesResponse": _names(Images),
    "Image": _names(ImageFile),
    "ImageGenPartialImageEvent": _names(PartialImage),
    "ImageEditPartialImageEvent": _names(PartialImage),
    "ImageGenCompletedEvent": _names(CompletedImage),
    "ImageEditCompletedEvent": _names(CompletedImage),
}
"""Fields of this server beyond the package's types: those that ``diffserve.client`` reads, by the name of the type."""


def problems_of(answer: object, kind: Any) -> list[str]:
    """Return what is wrong with ``answer``, which was read from JSON, as an object of the type ``kind``."""
    return [problem for error in _validator(kind).iter_errors(answer) for problem in _leaves(error)]


def _leaves(error: ValidationError) -> list[str]:
    """Return the innermost causes of ``error``; for a union, those of the member that fits best."""
    if not error.context:
        return [f"{error.json_path}: {error.message[:300]}"]
    members: dict[Any, list[str]] = {}
    for cause in error.context:
        members.setdefault(cause.schema_path[0], []).extend(_leaves(cause))
    return min(members.values(), key=lambda causes: (any("was expected" in cause for cause in causes), len(causes)))


@cache
def _validator(kind: Any) -> Draft202012Validator:
    schema = TypeAdapter(kind).json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part["properties"] |= dict.fromkeys(OURS.get(part["title"], ()), True)
            part["required"] = sorted({*part.get("required", ()), *REQUIRED.get(part["title"], ())})
            part["additionalProperties"] = False
    return Draft202012Validator(schema)

"""What may stand in the body of ``POST /v1/images/generations``, and what is said when something else does.

Strict about values (``"2"``, ``1.5`` and ``true`` are no whole numbers), lenient about fields: what OpenAI's clients
send and this server cannot use is taken and ignored, unknown fields are named in a warning, and fields that would
change the picture in a way that is not supported are refused.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diffserve.errors import InvalidRequest
from diffserve.types import MAX_GUIDANCE, MAX_IMAGES, MAX_PROMPT_CHARS, MAX_SEED

MAX_STEPS = 1000
MAX_JSON_DEPTH = 32
MAX_NAME_CHARS = 64

REFUSED: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "latents", "kwargs", "extra_body"),
        "tensors and raw pipeline arguments are not taken over HTTP.",
    ),
    **dict.fromkeys(
        ("image", "images", "init_image", "init_images", "mask", "strength", "denoising_strength"),
        "this endpoint paints from text alone.",
    ),
    **dict.fromkeys(("callback_url", "webhook", "webhook_url"), "the server calls nobody back; wait for the answer."),
}

Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Field(ge=0.0, le=MAX_GUIDANCE)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Label = Annotated[str, Field(max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]
Ignored = Annotated[str, Field(max_length=256, description="Taken for compatibility; changes nothing.")]


class GenerateBody(BaseModel):
    """OpenAI's fields, and beside them the ones that self-hosted servers agree on."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, title="CreateImageRequest")

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
    model: Annotated[str, Field(description="A name from /v1/models; omitted: the loaded model.")] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES, description="Image i has seed + i.")] | None = None
    size: Annotated[str, Field(description="WIDTHxHEIGHT in pixels, or auto.")] | None = None
    quality: Ignored | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100, description="JPEG and WebP quality.")] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    moderation: Ignored | None = None
    style: Ignored | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None

    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    num_inference_steps: Steps | None = None
    steps: Annotated[Steps, Field(description="Another name for num_inference_steps.")] | None = None
    guidance_scale: Guidance | None = None
    cfg_scale: Annotated[Guidance, Field(description="Another name for guidance_scale.")] | None = None
    sampler: Annotated[str, Field(description="For example dpmpp_2m, DPM++ 2M Karras, euler_a.")] | None = None
    sampler_name: Annotated[str, Field(description="Another name for sampler.")] | None = None
    scheduler: Annotated[str, Field(description="A sampler by another name, or a schedule type.")] | None = None
    sigma_schedule: Name | None = None
    spacing: Name | None = None
    seed: (
        Annotated[int, Field(ge=-1, le=MAX_SEED, description="-1 or null: random, and told in the answer.")] | None
    ) = None
    eta: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    width: Annotated[int, Field(description="With height, another way to give size.")] | None = None
    height: int | None = None

    @property
    def unknown_fields(self) -> list[str]:
        """Names of fields that mean nothing here, shortened."""
        return [_show_name(name) for name in self.model_extra or {}]


def parse_body(data: bytes) -> GenerateBody:
    """Read the JSON in ``data``. InvalidRequest names the field, the value and what is taken instead."""
    try:
        body = GenerateBody.model_validate_json(data)
    except ValidationError as error:
        raise _explain(error) from None
    extra = body.model_extra or {}
    _check_plain(extra, MAX_JSON_DEPTH - 1)
    for name in sorted(REFUSED.keys() & extra.keys()):
        if extra[name] is not None:
            raise InvalidRequest(f"{name} is not supported: {REFUSED[name]}", param=name, code="unsupported_parameter")
    return body


def _check_plain(value: Any, depth_left: int) -> None:
    """Refuse what is no JSON or hardly any client means: NaN and infinities, and very deep nesting."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest("the body is not valid JSON: numbers must be finite.", code="invalid_json")
    if isinstance(value, (dict, list)):
        if depth_left == 0:
            raise InvalidRequest(f"the body is nested deeper than {MAX_JSON_DEPTH} levels.", code="invalid_json")
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, depth_left - 1)


def _explain(error: ValidationError) -> InvalidRequest:
    """The first complaint, in one sentence."""
    first = error.errors(include_url=False)[0]
    kind, context = first["type"], first.get("ctx", {})
    name = str(first["loc"][0]) if first["loc"] else None
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {context['error']}.", code="invalid_json")
    if name is None:
        return InvalidRequest("the body must be a JSON object.", code="invalid_json")
    if kind == "missing":
        return InvalidRequest(f"{name} is missing; say what to paint.", param=name, code="missing_required_parameter")
    if kind == "string_too_short":
        return InvalidRequest("the prompt is empty; say what to paint.", param=name, code="empty_prompt")
    if kind == "string_too_long":
        return InvalidRequest(
            f"{name} has {len(first['input'])} characters; at most {context['max_length']} are taken.",
            param=name,
            code="string_above_max_length",
        )
    return InvalidRequest(f"{name} is {show(first['input'])}; {_wanted(kind, context)}.", param=name)


def _wanted(kind: str, context: dict[str, Any]) -> str:
    wanted = {
        "int_type": "it must be a whole number",
        "int_parsing_size": "that is too large",
        "float_type": "it must be a number",
        "finite_number": "it must be a finite number",
        "string_type": "it must be text",
        "bool_type": "it must be true or false",
        "string_pattern_mismatch": "it must not hold control characters",
        "greater_than_equal": "it must be at least {ge}",
        "less_than_equal": "it must be at most {le}",
        "literal_error": "it must be {expected}",
    }
    return wanted.get(kind, "that is not taken").format_map(context)


def show(value: object) -> str:
    """``value`` as it stood in the JSON, within 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _show_name(name: str) -> str:
    return re.sub(r"[^\w.\-]", "?", name, flags=re.ASCII)[:40]

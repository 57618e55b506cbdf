"""From a body to what the engine is asked for, and from its results to the answer."""

from __future__ import annotations

import base64
import math
import re
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from diffserve.config import ServeConfig
from diffserve.errors import InvalidRequest
from diffserve.images import ImageFormat, encode_image
from diffserve.infotext import write_infotext
from diffserve.quality import AUTO, QUALITIES, is_quality, steps_of
from diffserve.service.endpoint import Checked
from diffserve.service.http.bodies import show
from diffserve.service.images.kept_pictures import PictureUrls
from diffserve.service.images.schemas import MAX_NAME_CHARS, GenerateBody
from diffserve.service.models import URL_BY_DEFAULT
from diffserve.service.texts.rewrites import rewriting_of
from diffserve.service.texts.schemas import RewriterMode
from diffserve.sizes import SizePlan, plan_size
from diffserve.types import DiffusionParams, GenerationRequest, ImageResult, ModelInfo
from schedulers import SIGMA_SCHEDULES, SPACINGS, UnknownSampler, resolve_sampler

SCHEDULE_TYPES: Final[dict[str, str | None]] = {
    "automatic": None,
    "karras": "karras",
    "exponential": "exponential",
    "sgm uniform": "sgm_uniform",
    "sgm_uniform": "sgm_uniform",
    "simple": "simple",
    "beta": "beta",
}
"""Schedule types as clients write them, to :class:`DiffusionParams.sigma_schedule`."""


SAME_BY_NAME: Final = {*DiffusionParams.__struct_fields__} & {*GenerateBody.model_fields} - {
    "sampler",
    "sigma_schedule",
    "guidance_scale",
}
"""Fields of a body that need no more than to be handed on."""


class CheckedImages(Checked, frozen=True, kw_only=True):
    """A checked body: the engine's request, and how its pictures are to be delivered."""

    request: GenerationRequest
    plan: SizePlan
    image_format: ImageFormat
    compression: int
    quality: str
    safety_identifier: str | None
    has_progress: bool = False
    has_urls: bool = False
    urls: PictureUrls | None = None

    @property
    def url_warnings(self) -> list[str]:
        """Of pictures that could not be kept for their URLs."""
        return [] if self.urls is None else self.urls.warnings


def plan_painting(
    body: GenerateBody,
    info: ModelInfo,
    config: ServeConfig,
    request_id: str,
    *,
    client: str = "",
    rewriter: RewriterMode = "off",
) -> CheckedImages:
    """What ``body`` asks for, in the terms of the loaded model; ``rewriter`` where it says nothing of one.

    Raises InvalidRequest for what it cannot have.
    """
    _refuse_unsupported(body, config)
    warnings: list[str] = []
    plan = plan_size(info, _size(body), min_side_px=config.min_size_px, max_side_px=config.max_size_px)
    if plan.warning is not None:
        warnings.append(plan.warning)
    quality = _quality(body, warnings)
    if body.partial_images and not body.stream:
        warnings.append("partial_images changes nothing without stream.")
    warnings += body.warnings
    diffusion = _diffusion(body, None if quality == AUTO else steps_of(quality, info))
    return CheckedImages(
        request=GenerationRequest(
            request_id=request_id,
            prompt=body.prompt,
            negative_prompt=body.negative_prompt or "",
            width_px=plan.paint_width_px,
            height_px=plan.paint_height_px,
            num_images=body.n or 1,
            seed=None if body.seed in (None, -1) else body.seed,
            diffusion=diffusion,
            preview_every=_preview_every(body, diffusion.num_steps or info.default_num_steps),
            rewriting=rewriting_of(body.prompt_rewriter, rewriter),
            deadline_s=config.request_timeout_s,
            client=client,
        ),
        plan=plan,
        image_format=body.output_format or "png",
        compression=100 if body.output_compression is None else body.output_compression,
        quality=quality,
        safety_identifier=body.safety_identifier or body.user,
        warnings=tuple(warnings),
        is_stream=bool(body.stream),
        has_progress=body.progress is not False,
        has_urls=_wants_urls(body) and config.url_pictures_bytes > 0,
    )


def image_entry(painting: CheckedImages, result: ImageResult) -> dict[str, Any]:
    """One element of ``data``: resized, encoded, in base64, and with ``urls`` also at one. Takes a while: call it in a
    thread.

    ``revised_prompt`` is what the text encoder was given, null where that is what was sent. Beside a
    ``similarity_threshold``, ``similarity`` is of the prompt whose picture it began from, null where that was noise.
    """
    width_px, height_px = painting.plan.width_px, painting.plan.height_px
    file = encode_image(
        painting.plan.deliver(result.picture),
        image_format=painting.image_format,
        quality=painting.compression,
        infotext=write_infotext(result, width_px=width_px, height_px=height_px),
    )
    url = {} if painting.urls is None else {"url": painting.urls.keep(file, painting.image_format)}
    begun = {"similarity": result.similarity, "skipped_steps": result.skipped_steps}
    return url | {
        "b64_json": base64.b64encode(file).decode("ascii"),
        "revised_prompt": None if result.original_prompt is None else result.prompt,
        "seed": result.seed,
        **({} if result.similarity_threshold is None else begun),
    }


def answer(
    painting: CheckedImages, results: list[ImageResult], entries: list[dict[str, Any]], warnings: list[str]
) -> bytes:
    """The whole body of a 200 answer. Takes a while with large pictures: call it in a thread."""
    return msgspec.json.encode(
        {
            "created": int(time.time()),
            "data": entries,
            **delivery(painting),
            "usage": usage(painting, results),
            "warnings": warnings,
            **recipe(painting, results[0]),
        }
    )


def delivery(painting: CheckedImages) -> dict[str, Any]:
    """How the pictures are delivered, in OpenAI's words."""
    return {
        "background": "opaque",
        "output_format": painting.image_format,
        "quality": painting.quality,
        "size": f"{painting.plan.width_px}x{painting.plan.height_px}",
        "safety_identifier": painting.safety_identifier,
    }


def recipe(painting: CheckedImages, result: ImageResult) -> dict[str, Any]:
    """How ``result``, and every other picture of the request, was painted."""
    return {
        "id": painting.request.request_id,
        "model": result.model,
        "model_digest": result.model_digest,
        **{"num_inference_steps" if name == "num_steps" else name: value for name, value in result.recipe().items()},
    }


def _wants_urls(body: GenerateBody) -> bool:
    """As OpenAI does: older models' clients get them without asking."""
    return body.response_format == "url" or (body.response_format is None and body.model in URL_BY_DEFAULT)


def _refuse_unsupported(body: GenerateBody, config: ServeConfig) -> None:
    if body.response_format == "url" and config.url_pictures_bytes == 0:
        said = "response_format is 'url'; this server keeps no pictures, ask for 'b64_json'."
        raise InvalidRequest(said, param="response_format", code="unsupported_value")
    if body.background == "transparent":
        said = "background is 'transparent'; this model paints opaque pictures, ask for 'opaque' or 'auto'."
        raise InvalidRequest(said, param="background", code="unsupported_value")


def _preview_every(body: GenerateBody, num_steps: int) -> int:
    """Steps between previews, so that at most as many as asked for are spread evenly over the way."""
    if not body.stream or not body.partial_images:
        return 0
    return math.ceil(num_steps / (body.partial_images + 1))


def _size(body: GenerateBody) -> tuple[int, int] | None:
    """(width, height) in pixels, or ``None`` for the model's own."""
    given = None
    if body.size is not None and body.size != "auto":
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", body.size)
        if match is None:
            raise InvalidRequest(
                f"size is {show(body.size)}; write WIDTHxHEIGHT in pixels, such as 512x512, or auto.",
                param="size",
                code="invalid_size",
            )
        given = (int(match[1]), int(match[2]))
    if body.width is None and body.height is None:
        return given
    if body.width is None or body.height is None:
        raise InvalidRequest("give width and height together, or size.", param="size", code="invalid_size")
    if given not in (None, (body.width, body.height)):
        raise InvalidRequest(
            f"size is {body.size} but width and height are {body.width} and {body.height}; give one of them.",
            param="size",
            code="invalid_size",
        )
    return body.width, body.height


def _diffusion(body: GenerateBody, quality_steps: int | None) -> DiffusionParams:
    """``quality_steps`` are taken where the body gives no number of steps."""
    sampler = _one_of(body, "sampler", "sampler_name")
    schedule = body.sigma_schedule
    if body.scheduler is not None and body.scheduler.strip().lower() in SCHEDULE_TYPES:
        told = SCHEDULE_TYPES[body.scheduler.strip().lower()]
        _check_agree(schedule, "sigma_schedule", told, f"scheduler {show(body.scheduler)}", "scheduler")
        schedule = schedule or told
    elif body.scheduler is not None:
        if sampler is not None:
            raise InvalidRequest(
                f"scheduler is {show(body.scheduler)} beside sampler {show(sampler)}; "
                f"with a sampler it is one of {', '.join(SCHEDULE_TYPES)}.",
                param="scheduler",
                code="unknown_scheduler",
            )
        sampler = body.scheduler
    if sampler is not None:
        _check_sampler(sampler)
        _check_agree(schedule, "sigma_schedule", resolve_sampler(sampler)[1], f"sampler {show(sampler)}", "sampler")
    _check_listed("sigma_schedule", schedule, SIGMA_SCHEDULES)
    _check_listed("spacing", body.spacing, SPACINGS)
    return DiffusionParams(
        sampler=sampler,
        num_steps=_one_of(body, "num_inference_steps", "steps") or quality_steps,
        guidance_scale=_one_of(body, "guidance_scale", "cfg_scale"),
        sigma_schedule=schedule,
        **{name: getattr(body, name) for name in SAME_BY_NAME if getattr(body, name) is not None},
    )


def _check_agree(one: str | None, name: str, other: str | None, told_by: str, param: str) -> None:
    """InvalidRequest where two fields name two sigma schedules."""
    if one is not None and other is not None and one != other:
        raise InvalidRequest(f"{name} is {show(one)} and {told_by} says {show(other)}; give one of them.", param=param)


def _check_sampler(name: str) -> None:
    shortened = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
    try:
        resolve_sampler(shortened)
    except UnknownSampler as error:
        raise InvalidRequest(str(error), param="sampler", code="unknown_sampler") from None
    if shortened != name:  # the engine would compare all of it with every name it knows
        raise InvalidRequest(
            f"sampler has {len(name)} characters; a name has at most {MAX_NAME_CHARS}.",
            param="sampler",
            code="unknown_sampler",
        )


def _check_listed(name: str, value: str | None, known: Iterable[str]) -> None:
    if value is not None and value not in known:
        raise InvalidRequest(f"{name} is {show(value)}; it must be one of {', '.join(known)}.", param=name)


def _one_of(body: GenerateBody, name: str, other: str) -> Any:
    """The value of a field that goes by two names; InvalidRequest where they disagree."""
    first, second = getattr(body, name), getattr(body, other)
    if first is not None and second is not None and first != second:
        raise InvalidRequest(
            f"{name} is {show(first)} but {other} is {show(second)}; they mean the same, give one of them.", param=name
        )
    return second if first is None else first


def _quality(body: GenerateBody, warnings: list[str]) -> str:
    quality = body.quality or AUTO
    if is_quality(quality):
        return quality
    warnings.append(f"quality {show(quality)} is unknown and was taken as auto; choose from {', '.join(QUALITIES)}.")
    return AUTO


def usage(painting: CheckedImages, results: list[ImageResult]) -> dict[str, Any]:
    """Token counts as OpenAI's clients expect them: an image token is one cell of the painted latents' 8x8 grid."""
    image_tokens = sum(result.picture.width_px * result.picture.height_px // 64 for result in results)
    text_tokens = len(results[0].prompt.split())
    return {
        "input_tokens": text_tokens,
        "output_tokens": image_tokens,
        "total_tokens": text_tokens + image_tokens,
        "input_tokens_details": {"text_tokens": text_tokens, "image_tokens": 0},
        "num_evaluations": sum(result.num_evaluations for result in results),
        "num_cached": sum(result.cached is not None for result in results),
    }

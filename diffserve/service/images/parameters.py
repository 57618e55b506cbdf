"""Conversion of a body to diffusion parameters; resolves fields with several names and refuses contradictions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.types import SWITCH_AT, DiffusionParams, Picture, RewriteOptions
from diffserve.models.controlnets import Control, digest_of
from diffserve.models.loras import Lora
from diffserve.service.http.bodies import show
from diffserve.service.images.schemas import MAX_NAME_CHARS, GenerateBody
from diffserve.service.texts.rewrites import options_of
from diffserve.service.texts.schemas import RewriterChoice, RewriterMode
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
"""``DiffusionParams.sigma_schedule`` by the schedule types that clients send."""


SAME_BY_NAME: Final = {*DiffusionParams.__struct_fields__} & {*GenerateBody.model_fields} - {
    "sampler",
    "sigma_schedule",
    "guidance_scale",
    "loras",
    "controlnets",
    "micro_conditioning",
    "switch_at",
    "variation_seed",
}
"""Fields of a body that are copied unchanged."""


def diffusion_of(body: GenerateBody, quality_steps: int | None, images: tuple[Picture, ...]) -> DiffusionParams:
    """Return the diffusion parameters of ``body``.

    Args:
        body: The body of the request.
        quality_steps: Number of steps if the body has none.
        images: Control images, one for each ControlNet of the body.

    Raises:
        InvalidRequest: A value is unknown, or fields contradict each other.
    """
    sampler = _one_of(body, "sampler", "sampler_name")
    schedule = body.sigma_schedule
    if body.scheduler is not None and body.scheduler.strip().lower() in SCHEDULE_TYPES:
        implied_schedule = SCHEDULE_TYPES[body.scheduler.strip().lower()]
        _check_agree(schedule, "sigma_schedule", implied_schedule, f"scheduler {show(body.scheduler)}", "scheduler")
        schedule = schedule or implied_schedule
    elif body.scheduler is not None:
        message = (
            f"scheduler is {show(body.scheduler)} beside sampler {show(sampler)}; "
            f"with a sampler it is one of {', '.join(SCHEDULE_TYPES)}."
        )
        check(sampler is None, message, "scheduler", "unknown_scheduler")
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
        micro_conditioning=_sizes(body),
        loras=tuple(Lora(lora.name, lora.scale).with_unet_scale(lora.unet_scale) for lora in body.loras or ()),
        controlnets=tuple(
            Control(
                choice.name,
                choice.scale,
                choice.start,
                choice.end,
                choice.preprocessor,
                digest_of(image.width_px, image.height_px, image.data),
                choice.resize,
                choice.thresholds,
                choice.resolution,
            )
            for choice, image in zip(body.controlnets or (), images, strict=True)
        ),
        switch_at=_switch_at(body),
        variation_seed=None if body.variation_seed == -1 else body.variation_seed,
        **{name: getattr(body, name) for name in SAME_BY_NAME if getattr(body, name) is not None},
    )


def _switch_at(body: GenerateBody) -> float | None:
    if body.refiner is False and body.switch_at is not None:
        message = f"refiner is false but switch_at is {body.switch_at:g}, where it would take over; give one of them."
        raise InvalidRequest(message, param="switch_at")
    return SWITCH_AT if body.refiner and body.switch_at is None else body.switch_at


def _sizes(body: GenerateBody) -> MicroConditioning | None:
    if body.micro_conditioning is None:
        return None
    sizes = body.micro_conditioning.model_dump(exclude_none=True)
    return MicroConditioning(**{name: tuple(pair) for name, pair in sizes.items()})


def _check_agree(value: str | None, name: str, other_value: str | None, source: str, param: str) -> None:
    """Check that two fields do not name different sigma schedules. Raises InvalidRequest."""
    message = f"{name} is {show(value)} and {source} says {show(other_value)}; give one of them."
    check(None in (value, other_value) or value == other_value, message, param)


def _check_sampler(name: str) -> None:
    shortened = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
    try:
        resolve_sampler(shortened)
    except UnknownSampler as error:
        raise InvalidRequest(str(error), param="sampler", code="unknown_sampler") from None
    message = f"sampler has {len(name)} characters; a name has at most {MAX_NAME_CHARS}."
    check(shortened == name, message, "sampler", "unknown_sampler")


def _check_listed(name: str, value: str | None, allowed: Iterable[str]) -> None:
    check(value is None or value in allowed, f"{name} is {show(value)}; it must be one of {', '.join(allowed)}.", name)


def _one_of(body: GenerateBody, name: str, other: str) -> Any:
    """Return the value of a field that has two names. Raises InvalidRequest if the two differ."""
    first, second = getattr(body, name), getattr(body, other)
    message = f"{name} is {show(first)} but {other} is {show(second)}; they mean the same, give one of them."
    check(first is None or second is None or first == second, message, name)
    return second if first is None else first


def rewriting_of(choice: RewriterMode | RewriterChoice | None, default: RewriterMode) -> RewriteOptions | None:
    """Return how an image's prompt is rewritten, or None. Raises InvalidRequest."""
    if isinstance(choice, RewriterChoice):
        return options_of(choice, "prompt_rewriter.style")
    mode = choice or default
    return None if mode == "off" else RewriteOptions(force=mode == "force")

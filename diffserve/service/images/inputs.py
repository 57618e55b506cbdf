"""Inputs of an image request: parameters with several names, infotext that fills fields, and images in base64."""

from __future__ import annotations

import base64
import binascii
import re
import string
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.micro_conditioning import MicroConditioning
from diffserve.api.types import SWITCH_AT, DiffusionParams, Picture, RewriteOptions
from diffserve.media import images
from diffserve.media.decoders import ImageReader
from diffserve.media.infotext import parse_infotext
from diffserve.media.infotext_recipe import parse_sent, request_of
from diffserve.media.start_picture import StartPicture, check_large_enough, read_margins
from diffserve.models.controlnets import Control, digest_of
from diffserve.models.loras import Lora
from diffserve.models.references import Reference
from diffserve.service.http.bodies import check_shape, parse, show
from diffserve.service.images.schemas import MAX_NAME_CHARS, AnyImage, EditBody, GenerateBody, StartBody, VariationBody
from diffserve.service.texts.rewrites import options_of
from diffserve.service.texts.schemas import RewriterChoice, RewriterMode
from schedulers import SIGMA_SCHEDULES, SPACINGS, UnknownSampler, resolve_sampler
from schedulers.learned import is_learned

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
    "references",
    "micro_conditioning",
    "switch_at",
    "variation_seed",
}
"""Fields of a body that are copied unchanged."""


def diffusion_of(
    body: GenerateBody, images: tuple[Picture, ...], reference_images: tuple[Picture, ...] = ()
) -> DiffusionParams:
    """Return the diffusion parameters of ``body``.

    Args:
        body: The body of the request.
        images: Control images, one for each ControlNet of the body.
        reference_images: Images of the body's references.

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
            f"scheduler is {show(body.scheduler)}; with sampler {show(sampler)} "
            f"it must be one of {', '.join(SCHEDULE_TYPES)}."
        )
        check(sampler is None, message, "scheduler", "unknown_scheduler")
        _check_sampler(body.scheduler, "scheduler")
        sampler = body.scheduler
    if sampler is not None:
        _check_sampler(sampler, "sampler" if body.sampler_name is None else "sampler_name")
        implied_schedule = None if is_learned(sampler) else resolve_sampler(sampler)[1]
        _check_agree(schedule, "sigma_schedule", implied_schedule, f"sampler {show(sampler)}", "sampler")
    _check_listed("sigma_schedule", schedule, SIGMA_SCHEDULES)
    _check_listed("spacing", body.spacing, SPACINGS)
    hires_sampler: str | None = getattr(body, "hires_sampler", None)
    if hires_sampler is not None:
        _check_sampler(hires_sampler, "hires_sampler")
    _check_listed("hires_schedule", getattr(body, "hires_schedule", None), SIGMA_SCHEDULES)
    return DiffusionParams(
        sampler=sampler,
        num_steps=_one_of(body, "num_inference_steps", "steps"),
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
        references=tuple(
            Reference(
                choice.name,
                choice.scale,
                choice.start,
                choice.end,
                digest_of(image.width_px, image.height_px, image.data),
            )
            for choice, image in zip(body.references or (), reference_images, strict=True)
        ),
        switch_at=_switch_at(body),
        variation_seed=None if body.variation_seed == -1 else body.variation_seed,
        **{name: getattr(body, name) for name in SAME_BY_NAME if getattr(body, name) is not None},
    )


def _switch_at(body: GenerateBody) -> float | None:
    if body.refiner is False and body.switch_at is not None:
        message = f"refiner is false but switch_at is {body.switch_at:g}; give one of them."
        raise InvalidRequest(message, param="switch_at")
    return SWITCH_AT if body.refiner and body.switch_at is None else body.switch_at


def _sizes(body: GenerateBody) -> MicroConditioning | None:
    if body.micro_conditioning is None:
        return None
    sizes = body.micro_conditioning.model_dump(exclude_none=True)
    return MicroConditioning(**{name: tuple(pair) for name, pair in sizes.items()})


def _check_agree(value: str | None, name: str, other_value: str | None, source: str, param: str) -> None:
    """Check that two fields do not name different sigma schedules. Raises InvalidRequest."""
    message = f"{name} is {show(value)} but {source} means {show(other_value)}; give one of them."
    check(None in (value, other_value) or value == other_value, message, param)


def _check_sampler(name: str, param: str) -> None:
    shortened = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
    try:
        if not is_learned(name):  # whether there is such a learned sampler depends on the model
            resolve_sampler(shortened)
    except UnknownSampler as error:
        message = str(error).replace("sampler is", f"{param} is", 1)
        raise InvalidRequest(message, param=param, code="unknown_sampler") from None
    message = f"{param} has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed."
    check(shortened == name, message, param, "unknown_sampler")


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


STRENGTH: Final = 0.75
HIGH_FIDELITY_STRENGTH: Final = 0.5
_DATA_URL: Final = re.compile(
    r"\s*+data:[\w.+\-/]{0,64}(?:;[\w.+\-]{1,64}=[\w.+\-]{0,64})*;base64,", re.ASCII | re.IGNORECASE
)
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,15}://")
_WHITE_SPACE: Final = string.whitespace.encode()

ALIASES: Final = {
    "steps": ("num_inference_steps",),
    "cfg_scale": ("guidance_scale",),
    "sampler": ("sampler", "sigma_schedule"),
    "sampler_name": ("sampler", "sigma_schedule"),
    "scheduler": ("sampler", "sigma_schedule"),
    "width": ("size",),
    "height": ("size",),
}
"""Fields of a body, to the recorded fields that they replace."""


class Start(NamedTuple):
    """The image that generation starts from.

    Attributes:
        picture: The image and its mask.
        strength: The share of the noise schedule that is run, 0 to 1.
        warnings: Sentences for the client.
    """

    picture: StartPicture
    strength: float
    warnings: tuple[str, ...] = ()


def is_address(text: str) -> bool:
    """Return whether ``text`` is a URL of an image rather than the image itself."""
    return _ADDRESS.match(text.lstrip()) is not None


def image_bytes(text: str, name: str) -> bytes:
    """Decode the image file that ``text`` holds as base64 or as a data URL.

    White space is skipped and padding is optional; any other character is refused.

    Raises:
        InvalidRequest: ``text`` is a URL, is empty, or is not base64. The error names the parameter ``name``.
    """
    header = _DATA_URL.match(text)
    message = f"{name} is a URL, and this server does not fetch images; send the image as a data URL."
    check(header is not None or not is_address(text), message, name, "url_not_allowed")
    try:
        digits = text[header.end() if header else 0 :].encode("ascii").translate(None, _WHITE_SPACE)
        num_padding = len(digits) - len(digits.rstrip(b"="))
        unpadded = digits if num_padding > 2 else digits.rstrip(b"=")
        data = base64.b64decode(unpadded + b"=" * (-len(unpadded) % 4), validate=True)
    except (binascii.Error, ValueError):
        message = f"{name} is not base64; send a PNG, JPEG or WebP file in base64, or as a data URL."
        raise InvalidRequest(message, param=name, code="invalid_image") from None
    check(bool(data), f"the {name} is empty; send a PNG, JPEG or WebP file.", name, "invalid_image")
    return data


def read_start(body: StartBody, reader: ImageReader = images) -> tuple[StartBody, Start]:
    """Read the image and the mask that a body starts from; takes a while, so call it in a thread.

    A UNet starts from one image: of several, the first is used. Without a mask, the transparent pixels of the image
    are the mask of an edit.

    Args:
        body: The body of an edit or of a variation.
        reader: Decodes image files.

    Returns:
        The body, in a variation without a prompt with the prompt recorded in its image; and its start.

    Raises:
        InvalidRequest: There is no image, or an image or a mask cannot be used.
    """
    files = [*body.uploads.get("image", []), *body.uploads.get("images", [])]
    files += [_reference_bytes(image, "image") for image in body.pictures()]
    message = "image is missing; upload a PNG, JPEG or WebP file, send it in base64, "
    message += 'or give the ID of a file from /v1/files: "image": {"file_id": "..."}.'
    check(bool(files), message, "image", "missing_required_parameter")
    warnings: list[str] = []
    image, transparent = reader.decode_with_mask(files[0])
    check_large_enough(image, "image")
    mask = transparent if isinstance(body, EditBody) else None
    if len(files) > 1:
        warnings.append(f"{len(files)} images were sent; the model starts from one, the first is used.")
    mask_field = body.mask if isinstance(body, EditBody) else None
    masks = [*body.uploads.get("mask", []), *([] if mask_field is None else [_reference_bytes(mask_field, "mask")])]
    check(len(masks) <= 1, f"{len(masks)} masks were sent; send one.", "mask")
    if masks:
        mask = reader.decode_mask(masks[0])
    elif mask is not None:
        warnings.append("there is no mask; the image is repainted where it is transparent.")
    start = StartPicture(picture=image, mask=mask)
    margins: str | None = getattr(body, "outpaint", None)
    if margins is not None:
        start = start.extended(read_margins(margins))
        mask = start.mask
    strength = body.strength
    if strength is None:
        is_faithful = isinstance(body, EditBody) and body.input_fidelity == "high"
        strength = 1.0 if mask is not None else HIGH_FIDELITY_STRENGTH if is_faithful else STRENGTH
    if isinstance(body, VariationBody) and not body.prompt.strip():
        text = reader.read_infotext(files[0])
        infotext = None if text is None else parse_infotext(text)
        # a text without parameters is not an infotext, but for example the comment of a camera
        prompt = infotext.prompt if infotext is not None and infotext.fields else ""
        body = body.model_copy(update={"prompt": prompt})
        if not prompt:
            warnings.append("the image has no recorded prompt; its variation is generated without one.")
    return body, Start(start, strength, tuple(warnings))


def _reference_bytes(image: AnyImage, name: str) -> bytes:
    text = image if isinstance(image, str) else image.image_url
    if text is None:
        raise InvalidRequest(f"the {name} has no image_url; give a data URL, or a file_id.", param=name)
    return image_bytes(text, name)


def read_repeated(
    kind: type[GenerateBody],
    data: bytes,
    models: Collection[str],
    refused: Callable[[str | None], Collection[str]],
    upscalers: Callable[[], Collection[str]],
) -> GenerateBody:
    """Read a body whose ``infotext`` fills the fields that it omits.

    Args:
        kind: The class of the body.
        data: The body as JSON.
        models: Names of the models that are served.
        refused: Returns the fields that a model does not take.
        upscalers: Returns the names of the upscaler networks.

    Raises:
        InvalidRequest: Something in the body or in its infotext cannot be used.
    """
    check_shape(data)
    try:
        fields: Any = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return parse(kind, data)  # whose error says what is wrong
    text = fields.get("infotext") if isinstance(fields, dict) else None
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"infotext is {show(text)}; it must be text.", param="infotext")
    if not text:
        return parse(kind, data)
    del fields["infotext"]
    infotext = parse_sent(text)
    name = fields.get("model") or infotext.fields.get("Model")
    refusals = refused(name if isinstance(name, str) and name in models else None)
    has_start = issubclass(kind, StartBody)
    recorded = request_of(infotext, has_start=has_start, refused=refusals, models=models, upscalers=upscalers)
    replaced = {alias for name in fields for alias in ALIASES.get(name, (name,)) if fields[name] is not None}
    defaults = {name: value for name, value in recorded.fields.items() if name not in replaced}
    fields = {name: value for name, value in fields.items() if value is not None}
    body = parse(kind, msgspec.json.encode({"prompt_rewriter": "off", **defaults, **fields}))
    body.take_warnings(recorded.warnings)
    return body


def refuse_infotext(body: GenerateBody) -> None:
    """Refuse an infotext that was not read before, for example the one of a form.

    Raises:
        InvalidRequest: The body has an infotext.
    """
    message = (
        "infotext is only supported in a JSON body of /v1/images/generations, edits and variations; give the fields."
    )
    check(not body.infotext, message, "infotext", "unsupported_parameter")

"""Conversion of A1111 bodies to bodies of image requests, and their start images."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

import msgspec
import numpy as np
from PIL import Image, ImageFilter
from pydantic import TypeAdapter, ValidationError

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.fields import MAX_SEED, REQUEST_FIELDS
from diffserve.api.types import LANCZOS, MAX_IMAGES, NEAREST, Picture
from diffserve.media import images
from diffserve.media.decoders import ImageReader
from diffserve.media.images import resize, stretch
from diffserve.media.infotext import SCHEDULE_LABELS
from diffserve.media.infotext_recipe import InfotextFields, is_enlarged, parse_sent, request_of
from diffserve.media.start_picture import StartPicture, check_large_enough
from diffserve.models.loras import read_tags
from diffserve.service.a1111.controlnets import controlnets_of, ignored_in_units, references_of
from diffserve.service.a1111.schemas import FILL, MAX_SIDE, Img2ImgBody, Txt2ImgBody, has_effect, ignored, template_of
from diffserve.service.a1111.styles import PromptStyle, with_styles
from diffserve.service.http.bodies import parse, show, show_name
from diffserve.service.http.errors import HttpError
from diffserve.service.images.inputs import SCHEDULE_TYPES, Start, image_bytes
from diffserve.service.images.schemas import GenerateBody, Seed, annotation_of

USUAL_STEPS: Final = 20
"""Assumed number of steps of a pass without one, for its share of the progress."""

STRENGTH: Final = 0.75
HIRES_STRENGTH: Final = 0.75
HIRES_SCALE: Final = 2.0
MASK_BLUR_PX: Final = 4
STRETCHED, CROPPED, FILLED = 0, 1, 2
ORIGINAL: Final = 1
UPSCALERS: Final = {"": LANCZOS, "none": LANCZOS, "lanczos": LANCZOS, "nearest": NEAREST}
"""Upscalers by their lower-case names in A1111, whose "None" resizes by Lanczos as well."""

MOST_FILLED_PX: Final = 1024
"""Longer side in pixels of the image that is blurred to fill a mask."""

SETTINGS: Final = ("sd_model_checkpoint", "CLIP_stop_at_last_layers")
"""Settings of ``override_settings`` that have an effect."""

_OF_DISK_OR_CODE: Final = re.compile(r"(?i)dir(?:$|_|ector)|path|file|script|(?:^|_)save(?:$|_)|callback|command")
_SAME_SCHEDULE: Final = {"polyexponential": "exponential", "turbo": "simple"}
"""Equal schedules: A1111 uses polyexponential with exponent 1; turbo takes the same timesteps as simple."""

_NEAREST_SCHEDULE: Final = {
    "kl optimal": "Automatic",
    "ddim": "Automatic",
    "align your steps": "Automatic",
    "align your steps 11": "Automatic",
    "align your steps gits": "Exponential",
    "align your steps 32": "Karras",
}
"""Nearest supported schedules, by the squared differences of the log noise levels of ten steps."""

_FILL_RADII: Final = (64, 32, 16, 8, 4, 2, 1)
_BODY_FIELDS: Final = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    **{name: field.a1111 for name, field in REQUEST_FIELDS.items() if field.a1111},
}
"""A1111's names of recorded fields; it has none for the others."""


def convert_body(
    body: Txt2ImgBody,
    options: dict[str, Any],
    styles: Sequence[PromptStyle],
    refused: Collection[str] = (),
    models: Collection[str] = (),
    networks: Collection[str] = (),
) -> tuple[Txt2ImgBody, GenerateBody]:
    """Convert an A1111 body to the body of an image request.

    Args:
        body: The A1111 body.
        options: Settings that the client stored.
        styles: The available styles.
        refused: Fields that the model does not support; they are ignored in an infotext.
        models: Names of the served models.
        networks: Names of the upscaler networks.

    Returns:
        ``body`` with the values of its infotext, and the body of the image request.

    Raises:
        InvalidRequest: Something in the body cannot be used.
    """
    body, recorded = _fill_from_infotext(body, refused, models, networks)
    message = f"batch_size times n_iter is {body.num_images}; at most {MAX_IMAGES} are allowed."
    check(body.num_images <= MAX_IMAGES, message, "batch_size")
    if body.script_name not in (None, "", "None"):
        raise HttpError(
            422,
            f"script_name is {show(body.script_name)}; this server does not run scripts, leave it out.",
            code="unknown_script",
        )
    overridden = body.override_settings or {}
    _check_settings(overridden)
    settings = options | overridden
    prompt, negative = with_styles(body.prompt or "", body.negative_prompt or "", body.styles or (), styles)
    skip = body.clip_skip or settings.get("CLIP_stop_at_last_layers")
    model = settings.get("sd_model_checkpoint")
    values: dict[str, Any] = {
        "prompt": prompt,
        "negative_prompt": negative,
        "model": str(model).partition(" [")[0] if model else None,
        "n": body.num_images,
        "template": template_of(body),
        "seed": body.seed,
        "priority": body.priority,
        "deadline_s": body.deadline_s,
        "sampler": body.sampler_name or body.sampler_index,
        "scheduler": _schedule(body.scheduler),
        "num_inference_steps": body.steps,
        "guidance_scale": body.cfg_scale,
        "eta": body.eta,
        "clip_skip": skip if isinstance(skip, int) and not isinstance(skip, bool) and skip > 1 else None,
    }
    values |= _fields_of_settings(settings)
    values |= {name: value for name, value in recorded.fields.items() if values.get(name) is None}
    if body.subseed_strength:
        values |= {"variation_seed": _parse_subseed(body.subseed), "variation_strength": body.subseed_strength}
    if choices := controlnets_of(body):
        values["controlnets"] = choices
    if references := references_of(body):
        values["references"] = references
    if body.refiner_checkpoint not in (None, "", "None"):
        values |= {"refiner": True, "switch_at": body.refiner_switch_at}
    message = "the prompt is empty; describe the image."
    check(isinstance(body, Img2ImgBody) or bool(prompt.strip()), message, "prompt", "empty_prompt")
    if body.width is not None or body.height is not None:
        side = body.width or body.height
        values |= {"width": body.width or side, "height": body.height or side}
    if body.enable_hr and not isinstance(body, Img2ImgBody):
        values |= _hires(body, styles, networks)
    image_body = GenerateBody.model_construct(**{name: value for name, value in values.items() if value is not None})
    image_body.take_warnings(recorded.warnings)
    return body, image_body


def warnings_of(body: Txt2ImgBody, networks: Collection[str] = ()) -> list[str]:
    """Return the warnings about ``body`` that do not depend on the model; ``networks`` are names of upscalers."""
    upscaler = body.hr_upscaler or ""
    has_second = bool(body.enable_hr) and not isinstance(body, Img2ImgBody)
    is_replaced = has_second and upscaler.lower() not in UPSCALERS and upscaler not in networks
    sentence = f"hr_upscaler {show(upscaler)} is not one of /sdapi/v1/upscalers; the image was enlarged by Lanczos."
    return [*ignored(body), *ignored_in_units(body), *[sentence] * is_replaced]


def _fields_of_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields that A1111 has as settings; 0 stands for the default.

    Raises:
        InvalidRequest: A value is out of range.
    """
    fields: dict[str, Any] = {}
    for name, field in REQUEST_FIELDS.items():
        value = settings.get(field.a1111_setting) if field.a1111_setting else None
        if not has_effect(value, (0,)):
            continue
        try:
            fields[name] = TypeAdapter(annotation_of(field)).validate_python(value)
        except ValidationError:
            message = f"{field.a1111_setting} is {show(value)}; give a number above {field.minimum:g}, or 0 for none."
            raise InvalidRequest(message, param=f"override_settings.{field.a1111_setting}") from None
    return fields


def _parse_subseed(value: object) -> int | None:
    """Return the variation seed, which may be a number in a string; None and -1 mean any. Raises InvalidRequest."""
    try:
        return None if value is None else TypeAdapter(Seed).validate_python(value)
    except ValidationError:
        message = f"subseed is {show(value)}; give a whole number from 0 to {MAX_SEED}, or -1 for any."
        raise InvalidRequest(message, param="subseed") from None


def start_of(body: Img2ImgBody, width_px: int | None, height_px: int | None, reader: ImageReader = images) -> Start:
    """Return the start image of ``body``, with its mask and strength. Slow: call it in a thread.

    Args:
        body: The A1111 body.
        width_px: Width of the generated image; None: the width of the start image.
        height_px: Height of the generated image; None: the height of the start image.
        reader: Decodes the files.

    Raises:
        InvalidRequest: There is no start image, or a file cannot be read.
    """
    if not body.init_images:
        message = "init_images is missing; give an image in base64."
        raise InvalidRequest(message, param="init_images", code="missing_required_parameter")
    picture = reader.decode_image(image_bytes(body.init_images[0], "init_images"), name="init_images")
    check_large_enough(picture, "init_images")
    mask = reader.decode_mask(image_bytes(body.mask, "mask"), convention="a1111") if body.mask else None
    if mask is not None:
        if (mask.width_px, mask.height_px) != (picture.width_px, picture.height_px):
            mask = stretch(mask, picture.width_px, picture.height_px)
        if body.inpainting_mask_invert:
            mask = Picture.from_array(255 - mask.array)
    width, height = width_px or picture.width_px, height_px or picture.height_px
    is_region = mask is not None and body.inpaint_full_res is not False
    if not is_region:
        picture = _resize_by_mode(picture, width, height, body.resize_mode or STRETCHED)
        mask = None if mask is None else _resize_by_mode(mask, width, height, body.resize_mode or STRETCHED)
    names = ("init_images", "mask")
    start = StartPicture(picture=picture, mask=mask, names=names)
    if mask is not None and (body.inpainting_fill or FILL) != ORIGINAL:
        picture = _fill_masked_area(picture, mask)
    blurs = [blur for blur in (body.mask_blur_x, body.mask_blur_y) if blur is not None]
    blur = body.mask_blur if body.mask_blur is not None else max(blurs, default=MASK_BLUR_PX)
    start = msgspec.structs.replace(start, picture=picture, feather_px=float(blur))
    if is_region:
        start = start.around_mask(width / height, body.inpaint_full_res_padding or 0)
    strength = STRENGTH if body.denoising_strength is None else body.denoising_strength
    warnings = [f"{len(body.init_images)} images were sent; the first is used."] if len(body.init_images) > 1 else []
    return Start(start, strength, tuple(warnings))


def _fill_from_infotext(
    body: Txt2ImgBody, refused: Collection[str], models: Collection[str], networks: Collection[str]
) -> tuple[Txt2ImgBody, InfotextFields]:
    """Fill missing fields of ``body`` from its infotext; also return the recorded fields that A1111 does not have."""
    if not body.infotext:
        return body, InfotextFields({}, ())
    read, is_start = parse_sent(body.infotext), isinstance(body, Img2ImgBody)
    recorded = request_of(read, has_start=is_start, refused=refused, models=models, upscalers=lambda: networks)
    fields = dict(recorded.fields)
    body_fields = {_BODY_FIELDS[name]: fields.pop(name) for name in _BODY_FIELDS if name in fields}
    schedule = fields.pop("sigma_schedule", None)
    body_fields |= {"scheduler": SCHEDULE_LABELS.get(schedule, schedule)} | _size(fields.pop("size", ""))
    if is_enlarged(read) and not is_start:
        sides = _size(fields.pop("hires_size", ""))
        body_fields |= {"enable_hr": True, "hr_resize_x": sides.get("width"), "hr_resize_y": sides.get("height")}
    missing = {name: value for name, value in body_fields.items() if value is not None and getattr(body, name) is None}
    try:
        checked = type(body).model_validate(missing)
        typed = parse(GenerateBody, msgspec.json.encode({"prompt": "any", **fields}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))} is {show(first['input'])} ({first['msg']})"
        raise InvalidRequest(f"a value in the infotext cannot be used: {reason}.", param="infotext") from None
    except InvalidRequest as error:
        raise InvalidRequest(f"a value in the infotext cannot be used: {error.message}", param="infotext") from None
    body = body.model_copy(update={name: getattr(checked, name) for name in missing})
    return body, recorded._replace(fields={name: getattr(typed, name) for name in fields})


def _size(text: str) -> dict[str, int]:
    width, _, height = text.partition("x")
    sides = [int(side) for side in (width, height) if side.isascii() and side.isdigit() and len(side) < 6]
    return {"width": sides[0], "height": sides[1]} if len(sides) == 2 and 0 < min(sides) <= MAX_SIDE else {}


def _schedule(name: str | None) -> str | None:
    """Return the schedule type for A1111's name; None: the sampler's default. Raises InvalidRequest."""
    key = "" if name is None else name.strip().lower().replace("_", " ")
    if key in ("", "automatic", "uniform", "normal"):
        return None
    if key in SCHEDULE_TYPES or key in _SAME_SCHEDULE:
        return _SAME_SCHEDULE.get(key, name)
    labels = ("Automatic", *SCHEDULE_LABELS.values())
    near = _NEAREST_SCHEDULE.get(key) or next(iter(get_close_matches(key.title(), labels, 1, 0.5)), "Automatic")
    message = f"scheduler is {show(name)}; the nearest is {near}, and the known ones are {', '.join(labels)}."
    raise InvalidRequest(message, param="scheduler", code="unknown_scheduler")


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that name a path on the disk or code to run; other unknown settings are ignored.

    Raises:
        InvalidRequest: A setting names a path or code.
    """
    for name, value in settings.items():
        if name not in SETTINGS and value not in (None, False, "", [], {}) and _OF_DISK_OR_CODE.search(name):
            message = f"override_settings has {show_name(name)}; requests cannot set paths or code."
            raise InvalidRequest(message, param=f"override_settings.{show_name(name)}", code="unsupported_parameter")


def _hires(body: Txt2ImgBody, styles: Sequence[PromptStyle], networks: Collection[str]) -> dict[str, Any]:
    """Return the request fields of the second pass (hires fix), with A1111's defaults."""
    size = None
    if body.hr_resize_x or body.hr_resize_y:
        first = body.width or body.height, body.height or body.width
        message = "hr_resize_x and hr_resize_y are given without width and height; give both, or width and height."
        check(None not in first or bool(body.hr_resize_x and body.hr_resize_y), message, "hr_resize_x")
        aspect = (first[0] or 1) / (first[1] or 1)
        width = body.hr_resize_x or round((body.hr_resize_y or 0) * aspect)
        size = f"{width}x{body.hr_resize_y or round(width / aspect)}"
    texts: dict[str, str | None] = {}
    if body.hr_prompt or body.hr_negative_prompt:
        sent = body.hr_prompt or body.prompt or "", body.hr_negative_prompt or body.negative_prompt or ""
        prompt, negative = with_styles(*sent, body.styles or (), styles)
        has_same_tags = read_tags(prompt)[1] == read_tags(body.prompt or "")[1]
        texts["hires_prompt"] = (read_tags(prompt)[0] if has_same_tags else prompt) if body.hr_prompt else None
        texts["hires_negative_prompt"] = negative if body.hr_negative_prompt else None
    sampler, schedule, upscaler = body.hr_sampler_name, body.hr_scheduler, body.hr_upscaler or ""
    return {
        "hires_scale": None if size else body.hr_scale or HIRES_SCALE,
        "hires_size": size,
        "hires_strength": HIRES_STRENGTH if body.denoising_strength is None else body.denoising_strength,
        "hires_steps": body.hr_second_pass_steps or None,
        "hires_upscaler": upscaler if upscaler in networks else UPSCALERS.get(upscaler.lower(), LANCZOS),
        "hires_sampler": None if sampler in (None, "", "Use same sampler") else sampler,
        "hires_schedule": None if schedule in (None, "", "Use same scheduler") else _schedule(schedule),
        **texts,
    }


def _resize_by_mode(picture: Picture, width: int, height: int, mode: int) -> Picture:
    """Resize to width x height by A1111's resize mode: stretch, crop, or extend the edges."""
    if mode == STRETCHED or mode > FILLED:
        return stretch(picture, width, height)
    return resize(picture, width, height, is_padded=mode == FILLED)


def _fill_masked_area(picture: Picture, mask: Picture) -> Picture:
    """Fill the masked area of ``picture`` with blurred colors from around it; for large images at low resolution."""
    coarse = MOST_FILLED_PX / max(picture.width_px, picture.height_px)
    if coarse >= 1.0:
        filled = _average_colors(picture, mask)
    else:
        sides = [max(1, round(side * coarse)) for side in (picture.width_px, picture.height_px)]
        small = Image.fromarray(_average_colors(stretch(picture, *sides), stretch(mask, *sides)))
        filled = np.asarray(small.resize((picture.width_px, picture.height_px), Image.Resampling.BILINEAR))
    return Picture.from_array(np.where(mask.array[..., None] > 0, filled, picture.array))


def _average_colors(picture: Picture, mask: Picture) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return for each pixel the average color of the unmasked pixels around it, (height, width, 3)."""
    outside = Image.fromarray(255 - mask.array)
    pixels = np.asarray(picture.array, dtype=np.float32) * (np.asarray(outside, dtype=np.float32)[..., None] / 255)
    source, filled = Image.fromarray(pixels.astype(np.uint8)), None
    for radius in _FILL_RADII:  # wide blurs reach every pixel, narrow ones are closer to the colors at the edge
        color = np.asarray(source.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float32)
        weight = np.asarray(outside.filter(ImageFilter.GaussianBlur(radius)), dtype=np.float32)[..., None] / 255
        guess, is_near = color / np.maximum(weight, 1e-3), weight > 0.05
        filled = guess if filled is None else np.where(is_near, guess, filled)
    assert filled is not None
    return filled.clip(0, 255).astype(np.uint8)

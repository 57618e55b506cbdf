"""Inputs of an image request: images in base64, the image to start from, and infotext that fills a body's fields."""

from __future__ import annotations

import base64
import binascii
import re
import string
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.media import images
from diffserve.media.decoders import ImageReader
from diffserve.media.infotext import parse_infotext
from diffserve.media.infotext_recipe import parse_sent, request_of
from diffserve.media.start_picture import StartPicture, check_large_enough
from diffserve.service.http.bodies import check_shape, parse, show
from diffserve.service.images.schemas import AnyImage, EditBody, GenerateBody, StartBody, VariationBody

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
    message = f"{name} is an address, and nothing is fetched here; send the picture as a data URL of it."
    check(header is not None or not is_address(text), message, name, "url_not_allowed")
    try:
        digits = text[header.end() if header else 0 :].encode("ascii").translate(None, _WHITE_SPACE)
        num_padding = len(digits) - len(digits.rstrip(b"="))
        unpadded = digits if num_padding > 2 else digits.rstrip(b"=")
        data = base64.b64decode(unpadded + b"=" * (-len(unpadded) % 4), validate=True)
    except (binascii.Error, ValueError):
        message = f"{name} is not base64; send a PNG, JPEG or WebP file in base64, or as a data URL of it."
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
    message += 'or name one of /v1/files: "image": {"file_id": "..."}.'
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
    return body, Start(StartPicture(picture=image, mask=mask), strength, tuple(warnings))


def _reference_bytes(image: AnyImage, name: str) -> bytes:
    text = image if isinstance(image, str) else image.image_url
    if text is None:
        raise InvalidRequest(f"the {name} has no image_url; give a data URL, or a file_id.", param=name)
    return image_bytes(text, name)


def read_repeated(
    kind: type[GenerateBody], data: bytes, models: Collection[str], refused: Callable[[str | None], Collection[str]]
) -> GenerateBody:
    """Read a body whose ``infotext`` fills the fields that it omits.

    Args:
        kind: The class of the body.
        data: The body as JSON.
        models: Names of the models that are served.
        refused: Returns the fields that a model does not take.

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
    recorded = request_of(infotext, has_start=issubclass(kind, StartBody), refused=refusals, models=models)
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
    message = "infotext is taken in a JSON body of /v1/images/generations, edits and variations; give the fields."
    check(not body.infotext, message, "infotext", "unsupported_parameter")

"""``POST /v1/images/edits`` and ``/v1/images/variations``: pictures that begin from one that is sent, as OpenAI has it.

A UNet begins from one picture: the first; of others a warning tells. With a mask (transparent: edit here, or white in
one without transparency) the rest of the picture comes back to the byte. Without one, the transparent places of the
picture itself are its mask.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from starlette.requests import Request

from diffserve.api.errors import InvalidRequest
from diffserve.media import images
from diffserve.media.decoders import ImageReader
from diffserve.media.infotext import parse_infotext
from diffserve.media.start_picture import StartPicture, check_large_enough
from diffserve.service.http.forms import is_form, parse_fields, read_form
from diffserve.service.images.edit_schemas import MAX_PICTURES, AnyImage, EditBody, StartBody, VariationBody
from diffserve.service.images.generations import Generations
from diffserve.service.images.painting import Start
from diffserve.service.images.pictures_in import picture_bytes
from diffserve.service.images.schemas import GenerateBody

STRENGTH: Final = 0.75
FAITHFUL: Final = 0.5
"""Of ``input_fidelity`` high."""


class Edits(Generations):
    """The endpoint of edits."""

    body: type[StartBody] = EditBody
    events = "image_edit"

    async def _read(self, request: Request) -> GenerateBody:
        if not is_form(request):
            return await self._read_json(request)
        form = await read_form(request, max_files=MAX_PICTURES + 1)
        if unknown := form.files.keys() - {"image", "images", "mask"}:
            name = min(unknown)
            raise InvalidRequest(f"no file {name[:64]!r} is taken; upload image and mask.", param=name[:64])
        body = parse_fields(self.body, form.fields)
        body.with_uploads(form.files)
        return body

    async def _start(self, body: GenerateBody, request: Request, client: str) -> tuple[GenerateBody, Start]:
        assert isinstance(body, StartBody)
        return await self._decoded(request, client, partial(read_start, body))


class Variations(Edits):
    """The endpoint of variations, which are told as edits."""

    body = VariationBody


def read_start(body: StartBody, reader: ImageReader = images) -> tuple[StartBody, Start]:
    """Return what ``body`` starts from, and the body: of a variation with the prompt of its picture.

    Takes a while: call it in a thread. ``reader`` reads the files. Raises InvalidRequest.
    """
    files = [*body.uploads.get("image", []), *body.uploads.get("images", [])]
    files += [_bytes(one, "image") for one in body.pictures()]
    if not files:
        said = "image is missing; upload a PNG, JPEG or WebP file, send it in base64, "
        said += 'or name one of /v1/files: "image": {"file_id": "..."}.'
        raise InvalidRequest(said, param="image", code="missing_required_parameter")
    warnings: list[str] = []
    picture, transparent = reader.decode_with_mask(files[0])
    check_large_enough(picture, "image")
    mask = transparent if isinstance(body, EditBody) else None
    if len(files) > 1:
        warnings.append(f"{len(files)} pictures were sent; this model starts from one, which is the first.")
    given = body.mask if isinstance(body, EditBody) else None
    masks = [*body.uploads.get("mask", []), *([] if given is None else [_bytes(given, "mask")])]
    if len(masks) > 1:
        raise InvalidRequest(f"{len(masks)} masks were sent; a picture has one.", param="mask")
    if masks:
        mask = reader.decode_mask(masks[0])
    elif mask is not None:
        warnings.append("there is no mask; the picture is repainted where it is transparent.")
    strength = body.strength
    if strength is None:
        is_faithful = isinstance(body, EditBody) and body.input_fidelity == "high"
        strength = 1.0 if mask is not None else FAITHFUL if is_faithful else STRENGTH
    if isinstance(body, VariationBody) and not body.prompt.strip():
        text = reader.read_infotext(files[0])
        read = None if text is None else parse_infotext(text)
        prompt = read.prompt if read is not None and read.fields else ""  # not a camera's comment
        body = body.model_copy(update={"prompt": prompt})
        if not prompt:
            warnings.append("the picture does not say what it was painted by; its variation is painted without words.")
    return body, Start(StartPicture(picture=picture, mask=mask), strength, tuple(warnings))


def _bytes(image: AnyImage, name: str) -> bytes:
    text = image if isinstance(image, str) else image.image_url
    if text is None:
        raise InvalidRequest(f"the {name} has no image_url; give a data URL, or a file_id.", param=name)
    return picture_bytes(text, name)

"""``POST /sdapi/v1/extra-single-image`` and ``extra-batch-images``: A1111's upscaling of finished images."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.bounds import check
from diffserve.api.types import PRIORITIES
from diffserve.api.upscale_types import MAX_FACTOR
from diffserve.media.decoders import ImageDecoder
from diffserve.service.a1111.schemas import A1111Body, Grown, Label
from diffserve.service.admission import Ticket
from diffserve.service.images.inputs import image_bytes
from diffserve.service.images.schemas import MAX_PICTURES, Fraction
from diffserve.service.images.service import ImageService
from diffserve.service.images.upscaling import (
    UpscaledFile,
    UpscaleJob,
    UpscalePlan,
    Upscalers,
    UpscalingEndpoint,
    read_job,
)
from diffserve.service.lifecycle import json_response
from diffserve.service.threads import ANSWERS, LISTINGS

NONE: Final = "none"
"""A1111's name of no upscaler: the image keeps its size."""

DEFAULT_SCALE: Final = 2.0
DEFAULT_SIDE: Final = 512


class ExtrasBody(A1111Body):
    """Fields of both routes."""

    resize_mode: Annotated[int, Field(ge=0, le=1, description="0: by upscaling_resize; 1: to a size.")] | None = None
    upscaling_resize: Annotated[float, Field(gt=0.0, le=MAX_FACTOR)] | None = None
    upscaling_resize_w: Grown | None = None
    upscaling_resize_h: Grown | None = None
    upscaling_crop: bool | None = None
    upscaler_1: Label | None = None
    upscaler_2: Label | None = None
    extras_upscaler_2_visibility: Fraction | None = None
    gfpgan_visibility: Fraction | None = None
    codeformer_visibility: Fraction | None = None
    codeformer_weight: Fraction | None = None
    show_extras_results: bool | None = None
    upscale_first: bool | None = None

    def files(self) -> list[tuple[str, str]]:
        """Return the images in base64, each with the name of its field."""
        raise NotImplementedError


class ExtraSingleBody(ExtrasBody):
    """``POST /sdapi/v1/extra-single-image``."""

    model_config = ConfigDict(title="ExtraSingleImageRequest")

    image: Annotated[str, Field(min_length=1)]

    def files(self) -> list[tuple[str, str]]:
        """Return the image in base64 with the name of its field."""
        return [(self.image, "image")]


class ExtraFile(BaseModel):
    """An image of a batch."""

    model_config = ConfigDict(strict=False, extra="ignore")

    data: Annotated[str, Field(min_length=1)]
    name: Label = ""


class ExtraBatchBody(ExtrasBody):
    """``POST /sdapi/v1/extra-batch-images``."""

    model_config = ConfigDict(title="ExtraBatchImagesRequest")

    imageList: Annotated[list[ExtraFile], Field(min_length=1, max_length=MAX_PICTURES)]  # noqa: N815

    def files(self) -> list[tuple[str, str]]:
        """Return the images in base64, each with the name of its field."""
        return [(file.data, f"imageList[{index}].data") for index, file in enumerate(self.imageList)]


class ExtrasPlan(UpscalePlan, frozen=True, kw_only=True):
    """A resolved request; ``is_batch``: its answer has a list of images."""

    is_batch: bool


class ExtrasEndpoint(UpscalingEndpoint[ExtrasBody]):
    """Endpoint of one of the two routes, selected by the class of its body."""

    def __init__(self, service: ImageService, body: type[ExtrasBody]) -> None:
        super().__init__(service)
        self.body = body

    async def _plan(self, body: ExtrasBody, request: Request, client: str) -> UpscalePlan:
        for name in ("gfpgan_visibility", "codeformer_visibility"):
            value = getattr(body, name) or 0.0
            message = f"{name} is {value:g}; restoring faces is not supported, set it to 0."
            check(value == 0.0, message, name, "unsupported_parameter")
        await self._service.fill(request, body)
        upscalers = await LISTINGS.run(lambda: self._upscalers)

        def read(reader: ImageDecoder) -> tuple[UpscaleJob, ...]:
            return tuple(job_of(body, image_bytes(text, name), name, reader, upscalers) for text, name in body.files())

        jobs = await self._service.decode(request, client, read)
        return ExtrasPlan(
            request_id=request.state.request_id,
            jobs=jobs,
            priority=getattr(request.state, "priority", None) or PRIORITIES[0],
            deadline_s=self._config.request_timeout_s,
            marks=self._service.checks.marks,
            warnings=tuple(warning for job in jobs for warning in job.warnings),
            price=self._config.price,
            is_batch=isinstance(body, ExtraBatchBody),
        )

    async def _answer(self, plan: UpscalePlan, ticket: Ticket) -> Response:
        files = await self._run(plan, ticket)
        return json_response(await ANSWERS.run(partial(answer_of, plan, files)), plan.warnings)


def job_of(body: ExtrasBody, file: bytes, param: str, reader: ImageDecoder, upscalers: Upscalers) -> UpscaleJob:
    """Read the image of the field ``param`` and resolve how it is upscaled.

    Raises:
        InvalidRequest: The image or a field cannot be used.
    """
    first, second = (name_of(name) for name in (body.upscaler_1, body.upscaler_2))
    share = body.extras_upscaler_2_visibility or 0.0
    job = partial(read_job, file, reader, upscalers, upscaler=first or "lanczos", param=param)
    if first is None:  # as in A1111, the image keeps its size
        return msgspec.structs.replace(job(scale=1.0), infotext=reader.read_infotext(file, may_shorten=True))
    mixed_with = (second, share) if second is not None and share > 0.0 else None
    if not body.resize_mode:
        return job(scale=body.upscaling_resize or DEFAULT_SCALE, mixed_with=mixed_with)
    width, height = (
        DEFAULT_SIDE if side is None else side for side in (body.upscaling_resize_w, body.upscaling_resize_h)
    )
    message = "upscaling_resize_w and upscaling_resize_h are both 0; give at least one of them in pixels."
    check(width > 0 or height > 0, message, "upscaling_resize_w")
    if width and height and body.upscaling_crop is not False:
        return job(size=(width, height), mixed_with=mixed_with)
    picture = reader.decode_image(file, name=param)
    ratio = max(width / picture.width_px, height / picture.height_px)
    message = f"upscaling_resize_w enlarges the image {ratio:.1f} times; at most {MAX_FACTOR:g} times is possible."
    check(ratio <= MAX_FACTOR, message, "upscaling_resize_w")
    return job(scale=ratio, mixed_with=mixed_with)


def name_of(name: str | None) -> str | None:
    """Return the upscaler that a client names, or None for A1111's "None"."""
    text = (name or NONE).strip()
    return None if text.lower() == NONE else text


def answer_of(plan: UpscalePlan, files: Sequence[UpscaledFile]) -> bytes:
    """Format the answer; slow, so call it in a thread."""
    images = [base64.b64encode(result.file).decode("ascii") for result in files]
    labels = dict.fromkeys(f"{job.upscaler} to {job.target.width_px}x{job.target.height_px}" for job in plan.jobs)
    paragraphs = [", ".join(labels), *plan.warnings]
    many = isinstance(plan, ExtrasPlan) and plan.is_batch
    content: dict[str, Any] = {"html_info": "".join(f"<p>{html.escape(text)}</p>" for text in paragraphs)}
    return msgspec.json.encode(content | ({"images": images} if many else {"image": images[0]}))

"""``POST /v1/images/upscale``, and the work that A1111's ``extra-*-image`` routes share with it.

An image is enlarged by a network in the engine, tile by tile between the steps of other images, or by a filter in a
thread of this process. Every result passes the safety filter and gets provenance marks.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Final, Generic, Literal

import msgspec
from pydantic import ConfigDict, Field, PrivateAttr
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.bounds import check
from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.types import FILTERS, LANCZOS, NEAREST, ModelInfo, Picture, Priority
from diffserve.api.upscale_types import (
    MAX_FACTOR,
    Upscaled,
    UpscaleRequest,
    check_input_size,
    check_network_size,
    upscale_work,
)
from diffserve.media.decoders import ImageDecoder
from diffserve.media.images import ImageFormat
from diffserve.media.provenance import HEADER, Marks
from diffserve.media.upscaling import (
    FILTER_SCALE,
    FLATTENED,
    MAX_PASSES,
    TargetSize,
    blend,
    enlarge,
    kind_of,
    needs_another_run,
    target_size,
    upscale_label,
    with_upscale,
)
from diffserve.media.watermark import Kind
from diffserve.models.model_files import MAX_NAME_CHARS
from diffserve.models.upscalers import UpscalerFolders, default_upscaler, read_upscaler
from diffserve.service.admission import Backlog, Ticket
from diffserve.service.endpoint import RequestPlan
from diffserve.service.http.bodies import BodyT, WorkBody, show
from diffserve.service.http.forms import is_form, parse_fields, read_form
from diffserve.service.http.streams import Events
from diffserve.service.images.image_endpoint import ImageServiceEndpoint
from diffserve.service.images.image_history import HistoryWriter, upscaled_recipe
from diffserve.service.images.image_store import ImageUrls, new_name
from diffserve.service.images.inputs import image_bytes
from diffserve.service.images.schemas import AnyImage, Label
from diffserve.service.lifecycle import json_response, read_body
from diffserve.service.threads import ANSWERS, LISTINGS

UPLOADS: Final[dict[str, Any]] = {"image": {"type": "string", "format": "binary"}}
FACTOR_HELP: Final = "Enlargement; default: that of the upscaler, 2 for filters."
SIZE_HELP: Final = "WIDTHxHEIGHT in pixels instead of scale; the image is cropped to another aspect ratio."
NAME_HELP: Final = "Name from /v1/models, lanczos or nearest; default: the model's own upscaler."


class UpscaleBody(WorkBody):
    """Body of an upscaling request."""

    model_config = ConfigDict(title="UpscaleImageRequest")
    hints: ClassVar[Mapping[str, str]] = {"image": "upload a PNG, JPEG or WebP file"}

    image: AnyImage | None = None
    upscaler: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, description=NAME_HELP)] | None = None
    scale: Annotated[float, Field(gt=0.0, le=MAX_FACTOR, description=FACTOR_HELP)] | None = None
    size: Annotated[str, Field(description=SIZE_HELP)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: (
        Annotated[int, Field(ge=0, le=100, description="Quality of JPEG and WebP, 0 to 100.")] | None
    ) = None
    user: Label | None = None
    _uploads: dict[str, list[bytes]] = PrivateAttr(default_factory=dict)

    def with_uploads(self, files: dict[str, list[bytes]]) -> None:
        """Set the files of a form, by field."""
        self._uploads = files

    @property
    def file(self) -> bytes:
        """The image file. Raises InvalidRequest if there is none, or several."""
        files = [*self._uploads.get("image", [])]
        if self.image is not None:
            text = self.image if isinstance(self.image, str) else self.image.image_url
            message = "the image has no image_url; give a data URL, or a file_id."
            check(text is not None, message, "image")
            files.append(image_bytes(text or "", "image"))
        message = "image is missing; upload a PNG, JPEG or WebP file, or send it in base64."
        check(bool(files), message, "image", "missing_required_parameter")
        check(len(files) == 1, f"{len(files)} images were sent; send one.", "image")
        return files[0]


class UpscaleJob(msgspec.Struct, frozen=True, kw_only=True):
    """One image to upscale.

    Attributes:
        picture: The image.
        upscaler: Full name of a network, or a filter.
        target: Size of the result.
        kind: What the provenance marks say of the result; None: no model changed it.
        infotext: Parameters of the result; None: it has none.
        mixed_with: A second upscaler and the share of its result, if there is one.
        warnings: Warnings about the image.
    """

    picture: Picture
    upscaler: str
    target: TargetSize
    kind: Kind | None
    infotext: str | None
    mixed_with: tuple[str, float] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def work(self) -> float:
        """Cost in UNet rows."""
        return upscale_work(self.picture.width_px, self.picture.height_px)


class UpscaledFile(msgspec.Struct, frozen=True):
    """A finished image: its file, its size in pixels, and seconds of computation."""

    file: bytes
    width_px: int
    height_px: int
    device_s: float


class UpscalePlan(RequestPlan, frozen=True, kw_only=True):
    """A resolved request.

    Attributes:
        request_id: Id of the request.
        jobs: The images.
        priority: Priority in the engine.
        deadline_s: Seconds in which each image must be finished.
        image_format: Format of the files.
        compression: Quality of JPEG and WebP.
        marks: Provenance marks.
        urls: Creates URLs of images; None: images have none.
        history: Records images; None: they are not recorded.
    """

    request_id: str
    jobs: tuple[UpscaleJob, ...]
    priority: Priority
    deadline_s: float
    marks: Marks
    image_format: ImageFormat = "png"
    compression: int = 100
    urls: ImageUrls | None = None
    history: HistoryWriter | None = None

    @property
    def num_images(self) -> int:
        """Number of images that the request makes, for the quota of its key."""
        return len(self.jobs)

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the marks of the images; none if no image is marked."""
        return {HEADER: self.marks.header} if any(job.kind is not None for job in self.jobs) else {}


class Upscalers:
    """The upscalers that requests may name, and those of a request."""

    def __init__(self, info: ModelInfo) -> None:
        """Look up the upscalers of a server whose first model is ``info``."""
        self.folders = UpscalerFolders(info.upscaler_dir)
        self.default = default_upscaler(info.upscaler_dir, has_world=info.world is not None)

    def resolve(self, name: str | None) -> tuple[str, float]:
        """Return the full name of an upscaler and its enlargement. Raises InvalidRequest."""
        name = name or self.default
        if name.lower() in FILTERS:
            return name.lower(), FILTER_SCALE
        full_name, path = self.folders.find(name)
        return full_name, float(read_upscaler(path).shape.scale)


def read_job(
    file: bytes,
    reader: ImageDecoder,
    upscalers: Upscalers,
    *,
    upscaler: str | None,
    scale: float | None = None,
    size: tuple[int, int] | None = None,
    mixed_with: tuple[str, float] | None = None,
    param: str = "image",
) -> UpscaleJob:
    """Read an image and resolve how it is upscaled; takes a while, so call it in a thread.

    Args:
        file: A PNG, JPEG or WebP file.
        reader: Decodes it.
        upscalers: The upscalers of the server.
        upscaler: Name of the upscaler; None: the default one.
        scale: Enlargement.
        size: Width and height instead.
        mixed_with: Name of a second upscaler and the share of its result.
        param: Field of the image, for errors and warnings.

    Raises:
        InvalidRequest: The image or one of the values cannot be used.
    """
    name, network_scale = upscalers.resolve(upscaler)
    second = None if mixed_with is None else (upscalers.resolve(mixed_with[0])[0], mixed_with[1])
    picture = reader.decode_image(file, name=param)
    width, height = picture.width_px, picture.height_px
    networks = [each for each in (name, second and second[0]) if each and each not in FILTERS]
    if networks:
        check_input_size(width, height)
        for each in networks:
            check_network_size(each, round(upscalers.resolve(each)[1]), width, height)
    target = target_size(width, height, scale=scale, size=size, default_scale=network_scale)
    kind = kind_of(reader.examine(file))
    factor = max(target.width_px / width, target.height_px / height)
    label = upscale_label(name if second is None else f"{name} + {second[0]} {second[1]:g}", round(factor, 3))
    return UpscaleJob(
        picture=picture,
        upscaler=name,
        target=target,
        kind=kind or ("composite" if networks else None),
        infotext=with_upscale(reader.read_infotext(file, may_shorten=True), label),
        mixed_with=second,
        warnings=(f"{param} {FLATTENED}",) if reader.has_transparency(file, name=param) else (),
    )


class UpscalingEndpoint(ImageServiceEndpoint[BodyT, UpscalePlan], Generic[BodyT]):
    """Base class of endpoints that upscale images."""

    @property
    def _upscalers(self) -> Upscalers:
        return Upscalers(self._service.model(None))

    @property
    def _backlog(self) -> Backlog:
        return self._admission.images

    def _admit(self, plan: UpscalePlan, client: str) -> AbstractContextManager[Ticket]:
        work = sum(job.work for job in plan.jobs)
        return self._backlog.entered(client, work, len(plan.jobs), priority=plan.priority)

    def _events(self, plan: UpscalePlan, ticket: Ticket) -> Events:
        raise NotImplementedError("upscaling is not streamed")  # its bodies never set is_stream

    async def _run(self, plan: UpscalePlan, ticket: Ticket) -> list[UpscaledFile]:
        """Upscale all images of a plan, one after the other, and encode them.

        Raises:
            DiffserveError: An image cannot be upscaled, or the safety filter blocks it.
        """
        started_s, files = time.monotonic(), []
        for index, job in enumerate(plan.jobs):
            left_s = max(0.001, plan.deadline_s - (time.monotonic() - started_s))
            picture, device_s = await self._upscale(plan, job, f"{plan.request_id}-{index}", left_s)
            file = await self._service.encode_in_thread(len(picture.data), self._file, plan, job, picture)
            files.append(UpscaledFile(file, picture.width_px, picture.height_px, device_s))
            ticket.advance(index, 1.0)
            ticket.count(_counted(plan, job, device_s))
        return files

    async def _upscale(
        self, plan: UpscalePlan, job: UpscaleJob, request_id: str, left_s: float
    ) -> tuple[Picture, float]:
        picture, device_s = await self._by(job.upscaler, plan, job, request_id, left_s)
        if job.mixed_with is None:
            return picture, device_s
        name, share = job.mixed_with
        second, second_s = await self._by(name, plan, job, f"{request_id}-second", left_s)
        return await ANSWERS.run(blend, picture, second, share), device_s + second_s

    async def _by(
        self, upscaler: str, plan: UpscalePlan, job: UpscaleJob, request_id: str, left_s: float
    ) -> tuple[Picture, float]:
        """Return the image of a job as one upscaler enlarges it, and the seconds in the engine."""
        picture, device_s, num_passes = job.picture, 0.0, 0
        while upscaler not in FILTERS and num_passes < MAX_PASSES:
            request = UpscaleRequest(
                image=picture,
                upscaler=upscaler,
                deadline_s=left_s,
                priority=plan.priority,
                request_id=f"{request_id}-{num_passes}",
            )
            done = await self._in_engine(request)
            picture, device_s, num_passes = done.image, device_s + done.device_s, num_passes + 1
            if not needs_another_run(picture, job.target, done.scale):
                break
        filter_name = NEAREST if upscaler == NEAREST else LANCZOS
        return await ANSWERS.run(enlarge, picture, *job.target, filter_name), device_s

    async def _in_engine(self, request: UpscaleRequest) -> Upscaled:
        async with self._engine.submit(request, is_whole=True) as job:
            async for event in job:
                if isinstance(event, Upscaled):
                    return event
        raise DiffserveError("the engine finished without an upscaled image.")

    def _file(self, plan: UpscalePlan, job: UpscaleJob, picture: Picture) -> bytes:
        """Check, mark and encode a result; takes a while, so call it in a thread."""
        safety = self._service.checks.safety
        if safety is not None:
            safety.check_picture(picture)
        return plan.marks.write(
            plan.marks.mark(picture, job.kind),
            kind=job.kind,
            image_format=plan.image_format,
            quality=plan.compression,
            infotext=job.infotext,
        )


def _counted(plan: UpscalePlan, job: UpscaleJob, device_s: float) -> Upscaled:
    """Return the event by which a finished image counts as used, without its pixels."""
    empty = Picture(width_px=1, height_px=1, data=bytes(3))
    return Upscaled(
        request_id=plan.request_id, image=empty, upscaler=job.upscaler, scale=1, device_s=device_s, waited_s=0.0
    )


class UpscaleEndpoint(UpscalingEndpoint[UpscaleBody]):
    """``POST /v1/images/upscale``, with a JSON body or a form."""

    body = UpscaleBody

    async def _read(self, request: Request) -> UpscaleBody:
        if not is_form(request):
            return await read_body(request, UpscaleBody)
        form = await read_form(request, max_files=2)
        if unknown := form.files.keys() - {"image"}:
            name = min(unknown)
            raise InvalidRequest(f"{name[:64]!r} is not a file field; upload the file as image.", param=name[:64])
        body = parse_fields(UpscaleBody, form.fields)
        body.with_uploads(form.files)
        return body

    async def _plan(self, body: UpscaleBody, request: Request, client: str) -> UpscalePlan:
        size = _size_of(body.size)
        urls = self._service.urls(request)
        message = "response_format is 'url'; this server stores no images, ask for 'b64_json'."
        has_urls = urls is not None and self._config.url_pictures_bytes > 0
        check(body.response_format != "url" or has_urls, message, "response_format", "unsupported_value")
        await self._service.fill(request, body)
        upscalers = await LISTINGS.run(lambda: self._upscalers)

        def read(reader: ImageDecoder) -> UpscaleJob:
            return read_job(body.file, reader, upscalers, upscaler=body.upscaler, scale=body.scale, size=size)

        job = await self._service.decode(request, client, read)
        return UpscalePlan(
            request_id=request.state.request_id,
            jobs=(job,),
            **body.urgency(self._config.request_timeout_s),
            marks=self._service.checks.marks,
            image_format=body.output_format or "png",
            compression=100 if body.output_compression is None else body.output_compression,
            urls=urls if body.response_format == "url" else None,
            history=self._service.history_writer(request),
            warnings=(*body.warnings, *job.warnings),
            price=self._config.price,
        )

    async def _answer(self, plan: UpscalePlan, ticket: Ticket) -> Response:
        files = await self._run(plan, ticket)
        content = await ANSWERS.run(answer_of, plan, files)
        return json_response(content, [*plan.warnings, *(plan.urls.warnings if plan.urls else ())])


def answer_of(plan: UpscalePlan, files: Sequence[UpscaledFile]) -> bytes:
    """Record the image, and format the answer in the form of OpenAI's image answers; slow, so call it in a thread."""
    result, job = files[0], plan.jobs[0]
    name, size = new_name(plan.image_format), f"{result.width_px}x{result.height_px}"
    url = {} if plan.urls is None else {"url": plan.urls.store(result.file, name)}
    history_id = {}
    if plan.history is not None:
        body = {"upscaler": job.upscaler, "size": size, "output_format": plan.image_format}
        recipe = upscaled_recipe(job.infotext or "", plan.request_id, body, (result.width_px, result.height_px))
        history_id = {"history_id": plan.history.add_upscaled(recipe, job.upscaler, result.file, name)}
    document = {
        "id": plan.request_id,
        "created": int(time.time()),
        "data": [url | {"b64_json": base64.b64encode(result.file).decode("ascii")} | history_id],
        "background": "opaque",
        "output_format": plan.image_format,
        "size": size,
        "upscaler": job.upscaler,
        "scale": round(result.width_px / job.picture.width_px, 4),
        "usage": plan.spent(sum(file.device_s for file in files)),
        "warnings": [*plan.warnings, *(plan.urls.warnings if plan.urls else ())],
    }
    return msgspec.json.encode(document)


def _size_of(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    if match is None:
        message = f"size is {show(text)}; write WIDTHxHEIGHT in pixels, such as 1024x768."
        raise InvalidRequest(message, param="size", code="invalid_size")
    return int(match[1]), int(match[2])

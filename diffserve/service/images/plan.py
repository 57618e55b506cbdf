"""The plan of an image request: what the engine generates, and how the finished images are delivered.

``plan_images`` is the one function that resolves a body; the HTTP endpoints, batches and the command line share it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

import msgspec

from diffserve.api.bounds import check
from diffserve.api.errors import InvalidRequest
from diffserve.api.prompt_syntax import A1111, in_a1111
from diffserve.api.sizes import SizePlan, fit_controls, fit_references, plan_hires, plan_size
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageResult, ModelInfo, Picture
from diffserve.media import images
from diffserve.media.decoders import ImageReader
from diffserve.media.images import ImageFormat
from diffserve.media.provenance import HEADER, Marks
from diffserve.media.start_picture import StartPicture
from diffserve.media.watermark import Kind
from diffserve.models.learned_samplers import num_steps_of
from diffserve.models.profiles import begin_with_loras
from diffserve.models.templates import Wildcards, template_fields
from diffserve.service.endpoint import RequestPlan
from diffserve.service.engine.capture_files import CaptureFile
from diffserve.service.http.bodies import show
from diffserve.service.images.image_history import HistoryWriter
from diffserve.service.images.image_store import ImageUrls
from diffserve.service.images.inputs import Start, diffusion_of, image_bytes, refuse_infotext, rewriting_of
from diffserve.service.images.schemas import ControlNetChoice, GenerateBody, ReferenceChoice
from diffserve.service.models import URL_BY_DEFAULT
from diffserve.service.safety import Safety
from diffserve.service.texts.schemas import RewriterMode
from diffserve.settings.config import ServeConfig
from diffserve.settings.quality import AUTO, QUALITIES, is_quality, with_quality

NO_MARKS = Marks()
PREVIEWS_WITHHELD = "previews are withheld: the safety filter of this server judges finished images only."


class ImagePlan(RequestPlan, frozen=True, kw_only=True):
    """A resolved image request: the engine's request, and how its images are delivered.

    Attributes:
        request: The request of the engine.
        size: The delivered size and the generated size.
        image_format: File format of the images.
        compression: Quality of JPEG and WebP files, 0 to 100.
        quality: OpenAI's ``quality`` of the body.
        safety_identifier: The client's identifier of its user, returned in the answer.
        has_progress: Whether a stream reports progress.
        start: The start image, which is restored around the mask; None: generation starts from noise.
        kind: What the provenance metadata says of the images.
        marks: Watermark and metadata.
        safety: Filter of finished images; None: no filter.
        urls: Creates URLs of images; None: images are not stored.
        history: Records images; None: no history.
        capture_file: Keeps the state of unfinished images of a job; None: it is not kept.
    """

    request: GenerationRequest
    size: SizePlan
    image_format: ImageFormat
    compression: int
    quality: str
    safety_identifier: str | None
    has_progress: bool = False
    start: StartPicture | None = None
    kind: Kind = "generated"
    marks: Marks = NO_MARKS
    safety: Safety | None = None
    urls: ImageUrls | None = None
    history: HistoryWriter | None = None
    capture_file: CaptureFile | None = None

    @property
    def num_images(self) -> int:
        """Number of images that the request makes, for the quota of its key."""
        return self.request.num_images

    @property
    def num_pixels(self) -> int:
        """Pixels of a delivered image."""
        return self.size.width_px * self.size.height_px

    def deliver(self, picture: Picture) -> Picture:
        """Return a generated image at the delivered size, without a watermark."""
        sized = self.size.deliver(picture)
        return sized if self.start is None else self.start.lay_around(sized)

    def file(self, result: ImageResult, infotext: str) -> bytes:
        """Filter, watermark and encode a generated image; takes a while, so call it in a thread.

        Raises:
            ModerationBlocked: The safety filter blocks the image.
            EngineUnavailable: The safety filter does not answer.
        """
        if self.safety is not None:
            self.safety.check(result)
        mark, sized = partial(self.marks.mark, kind=self.kind), self.size.deliver(result.picture)
        return self._encode(mark(sized) if self.start is None else self.start.lay_around(sized, mark), infotext)

    def preview_file(self, picture: Picture) -> bytes:
        """Watermark and encode a preview at its own size."""
        return self._encode(self.marks.mark(picture, self.kind))

    def _encode(self, marked: Picture, infotext: str | None = None) -> bytes:
        return self.marks.write(
            marked, kind=self.kind, image_format=self.image_format, quality=self.compression, infotext=infotext
        )

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the marks of the images."""
        return {HEADER: self.marks.header}

    @property
    def url_warnings(self) -> list[str]:
        """Warnings about images that could not be stored for their URLs."""
        return [] if self.urls is None else self.urls.warnings


def plan_images(
    body: GenerateBody,
    info: ModelInfo,
    config: ServeConfig,
    request_id: str,
    *,
    client: str = "",
    share: float = 1.0,
    rewriter: RewriterMode = "off",
    start: Start | None = None,
    reader: ImageReader = images,
    kind: Kind | None = None,
    marks: Marks = NO_MARKS,
    safety: Safety | None = None,
    urls: ImageUrls | None = None,
    history: HistoryWriter | None = None,
    preview_every: int | None = None,
    limit_s: float | None = None,
    warnings: tuple[str, ...] = (),
) -> ImagePlan:
    """Resolve an image request; takes a while with images, so call it in a thread then.

    Args:
        body: What the client asks for.
        info: The model that generates the images.
        config: Server settings.
        request_id: Id of the request.
        client: The client for fair scheduling.
        share: Scheduling weight of the client.
        rewriter: Whether prompts are rewritten if the body does not say.
        start: The start image; its size is the default size.
        reader: Decodes image files.
        kind: What the provenance metadata says of the images; None: it follows from ``start``.
        marks: Watermark and metadata of the images.
        safety: Filter of finished images; None: no filter.
        urls: Creates URLs of images if the body asks for them; None: images are not stored.
        history: Records the images; None: no history.
        preview_every: Steps between previews; None: as the body asks.
        limit_s: Longest time to finish in seconds; None: ``request_timeout_s`` of ``config``.
        warnings: Further sentences for the client.

    Raises:
        InvalidRequest: The body asks for something that is not available.
    """
    _refuse_unsupported(body, config)
    refuse_infotext(body)
    sentences: list[str] = []
    low, high = config.min_size_px, config.max_size_px
    is_tiled = bool(getattr(body, "tile_size", None))
    if start is None:
        size = plan_size(info, _size(body), min_side_px=low, max_side_px=high, is_tiled=is_tiled)
    else:
        sides = {"min_side_px": low, "max_side_px": high}
        size = start.picture.plan(info, _size(body), **sides, may_shrink=True, is_tiled=is_tiled)
        sentences += start.warnings
    if size.warning is not None:
        sentences.append(size.warning)
    quality = None if body.quality is None else _quality(body.quality, sentences)
    if body.partial_images and not body.stream:
        sentences.append("partial_images has no effect without stream.")
    sentences += body.warnings
    control_images = _decoded(body.controlnets, "controlnets", reader)
    reference_images = _decoded(body.references, "references", reader)
    diffusion = diffusion_of(body, control_images, reference_images)
    if start is None:
        size = plan_hires(info, size, diffusion, min_side_px=low, max_side_px=high)
    generated_size = size.start_px
    init, mask = None, None
    if start is not None:
        diffusion = _with_start(diffusion, start, has_prompt=bool(body.prompt.strip()))
        init, mask = start.picture.fitted(*generated_size)
    is_template = body.template not in (None, "off")
    rewriting = rewriting_of(body.prompt_rewriter, rewriter) if body.prompt.strip() else None
    if is_template:
        message = f"template is {body.template!r}; it cannot be combined with prompt_rewriter: leave one of them out."
        check(body.prompt_rewriter in (None, "off"), message, "template")
        rewriting = None
    syntax = body.prompt_syntax or A1111
    prompts, template_warnings = template_fields(
        body.prompt,
        body.template or "off",
        None if body.seed in (None, -1) else body.seed,
        body.best_of or body.n or 1,
        Wildcards(info.wildcard_dir),
        str if rewriting else partial(in_a1111, syntax=syntax),
    )
    sentences += template_warnings
    request = GenerationRequest(
        request_id=request_id,
        **prompts,
        negative_prompt=in_a1111(body.negative_prompt or "", syntax),
        width_px=generated_size[0],
        height_px=generated_size[1],
        hires_px=size.hires_px,
        control_images=fit_controls(diffusion.controlnets, control_images, size.recorded_px, generated_size),
        reference_images=fit_references(reference_images),
        num_images=body.n or 1,
        best_of=body.best_of,
        diffusion=diffusion,
        init_image=init,
        mask_image=mask,
        rewriting=rewriting,
        **body.urgency(config.request_timeout_s if limit_s is None else limit_s),
        refuses_late=body.deadline_s is not None,  # an unreachable limit of the server itself refuses no request
        model=info.model_id,
        client=client,
        share=share,
    )
    request, quality_warnings = with_quality(request, quality, info)
    sentences += quality_warnings
    if preview_every is None:
        has_previews = body.stream and body.partial_images
        preview_every = _preview_every(request, info, body.partial_images or 0) if has_previews else 0
    sentences += warnings
    if preview_every and safety is not None:
        preview_every = 0
        sentences.append(PREVIEWS_WITHHELD)
    if preview_every:  # not known before: the request reads adapters from its prompt, and they set the number of steps
        request = msgspec.structs.replace(request, preview_every=preview_every)
    return ImagePlan(
        request=request,
        size=size,
        image_format=body.output_format or "png",
        compression=100 if body.output_compression is None else body.output_compression,
        quality=quality or AUTO,
        safety_identifier=body.safety_identifier or body.user,
        warnings=tuple(sentences),
        is_stream=bool(body.stream),
        has_progress=body.progress is not False,
        start=None if start is None else start.picture,
        kind=kind or ("generated" if start is None else "composite"),
        price=config.price,
        marks=marks,
        safety=safety,
        urls=urls if _wants_urls(body) and config.url_pictures_bytes > 0 else None,
        history=history,
    )


def _with_start(diffusion: DiffusionParams, start: Start, *, has_prompt: bool) -> DiffusionParams:
    """Return the parameters for a start image; without a prompt there is no guidance."""
    changed = msgspec.structs.replace(diffusion, strength=start.strength)
    return changed if has_prompt else msgspec.structs.replace(changed, guidance_scale=1.0)


def _wants_urls(body: GenerateBody) -> bool:
    """Return whether the client wants URLs; as at OpenAI, clients of older models get them by default."""
    return body.response_format == "url" or (body.response_format is None and body.model in URL_BY_DEFAULT)


def _refuse_unsupported(body: GenerateBody, config: ServeConfig) -> None:
    message = "response_format is 'url'; this server stores no images, ask for 'b64_json'."
    check(
        body.response_format != "url" or config.url_pictures_bytes > 0, message, "response_format", "unsupported_value"
    )
    message = "background is 'transparent'; this model generates opaque images, ask for 'opaque' or 'auto'."
    check(body.background != "transparent", message, "background", "unsupported_value")


def _preview_every(request: GenerationRequest, info: ModelInfo, num_previews: int) -> int:
    """Return the steps between previews that spread at most ``num_previews`` evenly."""
    params, _ = begin_with_loras(request.diffusion)
    num_steps = num_steps_of(params, info)
    num_run = num_steps if request.init_image is None else math.ceil(num_steps * params.strength)
    return math.ceil(num_run / (num_previews + 1))


def _size(body: GenerateBody) -> tuple[int, int] | None:
    """Return (width, height) in pixels, or None for the native size of the model."""
    size = None
    if body.size is not None and body.size != "auto":
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", body.size)
        if match is None:
            raise InvalidRequest(
                f"size is {show(body.size)}; write WIDTHxHEIGHT in pixels, such as 512x512, or auto.",
                param="size",
                code="invalid_size",
            )
        size = (int(match[1]), int(match[2]))
    if body.width is None and body.height is None:
        return size
    if body.width is None or body.height is None:
        raise InvalidRequest("give width and height together, or size.", param="size", code="invalid_size")
    message = f"size is {body.size} but width and height are {body.width} and {body.height}; give one of them."
    check(size in (None, (body.width, body.height)), message, "size", "invalid_size")
    return body.width, body.height


def _decoded(
    choices: Sequence[ControlNetChoice | ReferenceChoice] | None, field: str, reader: ImageReader
) -> tuple[Picture, ...]:
    """Decode the images of the ControlNets or references in ``field`` of a body, at their own sizes."""
    named_images = [(choice.image, f"{field}[{index}].image") for index, choice in enumerate(choices or ())]
    return tuple(reader.decode_image(image_bytes(image, name), name=name) for image, name in named_images)


def _quality(quality: str, warnings: list[str]) -> str:
    if is_quality(quality):
        return quality
    warnings.append(f"quality {show(quality)} is unknown, so auto was used; choose from {', '.join(QUALITIES)}.")
    return AUTO

"""From a body to what the engine is asked for, and how its pictures are to be delivered."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import NamedTuple

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.prompt_syntax import A1111, in_a1111
from diffserve.api.sizes import SizePlan, fit_controls, plan_size
from diffserve.api.types import DiffusionParams, GenerationRequest, ImageResult, ModelInfo, Picture
from diffserve.media import images
from diffserve.media.decoders import ImageReader
from diffserve.media.images import ImageFormat
from diffserve.media.provenance import HEADER, Marks
from diffserve.media.start_picture import StartPicture
from diffserve.media.watermark import Kind
from diffserve.models.few_step import begin_with_loras
from diffserve.service.endpoint import Checked
from diffserve.service.http.bodies import show
from diffserve.service.images.kept_pictures import PictureUrls
from diffserve.service.images.parameters import diffusion_of
from diffserve.service.images.pictures_in import picture_bytes
from diffserve.service.images.remembering import Remembered
from diffserve.service.images.repeating import refuse_infotext
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.models import URL_BY_DEFAULT
from diffserve.service.safety import Safety
from diffserve.service.texts.rewrites import rewriting_of
from diffserve.service.texts.schemas import RewriterMode
from diffserve.settings.config import ServeConfig
from diffserve.settings.quality import AUTO, QUALITIES, is_quality, steps_of


class Start(NamedTuple):
    """What a painting starts from, how much of it is repainted, and what the caller should know."""

    picture: StartPicture
    strength: float
    warnings: tuple[str, ...] = ()


class CheckedImages(Checked, frozen=True, kw_only=True):
    """A checked body: the engine's request, and how its pictures are to be delivered.

    history where they are remembered; ``None``: nowhere
    start   what they begin from, which is laid around them where a mask says so
    kind    what they say of themselves, and ``marks``, how; ``safety``: what judges them before
    events  what the events of a stream are called by
    asked   the body, for a protocol that tells it again
    """

    request: GenerationRequest
    plan: SizePlan
    image_format: ImageFormat
    compression: int
    quality: str
    safety_identifier: str | None
    has_progress: bool = False
    has_urls: bool = False
    urls: PictureUrls | None = None
    history: Remembered | None = None
    start: StartPicture | None = None
    kind: Kind = "generated"
    marks: Marks = Marks()
    safety: Safety | None = None
    events: str = ""
    asked: GenerateBody | None = None

    @property
    def num_pixels(self) -> int:
        """Of each of its pictures."""
        return self.plan.width_px * self.plan.height_px

    def deliver(self, picture: Picture) -> Picture:
        """What was painted, as the caller gets it, but for its mark."""
        sized = self.plan.deliver(picture)
        return sized if self.start is None else self.start.lay_around(sized)

    def file(self, result: ImageResult, infotext: str) -> bytes:
        """What was painted, judged, marked and written as the caller gets it. Takes a while: call it in a thread.

        Raises ModerationBlocked, or EngineUnavailable, for what nobody shall see.
        """
        if self.safety is not None:
            self.safety.check(result)
        mark, sized = partial(self.marks.mark, kind=self.kind), self.plan.deliver(result.picture)
        return self._written(mark(sized) if self.start is None else self.start.lay_around(sized, mark), infotext)

    def preview_file(self, picture: Picture) -> bytes:
        """The same of a picture of the way, at its own size."""
        return self._written(self.marks.mark(picture, self.kind))

    def _written(self, marked: Picture, infotext: str | None = None) -> bytes:
        return self.marks.write(
            marked, kind=self.kind, image_format=self.image_format, quality=self.compression, infotext=infotext
        )

    @property
    def headers(self) -> dict[str, str]:
        """What its pictures bear."""
        return {HEADER: self.marks.header}

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
    share: float = 1.0,
    rewriter: RewriterMode = "off",
    start: Start | None = None,
    reader: ImageReader = images,
) -> CheckedImages:
    """What ``body`` asks for, in the terms of the model that it names; ``rewriter`` where it says nothing of one.

    ``start``: a picture to begin from; the size is its own where the body gives none. ``reader`` reads image files.

    Raises InvalidRequest for what it cannot have. Takes a while where it brings pictures: call it in a thread then.
    """
    _refuse_unsupported(body, config)
    refuse_infotext(body)
    warnings: list[str] = []
    low, high = config.min_size_px, config.max_size_px
    if start is None:
        plan = plan_size(info, _size(body), min_side_px=low, max_side_px=high)
    else:
        plan = start.picture.plan(info, _size(body), min_side_px=low, max_side_px=high, may_shrink=True)
        warnings += start.warnings
    if plan.warning is not None:
        warnings.append(plan.warning)
    quality = _quality(body, warnings)
    if body.partial_images and not body.stream:
        warnings.append("partial_images changes nothing without stream.")
    warnings += body.warnings
    control_images = _control_images(body, reader)
    diffusion = diffusion_of(body, None if quality == AUTO else steps_of(quality, info), control_images)
    painted = plan.paint_width_px, plan.paint_height_px
    init, mask = None, None
    if start is not None:
        diffusion = _from_picture(diffusion, start, has_words=bool(body.prompt.strip()))
        init, mask = start.picture.fitted(*painted)
    rewriting = rewriting_of(body.prompt_rewriter, rewriter) if body.prompt.strip() else None
    syntax = body.prompt_syntax or A1111
    request = GenerationRequest(
        request_id=request_id,
        prompt=body.prompt if rewriting else in_a1111(body.prompt, syntax),
        negative_prompt=in_a1111(body.negative_prompt or "", syntax),
        width_px=plan.paint_width_px,
        height_px=plan.paint_height_px,
        control_images=fit_controls(diffusion.controlnets, control_images, (plan.width_px, plan.height_px), painted),
        num_images=body.n or 1,
        best_of=body.best_of,
        seed=None if body.seed in (None, -1) else body.seed,
        diffusion=diffusion,
        init_image=init,
        mask_image=mask,
        rewriting=rewriting,
        **body.urgency(config.request_timeout_s),
        refuses_late=body.deadline_s is not None,  # the server's own limit is no wish of anybody
        model=info.model_id,
        client=client,
        share=share,
    )
    if body.stream and body.partial_images:
        every = _preview_every(request, info, body.partial_images)
        request = msgspec.structs.replace(request, preview_every=every)
    return CheckedImages(
        request=request,
        plan=plan,
        image_format=body.output_format or "png",
        compression=100 if body.output_compression is None else body.output_compression,
        quality=quality,
        safety_identifier=body.safety_identifier or body.user,
        warnings=tuple(warnings),
        is_stream=bool(body.stream),
        has_progress=body.progress is not False,
        has_urls=_wants_urls(body) and config.url_pictures_bytes > 0,
        start=None if start is None else start.picture,
        kind="generated" if start is None else "composite",
        price=config.price,
    )


def _from_picture(diffusion: DiffusionParams, start: Start, *, has_words: bool) -> DiffusionParams:
    """Without words there is nothing to be guided to."""
    changed = msgspec.structs.replace(diffusion, strength=start.strength)
    return changed if has_words else msgspec.structs.replace(changed, guidance_scale=1.0)


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


def _preview_every(request: GenerationRequest, info: ModelInfo, num_previews: int) -> int:
    """Steps between previews, so that at most so many are spread evenly over the way."""
    params, _ = begin_with_loras(request.diffusion)
    num_steps = params.num_steps or info.default_num_steps
    painted = num_steps if request.init_image is None else math.ceil(num_steps * params.strength)
    return math.ceil(painted / (num_previews + 1))


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


def _control_images(body: GenerateBody, reader: ImageReader) -> tuple[Picture, ...]:
    """Return the pictures of the ControlNets of ``body`` at their own sizes."""
    chosen = enumerate(body.controlnets or ())
    named = [(one.image, f"controlnets[{place}].image") for place, one in chosen]
    return tuple(reader.decode_image(picture_bytes(image, name), name=name) for image, name in named)


def _quality(body: GenerateBody, warnings: list[str]) -> str:
    quality = body.quality or AUTO
    if is_quality(quality):
        return quality
    warnings.append(f"quality {show(quality)} is unknown and was taken as auto; choose from {', '.join(QUALITIES)}.")
    return AUTO

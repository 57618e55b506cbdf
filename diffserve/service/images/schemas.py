"""Bodies of ``POST /v1/images/generations``, ``edits`` and ``variations``, as JSON or as a form."""

from __future__ import annotations

from collections.abc import Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, create_model

from diffserve.api.fields import MAX_GUIDANCE, MAX_SEED, REQUEST_FIELDS, SHARED_FIELDS, RequestField, TemplateMode
from diffserve.api.micro_conditioning import MAX_SIDE
from diffserve.api.prompt_syntax import PromptSyntax
from diffserve.api.types import MAX_IMAGES, MAX_PROMPT_CHARS, SWITCH_AT
from diffserve.media.infotext import MAX_BYTES
from diffserve.models.controlnets import (
    CANNY_THRESHOLDS,
    MAX_CONTROLNETS,
    MAX_RESOLUTION,
    MAX_THRESHOLD,
    PASSED_THROUGH,
    ResizeMode,
)
from diffserve.models.controlnets import MAX_SCALE as MAX_CONTROLNET_SCALE
from diffserve.models.loras import MAX_LORAS, MAX_SCALE
from diffserve.models.model_files import MAX_NAME_CHARS as MAX_ADAPTER_CHARS
from diffserve.models.references import MAX_REFERENCES
from diffserve.models.references import MAX_SCALE as MAX_REFERENCE_SCALE
from diffserve.service.http.bodies import Ignored, WorkBody
from diffserve.service.texts.schemas import RewriterChoice, RewriterMode

MAX_STEPS = 1000
MAX_NAME_CHARS = 64

REFUSED: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "latents", "kwargs", "extra_body"),
        "tensors and raw pipeline arguments are not accepted over HTTP.",
    ),
    **dict.fromkeys(
        ("image", "images", "init_image", "init_images", "mask", "strength", "denoising_strength"),
        "this endpoint takes no images; use /v1/images/edits.",
    ),
    **dict.fromkeys(
        ("callback_url", "webhook", "webhook_url"), "the server does not send callbacks; wait for the response."
    ),
}

Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Guidance = Annotated[float, Field(ge=0.0, le=MAX_GUIDANCE)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Threshold = Annotated[float, Field(ge=0.0, le=MAX_THRESHOLD)]
Syntax = Annotated[
    PromptSyntax,
    Field(description="a1111: brackets set the weights of words; ignored if the prompt is rewritten first."),
]
Seed = Annotated[
    int, Field(ge=-1, le=MAX_SEED, description="Seed of the first image; -1 or null: random. The response contains it.")
]
HOW_MANY: Final = "draft, standard, fine, max or auto (low, medium, high): sampler and steps, unless they are given."
Quality = Annotated[str, Field(max_length=256, description=HOW_MANY)]
FOR_AN_HOUR: Final = "url: a URL that is valid for an hour; the default of dall-e-2 and dall-e-3."
Delivery = Annotated[Literal["b64_json", "url"], Field(description=FOR_AN_HOUR)]
INFOTEXT: Final = "Generation parameters as text; used for fields that the body omits."
PAINTED: Final = REQUEST_FIELDS["best_of"].help
FIRST: Final = "Whether the language model rewrites the prompt first."
Rewriter = Annotated[RewriterMode | RewriterChoice, Field(description=FIRST)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Label = Annotated[str, Field(max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]

Edge = Annotated[int, Field(ge=0, le=MAX_SIDE)]
CropPair = Annotated[list[Edge], Field(min_length=2, max_length=2)]
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
LoraScale = Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)]
SizePair = Annotated[list[Side], Field(min_length=2, max_length=2)]


class LoraChoice(BaseModel):
    """Adapter, by a name that /v1/models lists; the prompt may also name one: <lora:NAME:SCALE>."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_CHARS)]
    scale: LoraScale = 1.0
    unet_scale: (
        Annotated[LoraScale, Field(description="Scale for the UNet; scale is then for the text encoders only.")] | None
    ) = None


class ControlNetChoice(BaseModel):
    """ControlNet, by a name that /v1/models lists, with a control image of the generated size."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_CHARS)]
    image: Annotated[str, Field(min_length=1, description="A PNG, JPEG or WebP in base64, or a data URL of it.")]
    scale: Annotated[float, Field(ge=0.0, le=MAX_CONTROLNET_SCALE)] = 1.0
    start: Annotated[Fraction, Field(description="Fraction of the steps at which the ControlNet starts.")] = 0.0
    end: Annotated[Fraction, Field(description="Fraction of the steps at which the ControlNet stops.")] = 1.0
    preprocessor: Annotated[str, Field(description="canny: detect edges in the image first.")] = PASSED_THROUGH
    resize: Annotated[
        bool | ResizeMode,
        Field(description="true: resize an image of the same aspect ratio; a mode: of any aspect ratio."),
    ] = False
    thresholds: Annotated[tuple[Threshold, Threshold], Field(description="Low and high threshold of canny.")] = (
        CANNY_THRESHOLDS
    )
    resolution: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_RESOLUTION,
            description="Shorter side at which canny detects edges; 0: that of the generated image.",
        ),
    ] = 0


class ReferenceChoice(BaseModel):
    """Reference image, read by an IP-Adapter that /v1/models lists."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[
        str, Field(max_length=MAX_ADAPTER_CHARS, description="IP-Adapter; empty: the only one for the model.")
    ] = ""
    image: Annotated[str, Field(min_length=1, description="A PNG, JPEG or WebP in base64, or a data URL of it.")]
    scale: Annotated[float, Field(ge=0.0, le=MAX_REFERENCE_SCALE)] = 1.0
    start: Annotated[Fraction, Field(description="Fraction of the steps at which the reference starts.")] = 0.0
    end: Annotated[Fraction, Field(description="Fraction of the steps at which the reference stops.")] = 1.0


class SizesChoice(BaseModel):
    """Size conditioning of SDXL in pixels: sizes as [width, height], crops as [left, top]."""

    model_config = ConfigDict(strict=True, extra="forbid")

    original_size: SizePair | None = None
    crop: CropPair | None = None
    target_size: SizePair | None = None
    negative_original_size: SizePair | None = None
    negative_crop: CropPair | None = None
    negative_target_size: SizePair | None = None


def annotation_of(field: RequestField) -> Any:
    """Return the pydantic annotation of an optional field, with the bounds and the help text of the field table."""
    low = "gt" if field.is_minimum_excluded else "ge"
    bounds: dict[str, Any] = {} if field.minimum is None else {low: field.minimum, "le": field.maximum}
    if field.type == tuple[float, float]:
        part = Annotated[float, Field(**bounds)]
        return Annotated[GenericAlias(tuple, (part, part)), Field(description=field.help)] | None
    return Annotated[field.type, Field(**bounds, description=field.help)] | None


if TYPE_CHECKING:
    SharedBody = WorkBody
else:
    SharedBody = create_model(
        "SharedBody",
        __base__=WorkBody,
        **{name: (annotation_of(field), None) for name, field in SHARED_FIELDS.items()},
    )


class GenerateBody(SharedBody):
    """Body of an image generation: OpenAI's fields, those of other servers, and the shared ones of the field table."""

    model_config = ConfigDict(title="CreateImageRequest")
    hints: ClassVar[Mapping[str, str]] = {"prompt": "describe the image"}
    refused: ClassVar[Mapping[str, str]] = REFUSED

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
    model: Annotated[str, Field(description="A name from /v1/models; omitted: the first model.")] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES, description="Number of images; image i uses seed + i.")] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_IMAGES, description=PAINTED)] | None = None
    size: Annotated[str, Field(description=REQUEST_FIELDS["size"].help)] | None = None
    quality: Quality | None = None
    response_format: Delivery | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: (
        Annotated[int, Field(ge=0, le=100, description="Quality of JPEG and WebP, 0 to 100.")] | None
    ) = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    moderation: Ignored | None = None
    style: Ignored | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3, description="Number of previews; needs stream.")] | None = None
    progress: Annotated[bool, Field(description="With stream: send an event for every step; default: true.")] | None = (
        None
    )
    prompt_rewriter: Rewriter | None = None
    watermark: Annotated[bool, Field(description="false: no watermark; only for the server's own page.")] | None = None

    infotext: Annotated[str, Field(max_length=MAX_BYTES, description=INFOTEXT)] | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    prompt_syntax: Syntax | None = None
    template: Annotated[TemplateMode, Field(description=REQUEST_FIELDS["template"].help)] | None = None
    num_inference_steps: Steps | None = None
    steps: Annotated[Steps, Field(description="Another name for num_inference_steps.")] | None = None
    guidance_scale: Guidance | None = None
    cfg_scale: Annotated[Guidance, Field(description="Another name for guidance_scale.")] | None = None
    sampler: Annotated[str, Field(description=REQUEST_FIELDS["sampler"].help)] | None = None
    sampler_name: Annotated[str, Field(description="Another name for sampler.")] | None = None
    scheduler: (
        Annotated[str, Field(description="Another name for sampler, or a schedule type such as karras.")] | None
    ) = None
    sigma_schedule: Name | None = None
    spacing: Name | None = None
    seed: Annotated[Seed, Field(description=REQUEST_FIELDS["seed"].help)] | None = None
    variation_seed: Annotated[Seed, Field(description=REQUEST_FIELDS["variation_seed"].help)] | None = None
    micro_conditioning: SizesChoice | None = None
    loras: Annotated[list[LoraChoice], Field(max_length=MAX_LORAS)] | None = None
    controlnets: Annotated[list[ControlNetChoice], Field(max_length=MAX_CONTROLNETS)] | None = None
    references: Annotated[list[ReferenceChoice], Field(max_length=MAX_REFERENCES)] | None = None
    refiner: (
        Annotated[
            bool, Field(description=f"Use the refiner for the last steps, after switch_at (default: {SWITCH_AT}).")
        ]
        | None
    ) = None
    switch_at: Annotated[Fraction, Field(description=REQUEST_FIELDS["switch_at"].help)] | None = None
    width: Annotated[int, Field(description="Width in pixels; with height, an alternative to size.")] | None = None
    height: int | None = None
    _recorded_warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warnings(self) -> list[str]:
        """Warnings about the fields of the body and about its infotext."""
        return [*super().warnings, *self._recorded_warnings]

    def take_warnings(self, warnings: tuple[str, ...]) -> None:
        """Add warnings about parameters of an infotext that cannot be reproduced."""
        self._recorded_warnings = warnings


MAX_PICTURES: Final = 16
PICTURE_FIELDS: Final = frozenset({"image", "images", "mask", "strength"})

Base64 = Annotated[str, Field(min_length=1, description="Image in base64, or a data URL.")]


class ImageReference(BaseModel):
    """Image in a JSON body: a URL or the ID of an uploaded file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    image_url: Annotated[str, Field(description="A data URL, or an https URL if the server fetches images.")] | None = (
        None
    )
    file_id: (
        Annotated[str, Field(max_length=256, description="ID of a file that you uploaded to /v1/files.")] | None
    ) = None


AnyImage = Base64 | ImageReference
Images = Annotated[list[AnyImage], Field(min_length=1, max_length=MAX_PICTURES)]
Strength = Annotated[
    Fraction,
    Field(description="Denoising strength; default: 1 with a mask, else 0.75, or 0.5 with input_fidelity high."),
]


class StartBody(GenerateBody):
    """Base class of bodies with start images; ``uploads`` are the files of a form, by field."""

    refused: ClassVar[Mapping[str, str]] = {name: hint for name, hint in REFUSED.items() if name not in PICTURE_FIELDS}
    hints: ClassVar[Mapping[str, str]] = {**GenerateBody.hints, "image": "upload a PNG, JPEG or WebP file"}

    image: AnyImage | Images | None = None
    images: Images | None = None
    strength: Strength | None = None
    _uploads: dict[str, list[bytes]] = PrivateAttr(default_factory=dict)

    def with_uploads(self, files: dict[str, list[bytes]]) -> None:
        """Set the files of a form, by field."""
        self._uploads = files

    @property
    def uploads(self) -> dict[str, list[bytes]]:
        """The files of a form, by field."""
        return self._uploads

    def pictures(self) -> list[AnyImage]:
        """Return the images of the JSON fields ``image`` and ``images``, in order."""
        alone = [] if self.image is None else self.image if isinstance(self.image, list) else [self.image]
        return [*alone, *(self.images or [])]


class EditBody(StartBody):
    """Body of an edit: OpenAI's fields and those of a generation."""

    model_config = ConfigDict(title="EditImageRequest")

    mask: AnyImage | None = None
    input_fidelity: Annotated[Literal["high", "low"], Field(description="high: keep more of the image.")] | None = None


class VariationBody(StartBody):
    """Body of a variation; without ``prompt`` the prompt is read from the image's metadata."""

    model_config = ConfigDict(title="CreateImageVariationRequest")

    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] = ""


UPLOADS: Final[dict[str, Any]] = {
    "image": {"type": "string", "format": "binary"},
    "image[]": {"type": "array", "items": {"type": "string", "format": "binary"}, "maxItems": MAX_PICTURES},
    "mask": {"type": "string", "format": "binary"},
}
"""Schemas of the file fields of a form, for the API description."""

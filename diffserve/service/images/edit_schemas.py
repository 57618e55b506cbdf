"""Bodies of ``POST /v1/images/edits`` and ``/v1/images/variations``, as JSON or as a form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from diffserve.api.types import MAX_PROMPT_CHARS
from diffserve.service.images.schemas import REFUSED, Fraction, GenerateBody

MAX_PICTURES: Final = 16
PICTURE_FIELDS: Final = frozenset({"image", "images", "mask", "strength"})

Base64 = Annotated[str, Field(min_length=1, description="base64, or a data URL")]


class ImageReference(BaseModel):
    """Image in a JSON body: a URL or the ID of an uploaded file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    image_url: Annotated[str, Field(description="A data URL, or an address where those are fetched.")] | None = None
    file_id: Annotated[str, Field(max_length=256, description="A file of yours, from /v1/files.")] | None = None


AnyImage = Base64 | ImageReference
Images = Annotated[list[AnyImage], Field(min_length=1, max_length=MAX_PICTURES)]
Strength = Annotated[
    Fraction, Field(description="How much is repainted; omitted: 1 with a mask, else 0.75, or 0.5 of high fidelity.")
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
    input_fidelity: Annotated[Literal["high", "low"], Field(description="high: less is repainted.")] | None = None


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

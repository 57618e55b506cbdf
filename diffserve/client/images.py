"""Generated images: types of the server's answers, and the methods of the client. Unknown fields are ignored."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Unpack

import msgspec

from diffserve.client.recipe import (
    EditFields,
    ImageFields,
    ImageTimings,
    Recipe,
    StreamedEditFields,
    StreamedImageFields,
    UpscaleFields,
)
from diffserve.client.transport import (
    JSON,
    AsyncStream,
    HttpClient,
    TypedReader,
    Upload,
    encode_json,
    form_of,
    resource,
    texts_of,
)

GENERATIONS: Final = "/v1/images/generations"
EDITS: Final = "/v1/images/edits"
VARIATIONS: Final = "/v1/images/variations"
UPSCALE: Final = "/v1/images/upscale"
VERIFY: Final = "/v1/provenance/verify"


class ImageFile(msgspec.Struct, frozen=True, kw_only=True):
    """Generated image, as a file in the requested format.

    Attributes:
        file: The bytes of the file.
        seed: The seed of its noise.
        variation_seed: The seed of the variation noise, None without a variation.
        revised_prompt: The prompt of the text encoder if it differs from that of the request, else None.
        similarity: Similarity of the prompt whose stored image it started from, None if it started from noise.
        skipped_steps: Steps that were skipped because it started from a stored image.
        score: Score by which ``best_of`` ranked it.
        timings: Where its time went.
        history_id: The ID of its history entry, None if the server keeps no history.
    """

    file: bytes = msgspec.field(name="b64_json")
    seed: int
    variation_seed: int | None = None
    revised_prompt: str | None = None
    similarity: float | None = None
    skipped_steps: int = 0
    score: float | None = None
    timings: ImageTimings | None = None
    history_id: str | None = None

    def save(self, path: str | Path) -> None:
        """Write the file, including its metadata, to ``path``."""
        Path(path).write_bytes(self.file)


class Images(Recipe, frozen=True, kw_only=True):
    """All images of a request in order; with ``best_of``, the best first."""

    created: int
    images: tuple[ImageFile, ...] = msgspec.field(name="data")

    @property
    def completed(self) -> tuple[CompletedImage, ...]:
        """The images with their generation parameters, as a stream yields them."""
        recipe = {name: getattr(self, name) for name in Recipe.__struct_fields__}
        return tuple(
            CompletedImage(created_at=self.created, image_index=index, **recipe, **msgspec.structs.asdict(image))
            for index, image in enumerate(self.images)
        )


class UpscaledFile(msgspec.Struct, frozen=True):
    """File of an upscaled image; ``history_id`` is the ID of its history entry, None if the server keeps no history."""

    file: bytes = msgspec.field(name="b64_json")
    history_id: str | None = None


class UpscaledImage(msgspec.Struct, frozen=True, kw_only=True):
    """Upscaled image.

    Attributes:
        id: The ID of the request.
        created: When it was made, in seconds of the Unix clock.
        files: Its file.
        output_format: "png", "jpeg" or "webp".
        size: Width and height in pixels, as "512x512".
        upscaler: The upscaler that was used.
        scale: The enlargement.
        warnings: Sentences for the user.
    """

    id: str
    created: int
    files: tuple[UpscaledFile, ...] = msgspec.field(name="data")
    output_format: str
    size: str
    upscaler: str
    scale: float
    warnings: tuple[str, ...] = ()

    @property
    def file(self) -> bytes:
        """The bytes of the file."""
        return self.files[0].file

    def save(self, path: str | Path) -> None:
        """Write the file, including its metadata, to ``path``."""
        Path(path).write_bytes(self.file)


class FoundXmp(msgspec.Struct, frozen=True):
    """XMP metadata of an image; fields without a value are empty."""

    digital_source_type: str
    creator_tool: str


class FoundWatermark(msgspec.Struct, frozen=True):
    """Watermark in the pixels of an image.

    Attributes:
        kind: "generated" or "composite".
        confidence: From 0.5 (chance) to 1.
        z: The z-score of the detection.
    """

    kind: str
    confidence: float
    z: float


class FoundCredentials(msgspec.Struct, frozen=True):
    """Content credentials (C2PA) of an image; ``state`` is "trusted", "valid" or "invalid"."""

    state: str
    signer: str
    generator: str
    digital_source_type: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance marks of an image; marks that it does not have are None.

    Attributes:
        is_generated: Whether any mark identifies the image, or a part of it, as generated.
        xmp: The XMP metadata.
        watermark: The watermark in its pixels.
        c2pa: The content credentials.
        parameters: Whether its metadata has the generation parameters.
    """

    is_generated: bool
    xmp: FoundXmp | None = None
    watermark: FoundWatermark | None = None
    c2pa: FoundCredentials | None = None
    parameters: bool = False


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress event: the queue position while the request waits, then the progress of one image.

    Attributes:
        id: The ID of the request, for ``cancel``.
        image_index: Which image of the request, from 0; None while the request waits.
        step: The number of finished steps.
        steps: The number of steps of the image.
        seconds_left: Expected seconds until this image is done; while the request waits, until all images are done.
        request_seconds_left: Expected seconds until all images are done.
        queue_position: How many requests are ahead.
        seed: The seed of the image.
    """

    id: str
    image_index: int | None = None
    step: int | None = None
    steps: int | None = None
    seconds_left: float | None = None
    request_seconds_left: float | None = None
    queue_position: int | None = None
    seed: int | None = None


class PartialImage(msgspec.Struct, frozen=True, kw_only=True):
    """Preview of an image after ``step`` steps; ``size`` is the size of the preview."""

    id: str
    image_index: int
    partial_image_index: int
    step: int
    file: bytes = msgspec.field(name="b64_json")
    output_format: str
    size: str


class CompletedImage(Recipe, frozen=True, kw_only=True):
    """Finished image with its generation parameters; ``image`` converts it to an ``ImageFile``."""

    created_at: int
    image_index: int
    file: bytes = msgspec.field(name="b64_json")
    seed: int
    variation_seed: int | None = None
    revised_prompt: str | None = None
    similarity: float | None = None
    skipped_steps: int = 0
    score: float | None = None
    timings: ImageTimings | None = None
    history_id: str | None = None

    @property
    def image(self) -> ImageFile:
        """The image as an ``ImageFile``, as in an answer without streaming."""
        return ImageFile(**{name: getattr(self, name) for name in ImageFile.__struct_fields__})


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Reason for which an image failed."""

    code: str
    message: str


class LostImage(msgspec.Struct, frozen=True, kw_only=True):
    """Event for an image that failed; the other images of the request continue."""

    id: str
    image_index: int
    failure: Failure


ImageEvent = Progress | PartialImage | CompletedImage | LostImage


def image_reader(num_images: int, events: str = "image_generation") -> TypedReader[ImageEvent]:
    """Return the reader for a request for ``num_images`` images.

    Args:
        num_images: How many images must be completed or lost before the stream is complete.
        events: The prefix of the event types.
    """
    completed, failed = f"{events}.completed", f"{events}.image_failed"
    types: dict[str, type[ImageEvent]] = {
        f"{events}.progress": Progress,
        f"{events}.partial_image": PartialImage,
        completed: CompletedImage,
        failed: LostImage,
    }
    return TypedReader(types, frozenset({completed, failed}), num_images)


class ImageMethods(HttpClient):
    """Methods of the client for images."""

    async def generate(
        self, prompt: str, *, idempotency_key: str | None = None, **fields: Unpack[ImageFields]
    ) -> Images:
        """Generate images and wait for all of them.

        Args:
            prompt: What to generate.
            idempotency_key: A unique string that makes a retry safe: within a day, a second call with the same key and
                fields returns the stored answer instead of generating again.
            **fields: Optional request fields, see ``ImageFields``.

        Returns:
            All images of the request, in order. With ``best_of``, the best come first.

        Raises:
            InvalidRequest: A field is wrong, or the key was used for a different request.
            QueueFull: The server has too much queued work; ``retry_after_s`` says when to retry.
            DeadlineUnreachable: The request cannot be finished within its ``deadline_s``.
        """
        headers = JSON if idempotency_key is None else JSON | {"Idempotency-Key": idempotency_key}
        return await self._call("POST", GENERATIONS, Images, {"prompt": prompt, **fields}, headers)

    def generate_stream(self, prompt: str, **fields: Unpack[StreamedImageFields]) -> AsyncStream[ImageEvent]:
        """Generate images and stream progress, previews and finished images.

        Args:
            prompt: What to generate.
            **fields: Optional request fields, see ``StreamedImageFields``.

        Returns:
            A stream of ``Progress``, ``PartialImage``, ``CompletedImage`` and ``LostImage`` events.
        """
        body = {"prompt": prompt, **fields, "stream": True}
        return self._stream(GENERATIONS, body, image_reader(fields.get("n", 1)))

    async def edit(self, prompt: str, image: bytes, mask: bytes | None = None, **fields: Unpack[EditFields]) -> Images:
        """Generate images from an existing image and wait for all of them.

        Args:
            prompt: What to generate.
            image: The bytes of the PNG, JPEG or WebP file to start from.
            mask: The bytes of an image file that selects the area to repaint: transparent pixels, or white ones if it
                has no transparency. None repaints the whole image, or its transparent area if it has one.
            **fields: Optional request fields, see ``EditFields``.

        Returns:
            All images of the request, in order.

        Raises:
            InvalidRequest: A field is wrong, or a file is not a readable image.
        """
        body, headers = _edit(prompt, image, mask, fields)
        return await self._call("POST", EDITS, Images, body, headers)

    def edit_stream(
        self, prompt: str, image: bytes, mask: bytes | None = None, **fields: Unpack[StreamedEditFields]
    ) -> AsyncStream[ImageEvent]:
        """Generate images from an existing image and stream its events.

        Args:
            prompt: What to generate.
            image: The bytes of the PNG, JPEG or WebP file to start from.
            mask: The bytes of an image file that selects the area to repaint: transparent pixels, or white ones if it
                has no transparency. None repaints the whole image, or its transparent area if it has one.
            **fields: Optional request fields, see ``StreamedEditFields``.

        Returns:
            A stream of ``Progress``, ``PartialImage``, ``CompletedImage`` and ``LostImage`` events.
        """
        body, headers = _edit(prompt, image, mask, {**fields, "stream": True})
        return self._stream(EDITS, body, image_reader(fields.get("n", 1), "image_edit"), headers)

    async def vary(self, image: bytes, **fields: Unpack[EditFields]) -> Images:
        """Generate variations of an image with the prompt stored in its metadata.

        Without such a prompt, the variation is generated with an empty one and the answer has a warning.

        Args:
            image: The bytes of the PNG, JPEG or WebP file to start from.
            **fields: Optional request fields, see ``EditFields``.

        Returns:
            All images of the request, in order.

        Raises:
            InvalidRequest: A field is wrong, or the file is not a readable image.
        """
        return await self._call("POST", VARIATIONS, Images, {"image": _base64(image), **fields})

    async def upscale(self, image: bytes, **fields: Unpack[UpscaleFields]) -> UpscaledImage:
        """Enlarge an image by an upscaler network or a filter.

        Args:
            image: The bytes of the PNG, JPEG or WebP file.
            **fields: Optional request fields, see ``UpscaleFields``.

        Returns:
            The enlarged image, with the parameters of the original one.

        Raises:
            InvalidRequest: A field is wrong, the file is not a readable image, or the result would be too large.
        """
        return await self._call("POST", UPSCALE, UpscaledImage, {"image": _base64(image), **fields})

    async def verify(self, image: bytes) -> Provenance:
        """Read the provenance marks of an image: XMP, watermark and content credentials.

        Args:
            image: The bytes of the image file.

        Returns:
            The marks that were found, and whether they identify the image as generated.

        Raises:
            InvalidRequest: The file is not a readable image.
        """
        return await self._call("POST", VERIFY, Provenance, {"image": _base64(image)})

    async def cancel(self, request_id: str) -> bool:
        """Cancel an image request.

        Args:
            request_id: The ``request_id`` of the stream, or the ID in an event.

        Returns:
            True if it was cancelled, False if it is already finished or unknown.
        """
        return await self._succeeds("POST", resource(GENERATIONS, request_id, "cancel"), "request_not_found")

    async def interrupt(self, request_id: str) -> bool:
        """Stop an image request early; its own answer then contains the unfinished images.

        Args:
            request_id: The ``request_id`` of the stream, or the ID in an event.

        Returns:
            True if it was stopped, False if it is already finished or unknown.
        """
        return await self._succeeds("POST", resource(GENERATIONS, request_id, "interrupt"), "request_not_found")


def _edit(prompt: str, image: bytes, mask: bytes | None, fields: Mapping[str, Any]) -> tuple[bytes, Mapping[str, str]]:
    """Return body and headers of an edit: a form if it can represent all fields, because its files are shorter."""
    files = {"image": image} | ({} if mask is None else {"mask": mask})
    body = {"prompt": prompt, **fields}
    texts = texts_of(body)
    if texts is None:
        return encode_json(body | {name: _base64(file) for name, file in files.items()}), JSON
    return form_of(texts, {name: Upload(file, name) for name, file in files.items()})


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode("ascii")

"""Types of the server's answers. Unknown fields of a newer server are ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from diffserve.client.capabilities import Capabilities
from diffserve.client.recipe import Cost, ImageTimings, Recipe


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


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by origin; ``cached_tokens`` came from the prefix cache."""

    cached_tokens: int = 0


class TextUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request, and its share of the device time in seconds."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens = PromptTokens()
    device_s: float = 0.0
    cost: Cost | None = None


class TextTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies in seconds: in the queue, to the first token, per output token, and in total."""

    queue_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


class RewrittenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a prompt rewrite.

    Attributes:
        prompt: The original prompt.
        revised_prompt: The new prompt, None if the original should be used; ``fallback`` and ``warning`` say why.
        warning: A message for the user.
        fallback: A code for the reason, such as "unsure".
        mean_entropy: Uncertainty of the model in nats per token.
    """

    prompt: str
    revised_prompt: str | None
    warning: str | None = None
    fallback: str | None = None
    mean_entropy: float | None = None


class Rewrites(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a prompt rewrite, the most likely first."""

    id: str
    created: int
    model: str
    style: str
    prompts: tuple[RewrittenPrompt, ...] = msgspec.field(name="data")
    usage: TextUsage
    timings: TextTimings
    warnings: tuple[str, ...] = ()


class RewriteDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of the rewritten prompt ``index``; provisional until the last event, ``Rewrites``."""

    id: str
    index: int
    text: str = msgspec.field(name="delta")


RewriteEvent = RewriteDelta | Rewrites


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the answers to a conversation."""

    index: int
    message: ChatMessage
    finish_reason: str


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """All answers to a conversation."""

    id: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: TextUsage
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].message.content


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of the answer ``index``; the last one has a ``finish_reason``."""

    index: int
    text: str
    finish_reason: str | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Model or alias that a request may name.

    Attributes:
        id: The name.
        created: When it was created, in seconds since 1970.
        capabilities: What it supports; None for aliases.
        loaded: Whether it is in memory; if not, the first request loads it. None for aliases.
        problem: Why its last load failed, empty if it did not.
        endpoints: Paths of the endpoints that accept it.
    """

    id: str
    created: int
    capabilities: Capabilities | None = None
    loaded: bool | None = None
    problem: str = ""
    endpoints: tuple[str, ...] = ()


class EndpointFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of an endpoint as JSON Schemas by name; ``asks`` is the kind of model: image, text or chat."""

    asks: str
    fields: dict[str, dict[str, Any]]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a request as a whole, in the units at the end of each name."""

    max_body_bytes: int
    request_timeout_s: float
    max_backlog_s: float
    min_size_px: int
    max_size_px: int
    max_json_depth: int
    max_schema_chars: int
    max_schema_depth: int


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Price of the device per hour."""

    per_hour: float
    currency: str


class ServerCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a server: models, fields of each endpoint with their bounds, limits and price."""

    version: str
    models: tuple[Model, ...]
    aliases: tuple[str, ...]
    endpoints: dict[str, EndpointFields]
    output_formats: tuple[str, ...]
    prompt_syntaxes: tuple[str, ...]
    qualities: tuple[str, ...]
    spacings: tuple[str, ...]
    limits: Limits
    price: Price | None = None

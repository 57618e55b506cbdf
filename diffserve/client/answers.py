"""What a server answers, typed. Fields that a newer server adds are passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from diffserve.client.capabilities import Capabilities
from diffserve.client.recipe import Cost, ImageTimings, Recipe


class ImageFile(msgspec.Struct, frozen=True, kw_only=True):
    """One picture, as a file in the format that was asked for.

    revised_prompt  what the text encoder was given, ``None`` where that is what was sent
    variation_seed  towards whose noise it was varied, ``None`` where it was not
    similarity      of the prompt whose picture it began from, ``None`` where it began from noise
    skipped_steps   that it did without for that
    score           by which it was chosen from several (best_of)
    history_id      where it is in the history of who asked, ``None`` where none is kept
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
        """Write the file, its metadata included."""
        Path(path).write_bytes(self.file)


class Images(Recipe, frozen=True, kw_only=True):
    """All pictures of a request, in order; of a best-of the best first."""

    created: int
    images: tuple[ImageFile, ...] = msgspec.field(name="data")


class FoundXmp(msgspec.Struct, frozen=True):
    """What a picture's XMP says; "" where that is nothing."""

    digital_source_type: str
    creator_tool: str


class FoundWatermark(msgspec.Struct, frozen=True):
    """What a mark in a picture's pixels says: generated, or composite; ``confidence`` is 0.5 for chance, 1 at most."""

    kind: str
    confidence: float
    z: float


class FoundCredentials(msgspec.Struct, frozen=True):
    """What a picture's content credentials (C2PA) say; ``state``: trusted, valid or invalid."""

    state: str
    signer: str
    generator: str
    digital_source_type: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What a picture says of where it is from; ``None`` for what it does not have.

    is_generated  whether any of it says that a machine painted the picture, all or in part
    parameters    whether it tells how it was painted
    """

    is_generated: bool
    xmp: FoundXmp | None = None
    watermark: FoundWatermark | None = None
    c2pa: FoundCredentials | None = None
    parameters: bool = False


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The first events of a stream say the place in the queue as it changes, the others how far a picture is.

    id                    by which the request can be cancelled
    image_index           which picture of the request; ``None`` while it waits
    seconds_left          until that picture is there; while it waits, until all of them are
    request_seconds_left  until all of them are there
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
    """A preview after ``step`` steps; ``size`` is its own."""

    id: str
    image_index: int
    partial_image_index: int
    step: int
    file: bytes = msgspec.field(name="b64_json")
    output_format: str
    size: str


class CompletedImage(Recipe, frozen=True, kw_only=True):
    """A finished picture, and how it was painted; ``image`` is it as an answer in one piece has it."""

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
        """The file with its seed and its prompt."""
        return ImageFile(**{name: getattr(self, name) for name in ImageFile.__struct_fields__})


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a picture was lost."""

    code: str
    message: str


class LostImage(msgspec.Struct, frozen=True, kw_only=True):
    """One picture of a request failed; the others go on."""

    id: str
    image_index: int
    failure: Failure


ImageEvent = Progress | PartialImage | CompletedImage | LostImage


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Of a prompt's tokens, those that had been computed before."""

    cached_tokens: int = 0


class TextUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request, and seconds of the device: its share of those that it had with others."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens = PromptTokens()
    device_s: float = 0.0
    cost: Cost | None = None


class TextTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: waiting, until the first token, for each later one, in all."""

    queue_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


class RewrittenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for a wish (``prompt``).

    revised_prompt  ``None`` where the wish is to be painted as it stands; then ``fallback`` and ``warning`` say why
    mean_entropy    nats per token: how unsure the model was
    """

    prompt: str
    revised_prompt: str | None
    warning: str | None = None
    fallback: str | None = None
    mean_entropy: float | None = None


class Rewrites(msgspec.Struct, frozen=True, kw_only=True):
    """All prompts for a wish, the likeliest first."""

    id: str
    created: int
    model: str
    style: str
    prompts: tuple[RewrittenPrompt, ...] = msgspec.field(name="data")
    usage: TextUsage
    timings: TextTimings
    warnings: tuple[str, ...] = ()


class RewriteDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of prompt ``index``; the last event, Rewrites, may take it back."""

    id: str
    index: int
    text: str = msgspec.field(name="delta")


RewriteEvent = RewriteDelta | Rewrites


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

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
        """The first answer."""
        return self.choices[0].message.content


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of answer ``index``; ``finish_reason`` with the last of it."""

    index: int
    text: str
    finish_reason: str | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A name that a request may give as its model.

    capabilities  ``None`` for aliases
    loaded        whether it answers at once; else it is loaded for the first request. ``None`` for aliases
    problem       why it could not be loaded when that was last tried
    endpoints     paths that may be asked for it
    """

    id: str
    created: int
    capabilities: Capabilities | None = None
    loaded: bool | None = None
    problem: str = ""
    endpoints: tuple[str, ...] = ()


class EndpointFields(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint takes: by name, each field as JSON Schema describes it. ``asks``: image, text or chat models."""

    asks: str
    fields: dict[str, dict[str, Any]]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a request as a whole, in the unit that ends each name."""

    max_body_bytes: int
    request_timeout_s: float
    max_backlog_s: float
    min_size_px: int
    max_size_px: int
    max_json_depth: int
    max_schema_chars: int
    max_schema_depth: int


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What an hour of the device costs."""

    per_hour: float
    currency: str


class ServerCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a server takes: fields with their bounds by path, models, limits, and the price where there is one."""

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

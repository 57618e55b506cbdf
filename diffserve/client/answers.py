"""What a server answers, typed. Fields that a newer server adds are passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from diffserve.client.capabilities import Capabilities
from diffserve.client.recipe import Recipe


class ImageFile(msgspec.Struct, frozen=True, kw_only=True):
    """One picture, as a file in the format that was asked for.

    revised_prompt  what the text encoder was given, ``None`` where that is what was sent
    similarity      of the prompt whose picture it began from, ``None`` where it began from noise
    skipped_steps   that it did without for that
    """

    file: bytes = msgspec.field(name="b64_json")
    seed: int
    revised_prompt: str | None = None
    similarity: float | None = None
    skipped_steps: int = 0

    def save(self, path: str | Path) -> None:
        """Write the file, its metadata included."""
        Path(path).write_bytes(self.file)


class Images(Recipe, frozen=True, kw_only=True):
    """All pictures of a request, in order."""

    created: int
    images: tuple[ImageFile, ...] = msgspec.field(name="data")


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The first events of a stream say the place in the queue as it changes, the others how far a picture is.

    id            by which the request can be cancelled
    image_index   which picture of the request; ``None`` while it waits
    """

    id: str
    image_index: int | None = None
    step: int | None = None
    steps: int | None = None
    seconds_left: float | None = None
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
    revised_prompt: str | None = None
    similarity: float | None = None
    skipped_steps: int = 0

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
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens = PromptTokens()


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
    """A name that a request may give as its model; ``capabilities`` of those that are loaded, ``None`` for aliases."""

    id: str
    created: int
    capabilities: Capabilities | None = None

"""Messages between processes that encode, denoise and decode an image separately.

GenerationRequest -> EncodeRequest -> TextsEncoded -> GenerationRequest with ``encodings`` -> ImageFinished with
``latents`` -> DecodeRequest -> PictureDecoded.
"""

from __future__ import annotations

import msgspec

from diffserve.api.tensor_values import Encodings
from diffserve.api.types import Asks, Cancelled, Failed, GenerationRequest, LatentArray, Picture, Priority, RequestEvent


class EncodeRequest(msgspec.Struct, Asks["EncodingEvent"], frozen=True, kw_only=True, tag="encoding"):
    """A request to encode the texts of ``generation``, after rewriting its prompt if it asks for that."""

    generation: GenerationRequest

    @property
    def request_id(self) -> str:  # type: ignore[override]
        """The id of ``generation``."""
        return self.generation.request_id

    @property
    def deadline_s(self) -> float | None:
        """The deadline of ``generation``."""
        return self.generation.deadline_s


class TextsEncoded(RequestEvent, frozen=True, kw_only=True):
    """Terminal: the encoded texts of a request, for denoising.

    Attributes:
        prompt: The prompt to use, rewritten or not.
        original_prompt: The prompt before rewriting; ``None`` if it was not rewritten.
        warnings: Warnings of the rewriter.
        encode_s: Seconds of encoding.
        rewriting_s: Device seconds of rewriting.
        waited_s: Seconds in all.
    """

    prompt: str
    encodings: Encodings
    encode_s: float
    waited_s: float
    warnings: tuple[str, ...] = ()
    original_prompt: str | None = None
    rewriting_s: float = 0.0


class DecodeRequest(msgspec.Struct, Asks["DecodingEvent"], frozen=True, kw_only=True, tag="decoding"):
    """A request to decode finished ``latents`` of the model named ``model``.

    Outside of ``mask_image`` the pixels of ``init_image`` are restored.
    """

    request_id: str
    latents: LatentArray
    init_image: Picture | None = None
    mask_image: Picture | None = None
    model: str = ""
    deadline_s: float | None = None
    priority: Priority = "interactive"


class PictureDecoded(RequestEvent, frozen=True, kw_only=True):
    """Terminal: the image; decoding took ``decode_s`` of ``waited_s`` seconds in all."""

    picture: Picture
    decode_s: float
    waited_s: float


EncodingEvent = TextsEncoded | Failed | Cancelled
DecodingEvent = PictureDecoded | Failed | Cancelled
STAGE_TERMINAL = (TextsEncoded, PictureDecoded, Failed, Cancelled)

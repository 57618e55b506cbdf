"""The words between stages of a picture that stand apart: what is encoded, denoised and decoded in different processes.

::

    GenerationRequest ─► EncodeRequest ─► TextsEncoded
                                               ▼
    DecodeRequest ◄─ Painted, with ``latents`` ◄─ GenerationRequest with ``encodings``
         ▼
    PictureDecoded
"""

from __future__ import annotations

import msgspec

from diffserve.api.tensor_values import Encodings
from diffserve.api.types import Asks, Cancelled, Failed, GenerationRequest, LatentArray, Picture, Priority


class EncodeRequest(msgspec.Struct, Asks["EncodingEvent"], frozen=True, kw_only=True, tag="encoding"):
    """Have the prompt of ``generation`` rewritten, where it asks for that, and its texts encoded."""

    generation: GenerationRequest

    @property
    def request_id(self) -> str:  # type: ignore[override]
        """That of ``generation``."""
        return self.generation.request_id

    @property
    def deadline_s(self) -> float | None:
        """That of ``generation``."""
        return self.generation.deadline_s


class TextsEncoded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Terminal: the texts of a request, ready for whoever denoises.

    prompt           as it is painted, rewritten or not; ``original_prompt``: as it was asked, where that is another
    warnings         of rewriting
    encode_s         seconds that encoding took, ``rewriting_s`` that the device took for rewriting, ``waited_s`` in all
    """

    request_id: str
    prompt: str
    encodings: Encodings
    encode_s: float
    waited_s: float
    warnings: tuple[str, ...] = ()
    original_prompt: str | None = None
    rewriting_s: float = 0.0


class DecodeRequest(msgspec.Struct, Asks["DecodingEvent"], frozen=True, kw_only=True, tag="decoding"):
    """Have finished ``latents`` of the model named ``model`` decoded; outside a mask the init image is put back."""

    request_id: str
    latents: LatentArray
    init_image: Picture | None = None
    mask_image: Picture | None = None
    model: str = ""
    deadline_s: float | None = None
    priority: Priority = "interactive"


class PictureDecoded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Terminal: the picture, which took ``decode_s`` seconds of ``waited_s`` in all."""

    request_id: str
    picture: Picture
    decode_s: float
    waited_s: float


EncodingEvent = TextsEncoded | Failed | Cancelled
DecodingEvent = PictureDecoded | Failed | Cancelled
STAGE_TERMINAL = (TextsEncoded, PictureDecoded, Failed, Cancelled)

"""Where pictures are from: what those of ours bear when they leave, and what any picture says of it.

Three marks, each enough by itself: XMP in the file (``media.images``), a watermark in the pixels (``media.watermark``),
and with a certificate a signed manifest (``media.content_credentials``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.content_credentials import ContentCredentials, Signer, read_credentials
from diffserve.media.images import (
    DIGITAL_SOURCE_TYPES,
    ImageFormat,
    XmpFacts,
    decode_image,
    encode_image,
    format_of,
    read_infotext,
    read_xmp,
)
from diffserve.media.infotext import parse_infotext
from diffserve.media.watermark import Kind, Watermark, detect, embed
from diffserve.settings.config import ServeConfig

HEADER: Final = "X-Content-Provenance"


class Marks:
    """What pictures of ours bear. Marking and writing take a while: call them in a thread, from as many as you like."""

    def __init__(self, *, watermark: bool = True, signer: Signer | None = None) -> None:
        self.has_watermark = watermark
        self._signer = signer
        self.tell: Callable[[float], None] = lambda _: None
        """Is told how many seconds every finished picture took to be written, in the thread that wrote it."""

    @classmethod
    def of(cls, config: ServeConfig) -> Marks:
        """As ``config`` says. Raises ConfigError for a certificate that cannot sign."""
        signer = Signer(config.c2pa_certificate, config.c2pa_key) if config.c2pa_certificate else None
        return cls(watermark=config.watermark, signer=signer)

    def without_watermark(self) -> Marks:
        """The same, but for what is measured."""
        plain = Marks(watermark=False, signer=self._signer)
        plain.tell = self.tell
        return plain

    @property
    def header(self) -> str:
        """For ``X-Content-Provenance``: what a picture bears."""
        return _header(is_signed=self._signer is not None, has_watermark=self.has_watermark)

    def mark(self, picture: Picture, kind: Kind) -> Picture:
        """``picture`` with the mark in its pixels, where they have one."""
        return embed(picture, kind) if self.has_watermark else picture

    def write(
        self, marked: Picture, *, kind: Kind, image_format: ImageFormat, quality: int, infotext: str | None = None
    ) -> bytes:
        """A ``marked`` picture as a file, signed where we sign."""
        began_s = time.perf_counter()
        file = encode_image(marked, image_format=image_format, quality=quality, infotext=infotext, kind=kind)
        file = file if self._signer is None else self._signer.sign(file, image_format, kind)
        if infotext is not None:
            self.tell(time.perf_counter() - began_s)
        return file


def header_of(config: ServeConfig) -> str:
    """The same, as ``config`` says."""
    return _header(is_signed=bool(config.c2pa_certificate), has_watermark=config.watermark)


def _header(*, is_signed: bool, has_watermark: bool) -> str:
    return ";".join(["c2pa"] * is_signed + ["xmp"] + ["wm"] * has_watermark)


class Provenance(msgspec.Struct, frozen=True):
    """What a picture says of where it is from; ``None`` for what it does not have.

    is_generated  whether any of it says that a machine painted the picture, all or in part
    parameters    whether it tells how it was painted
    """

    is_generated: bool
    xmp: XmpFacts | None
    watermark: Watermark | None
    c2pa: ContentCredentials | None
    parameters: bool

    def told(self) -> dict[str, Any]:
        """All of it, for JSON."""
        pairs = {"xmp": self.xmp, "watermark": self.watermark}
        told = {name: None if pair is None else pair._asdict() for name, pair in pairs.items()}
        return {"is_generated": self.is_generated} | told | {
            "c2pa": msgspec.to_builtins(self.c2pa), "parameters": self.parameters
        }  # fmt: skip


def examine(file: bytes, *, name: str = "image") -> Provenance:
    """What ``file``, a PNG, JPEG or WebP, says. Takes a while: call it in a thread. Raises InvalidRequest."""
    watermark = detect(decode_image(file, name=name))
    xmp, c2pa = read_xmp(file, name=name), read_credentials(file, format_of(file, name=name))
    said = (xmp.digital_source_type if xmp else "", c2pa.digital_source_type if c2pa else "")
    says_so = any(source in DIGITAL_SOURCE_TYPES.values() for source in said)
    return Provenance(says_so or watermark is not None, xmp, watermark, c2pa, _has_parameters(file))


def _has_parameters(file: bytes) -> bool:
    """Return whether ``file`` holds generation settings, which a camera's comment does not."""
    try:
        text = read_infotext(file)
        return text is not None and bool(parse_infotext(text).fields)
    except InvalidRequest:  # longer than ``infotext.MAX_BYTES``
        return True

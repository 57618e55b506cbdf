"""Provenance marks: marking of generated images, and reading of the marks of any image file.

There are three independent marks: XMP in the file (``media.images``), a watermark in the pixels (``media.watermark``),
and, if a certificate is configured, a signed manifest (``media.content_credentials``). Images are marked on delivery;
images that are only measured are not.
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
    """Provenance marks of generated images: watermark, XMP and optionally a signed manifest.

    ``mark`` and ``write`` are slow: call them in a thread. Instances can be shared between threads.

    Attributes:
        has_watermark: Whether ``mark`` embeds a watermark.
        on_written: Called in the writing thread with the seconds that it took to write each finished image.
    """

    def __init__(self, *, watermark: bool = True, signer: Signer | None = None) -> None:
        self.has_watermark = watermark
        self._signer = signer
        self.on_written: Callable[[float], None] = lambda _: None

    @classmethod
    def of(cls, config: ServeConfig) -> Marks:
        """Create the marks that ``config`` selects.

        Raises:
            ConfigError: The certificate cannot sign.
        """
        signer = Signer(config.c2pa_certificate, config.c2pa_key) if config.c2pa_certificate else None
        return cls(watermark=config.watermark, signer=signer)

    def without_watermark(self) -> Marks:
        """Return a copy that embeds no watermark, for images that are measured."""
        marks = Marks(watermark=False, signer=self._signer)
        marks.on_written = self.on_written
        return marks

    @property
    def header(self) -> str:
        """Value of the header ``X-Content-Provenance``: the marks of an image."""
        return _header(is_signed=self._signer is not None, has_watermark=self.has_watermark)

    def mark(self, picture: Picture, kind: Kind | None) -> Picture:
        """Embed the watermark in ``picture``, if watermarks are enabled and ``kind`` is not ``None``."""
        return embed(picture, kind) if self.has_watermark and kind is not None else picture

    def write(
        self,
        marked: Picture,
        *,
        kind: Kind | None,
        image_format: ImageFormat,
        quality: int,
        infotext: str | None = None,
    ) -> bytes:
        """Encode the ``marked`` image as a file, and sign it if there is a certificate.

        With ``kind`` ``None`` no model changed the image: it is not declared as generated, and not signed.
        """
        started_s = time.perf_counter()
        file = encode_image(marked, image_format=image_format, quality=quality, infotext=infotext, kind=kind)
        file = file if self._signer is None or kind is None else self._signer.sign(file, image_format, kind)
        if infotext is not None:
            self.on_written(time.perf_counter() - started_s)
        return file


def header_of(config: ServeConfig) -> str:
    """Return the value of ``X-Content-Provenance`` for the marks that ``config`` selects."""
    return _header(is_signed=bool(config.c2pa_certificate), has_watermark=config.watermark)


def _header(*, is_signed: bool, has_watermark: bool) -> str:
    return ";".join(["c2pa"] * is_signed + ["xmp"] + ["wm"] * has_watermark)


class ProvenanceReport(msgspec.Struct, frozen=True):
    """Provenance of an image file; ``None`` for a mark that it does not have.

    Attributes:
        is_generated: Whether any mark says that the image is generated, in whole or in part.
        xmp: Provenance fields of the XMP packet.
        watermark: Watermark in the pixels.
        c2pa: Content of the C2PA manifest.
        parameters: Whether the file holds generation parameters.
    """

    is_generated: bool
    xmp: XmpFacts | None
    watermark: Watermark | None
    c2pa: ContentCredentials | None
    parameters: bool

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON."""
        pairs = {"xmp": self.xmp, "watermark": self.watermark}
        marks = {name: None if pair is None else pair._asdict() for name, pair in pairs.items()}
        return {"is_generated": self.is_generated} | marks | {
            "c2pa": msgspec.to_builtins(self.c2pa), "parameters": self.parameters
        }  # fmt: skip


def examine(file: bytes, *, name: str = "image") -> ProvenanceReport:
    """Read all provenance marks of ``file``. This is slow: call it in a thread.

    Args:
        file: A PNG, JPEG or WebP file.
        name: Name of the file in errors.

    Raises:
        InvalidRequest: The file cannot be decoded.
    """
    watermark = detect(decode_image(file, name=name))
    xmp, c2pa = read_xmp(file, name=name), read_credentials(file, format_of(file, name=name))
    sources = (xmp.digital_source_type if xmp else "", c2pa.digital_source_type if c2pa else "")
    is_declared = any(source in DIGITAL_SOURCE_TYPES.values() for source in sources)
    return ProvenanceReport(is_declared or watermark is not None, xmp, watermark, c2pa, _has_parameters(file))


def _has_parameters(file: bytes) -> bool:
    """Return whether ``file`` holds generation parameters, as opposed to another comment."""
    try:
        text = read_infotext(file)
        return text is not None and bool(parse_infotext(text).fields)
    except InvalidRequest:  # longer than ``infotext.MAX_BYTES``
        return True

"""Pictures as files: PNG, JPEG and WebP out, the same three in. No torch, no web framework.

Every file says that a machine painted it: ``Software`` and, as XMP, the IPTC digital source type
``trainedAlgorithmicMedia``. How it was painted travels as A1111 ``parameters`` (a PNG text chunk, or the EXIF user
comment). The bytes depend on the picture and the text alone.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Final, Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, PngImagePlugin

from diffserve.errors import InvalidRequest
from diffserve.infotext import MAX_BYTES, SOFTWARE, check_length, shorten
from diffserve.types import Picture

ImageFormat = Literal["png", "jpeg", "webp"]
MEDIA_TYPES: Final[dict[ImageFormat, str]] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
SUFFIXES: Final[dict[str, ImageFormat]] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
MAX_DECODED_PIXELS = 16_777_216
MAX_PNG_CHUNKS = 10_000
DIGITAL_SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"

_PNG_COMPRESSION = 4  # a third of the time of the default 6, about 3 % more bytes
_COMMENT_PREFIX = b"UNICODE\x00"
_MAGIC: Final[tuple[tuple[bytes, int, str], ...]] = (
    (b"\x89PNG\r\n\x1a\n", 0, "PNG"),
    (b"\xff\xd8\xff", 0, "JPEG"),
    (b"WEBP", 8, "WEBP"),
)
_XMP = f"""<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description rdf:about="" xmlns:xmp="http://ns.adobe.com/xap/1.0/"
 xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
 xmp:CreatorTool="{SOFTWARE}" Iptc4xmpExt:DigitalSourceType="{DIGITAL_SOURCE_TYPE}"/>
</rdf:RDF></x:xmpmeta>
<?xpacket end="r"?>"""


def encode_image(
    picture: Picture, *, image_format: ImageFormat = "png", quality: int = 100, infotext: str | None = None
) -> bytes:
    """``picture`` as a file. ``quality`` 0..100 matters for JPEG and WebP; ``infotext`` is what others read back,
    shortened to ``infotext.MAX_BYTES``."""
    infotext = None if infotext is None else shorten(infotext, MAX_BYTES)
    image = Image.fromarray(picture.array)
    file = BytesIO()
    if image_format == "png":
        image.save(file, "PNG", pnginfo=_png_text(infotext), compress_level=_PNG_COMPRESSION)
        return file.getvalue()
    exif, xmp = _exif(infotext), _XMP.encode()
    if image_format == "jpeg":
        image.save(file, "JPEG", quality=max(1, quality), subsampling=0 if quality >= 90 else 2, exif=exif, xmp=xmp)
    else:
        image.save(file, "WEBP", quality=quality, method=4, exif=exif, xmp=xmp)
    return file.getvalue()


def image_format_of(path: Path) -> ImageFormat:
    """The format that ``path`` asks for by its suffix; InvalidRequest for any other suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidRequest(
            f"{path.name!r} does not say what to write; end it in {', '.join(SUFFIXES)}, "
            "or name a folder that is there.",
            param="output",
        )
    return SUFFIXES[path.suffix.lower()]


def read_infotext(data: bytes) -> str | None:
    """The A1111 ``parameters`` text in an image file, or ``None``.

    InvalidRequest where ``data`` is no such image, or the text is longer than ``infotext.MAX_BYTES``.
    """
    image = _open(data, "image")
    text = image.info.get("parameters")
    if not isinstance(text, str):
        text = _comment(image)
    if text is not None:
        check_length(text)
    return text


def decode_image(data: bytes, *, name: str = "image", max_pixels: int = MAX_DECODED_PIXELS) -> Picture:
    """An uploaded PNG, JPEG or WebP as an RGB picture, upright, transparency laid over white.

    The file's kind is told by its first bytes and its size by its header, before any pixel is decoded. Anything else,
    and anything damaged, is InvalidRequest with ``name`` as the parameter to blame.
    """
    image = _load(data, name, max_pixels)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, coloured)
    return Picture.from_array(np.asarray(image.convert("RGB"), dtype=np.uint8))


def _in_eight_bits(image: Image.Image) -> Image.Image:
    """A picture of 16 bits a pixel, which is grey, in 8; any other as it is. Pillow would cut off what is above 255."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image, dtype=np.uint32) >> 8).clip(0, 255).astype(np.uint8))


def decode_mask(data: bytes, *, name: str = "mask", max_pixels: int = MAX_DECODED_PIXELS) -> Picture:
    """An uploaded mask as one channel, 255 = repaint here.

    A file with transparency is read as OpenAI does (transparent: repaint), any other as A1111 does (white: repaint).
    """
    image = _load(data, name, max_pixels)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        repaint = np.asarray(image.convert("RGBA"), dtype=np.uint8)[..., 3] < 128
    else:
        repaint = np.asarray(image.convert("L"), dtype=np.uint8) >= 128
    return Picture.from_array(np.where(repaint, 255, 0).astype(np.uint8))


def resize(picture: Picture, width_px: int, height_px: int, *, is_padded: bool = False) -> Picture:
    """``picture`` filling ``width_px`` x ``height_px``, by Lanczos. Where the aspects differ the excess is cropped, or
    with ``is_padded`` all of it is kept and its edges go on.

    A mask (one channel) takes the nearest pixel, so that it stays black and white.
    """
    if (picture.width_px, picture.height_px) == (width_px, height_px):
        return picture
    ratios = (picture.width_px / width_px, picture.height_px / height_px)
    if is_padded:
        inner = (max(1, round(picture.width_px / max(ratios))), max(1, round(picture.height_px / max(ratios))))
        return _pad(resize(picture, *inner), width_px, height_px)
    keep_width, keep_height = width_px * min(ratios), height_px * min(ratios)
    left, top = (picture.width_px - keep_width) / 2, (picture.height_px - keep_height) / 2
    filter_ = Image.Resampling.NEAREST if picture.channels == 1 else Image.Resampling.LANCZOS
    box = (left, top, left + keep_width, top + keep_height)
    resized = Image.fromarray(picture.array).resize((width_px, height_px), filter_, box=box)
    return Picture.from_array(np.asarray(resized, dtype=np.uint8))


def _pad(picture: Picture, width_px: int, height_px: int) -> Picture:
    """``picture`` in the middle of ``width_px`` x ``height_px``, its outermost pixels repeated to the sides."""
    across, along = width_px - picture.width_px, height_px - picture.height_px
    margins = ((along // 2, along - along // 2), (across // 2, across - across // 2), (0, 0))
    return Picture.from_array(np.pad(picture.array, margins[: picture.array.ndim], mode="edge"))


def _png_text(infotext: str | None) -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    if infotext is not None:
        chunks.add_itxt("parameters", infotext)
    chunks.add_text("Software", SOFTWARE)
    chunks.add_itxt("XML:com.adobe.xmp", _XMP)
    return chunks


def _exif(infotext: str | None) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = SOFTWARE
    if infotext is not None:
        comment = _COMMENT_PREFIX + infotext.encode("utf-16-be", errors="replace")
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    return exif


def _comment(image: Image.Image) -> str | None:
    """The EXIF user comment, where it is in Unicode. InvalidRequest where the block cannot be read."""
    try:
        comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
    except Exception as error:  # whatever a reader says of hostile bytes, the answer is the same
        raise _damaged("image") from error
    if not isinstance(comment, bytes) or not comment.startswith(_COMMENT_PREFIX):
        return None
    return comment.removeprefix(_COMMENT_PREFIX).decode("utf-16-be", errors="replace")


def _load(data: bytes, name: str, max_pixels: int) -> Image.Image:
    image = _open(data, name, max_pixels)
    try:
        image.load()
        return _in_eight_bits(ImageOps.exif_transpose(image))
    except Exception as error:  # whatever a decoder says of hostile bytes, the answer is the same
        raise _damaged(name) from error


def _open(data: bytes, name: str, max_pixels: int = MAX_DECODED_PIXELS) -> Image.Image:
    kind = next((kind for magic, at, kind in _MAGIC if data[at : at + len(magic)] == magic), None)
    if kind is None:
        raise InvalidRequest(
            f"{name} is not a PNG, JPEG or WebP file; send one of these three.", param=name, code="invalid_image"
        )
    if kind == "PNG" and _has_too_many_chunks(data):
        raise _damaged(name)
    try:
        image = Image.open(BytesIO(data), formats=(kind,))
    except Exception as error:
        raise _damaged(name) from error
    width, height = image.size
    if width * height > max_pixels:
        raise InvalidRequest(
            f"{name} is {width}x{height}; at most {max_pixels} pixels are taken.", param=name, code="image_too_large"
        )
    return image


def _has_too_many_chunks(data: bytes) -> bool:
    """Whether the PNG in ``data`` is in more pieces than any tool makes: each costs time."""
    at = 8
    for _ in range(MAX_PNG_CHUNKS):
        if at + 8 > len(data):
            return False
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return True


def _damaged(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is damaged or too large to be read.", param=name, code="invalid_image")

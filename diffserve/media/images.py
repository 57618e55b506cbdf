"""Encoding and decoding of PNG, JPEG and WebP files, without torch or a web framework.

Written files carry ``Software``, the IPTC digital source type as XMP, and the generation parameters as A1111
``parameters`` (PNG text chunk or EXIF user comment). Equal pixels and texts give equal bytes. Decoding returns 8-bit
sRGB and the first frame of an animation; images without a color profile are assumed to be sRGB.
"""

from __future__ import annotations

import re
import zlib
from io import BytesIO
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, PngImagePlugin

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.image_structure import problem_of, problem_of_profile
from diffserve.media.infotext import (
    MAX_BYTES,
    SOFTWARE,
    UNICODE_HEADER,
    check_length,
    decode_png_text,
    decode_user_comment,
    shorten,
)
from diffserve.media.watermark import Kind

ImageFormat = Literal["png", "jpeg", "webp"]
MaskConvention = Literal["openai", "a1111"]
"""Pixels of a mask with an alpha channel to repaint: the transparent ones (OpenAI) or the opaque ones (A1111)."""

MEDIA_TYPES: Final[dict[ImageFormat, str]] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
SUFFIXES: Final[dict[str, ImageFormat]] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
MAX_DECODED_PIXELS = 16_777_216
MAX_OWN_PIXELS = 1 << 28
MAX_PROFILE_BYTES = 1 << 20
DIGITAL_SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
DIGITAL_SOURCE_TYPES: Final[dict[Kind, str]] = {
    "generated": DIGITAL_SOURCE_TYPE,
    "composite": "http://cv.iptc.org/newscodes/digitalsourcetype/compositeWithTrainedAlgorithmicMedia",
}

THUMBNAIL_QUALITY = 80
_PNG_STRATEGY: Final = zlib.Z_RLE  # filtered pixels rarely repeat; takes 0.6 of the time of the default strategy
_MAGIC: Final[tuple[tuple[bytes, int, ImageFormat], ...]] = (
    (b"\x89PNG\r\n\x1a\n", 0, "png"),
    (b"\xff\xd8\xff", 0, "jpeg"),
    (b"WEBP", 8, "webp"),
)
_SOURCE_TYPE: Final = re.compile(r"DigitalSourceType(?:=\"|='|[^<>]{0,200}>)\s{0,100}([^\"'<>\s]{1,200})")
_CREATOR: Final = re.compile(r"CreatorTool(?:=\"|='|>)([^\"'<>]{1,200})")
_XMP = f"""<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description rdf:about="" xmlns:xmp="http://ns.adobe.com/xap/1.0/"
 xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
 xmp:CreatorTool="{SOFTWARE}" Iptc4xmpExt:DigitalSourceType="%s"/>
</rdf:RDF></x:xmpmeta>
<?xpacket end="r"?>"""


class XmpFacts(NamedTuple):
    """Provenance fields of an XMP packet, unchanged; "" for a missing field."""

    digital_source_type: str
    creator_tool: str


def encode_image(
    picture: Picture,
    *,
    image_format: ImageFormat = "png",
    quality: int = 100,
    infotext: str | None = None,
    kind: Kind | None = "generated",
) -> bytes:
    """Encode ``picture`` as an image file with metadata.

    Args:
        picture: The image to encode.
        image_format: Format of the file.
        quality: Quality of JPEG and WebP, 0 to 100.
        infotext: Generation parameters to embed, shortened to ``infotext.MAX_BYTES``.
        kind: Selects the digital source type in the XMP; ``None``: no XMP, for an image that no model changed.
    """
    infotext = None if infotext is None else shorten(infotext, MAX_BYTES)
    image, packet = Image.fromarray(picture.array), "" if kind is None else _XMP % DIGITAL_SOURCE_TYPES[kind]
    file = BytesIO()
    if image_format == "png":
        image.save(file, "PNG", pnginfo=_png_text(infotext, packet), compress_type=_PNG_STRATEGY)
        return file.getvalue()
    metadata = {"exif": _exif(infotext)} | ({"xmp": packet.encode()} if packet else {})
    if image_format == "jpeg":
        image.save(file, "JPEG", quality=max(1, quality), subsampling=0 if quality >= 90 else 2, **metadata)
    else:
        image.save(file, "WEBP", quality=quality, method=4, **metadata)
    return file.getvalue()


def image_format_of(path: Path) -> ImageFormat:
    """Return the image format for the suffix of ``path``.

    Raises:
        InvalidRequest: The suffix is not that of a supported format.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidRequest(
            f"{path.name!r} has no known file extension; use {', '.join(SUFFIXES)}, or name an existing folder.",
            param="output",
        )
    return SUFFIXES[path.suffix.lower()]


def read_infotext(data: bytes, *, may_shorten: bool = False) -> str | None:
    """Read the generation parameters in an image file, as A1111 and other tools write them.

    They are in the PNG text chunk ``parameters`` or in the EXIF user comment.

    Args:
        data: A PNG, JPEG or WebP file.
        may_shorten: Shorten a longer text to ``infotext.MAX_BYTES`` instead of raising an error.

    Returns:
        The text, or ``None`` if there is none.

    Raises:
        InvalidRequest: ``data`` is not such a file, or the text is longer than ``infotext.MAX_BYTES``.
    """
    image = _open(data, "image")
    chunk = image.info.get("parameters")
    if isinstance(chunk, PngImagePlugin.iTXt):
        text = str(chunk)
    else:
        text = decode_png_text(chunk) if isinstance(chunk, str) else _user_comment(image)
    if not text.strip():
        return None
    if may_shorten:
        return shorten(text, MAX_BYTES)
    check_length(text)
    return text


def format_of(data: bytes, *, name: str = "image") -> ImageFormat:
    """Return the format of an image file, detected from its first bytes.

    Raises:
        InvalidRequest: ``data`` is not a PNG, JPEG or WebP file. The error names the parameter ``name``.
    """
    kind = next((kind for magic, at, kind in _MAGIC if data[at : at + len(magic)] == magic), None)
    if kind is None:
        raise InvalidRequest(
            f"{name} is not a PNG, JPEG or WebP file; send one of these three.", param=name, code="invalid_image"
        )
    return kind


def read_xmp(data: bytes, *, name: str = "image") -> XmpFacts | None:
    """Read the provenance fields of the XMP packet in an image file; ``None`` if there is no packet.

    Raises:
        InvalidRequest: ``data`` is not an image file that can be read.
    """
    info = _open(data, name).info
    packet = info.get("xmp") or info.get("XML:com.adobe.xmp")
    if not isinstance(packet, (bytes, str)):
        return None
    text = packet.decode("utf-8", "replace") if isinstance(packet, bytes) else packet
    source, creator = _SOURCE_TYPE.search(text), _CREATOR.search(text)
    return XmpFacts(source[1] if source else "", creator[1] if creator else "")


def decode_image(data: bytes, *, name: str = "image", max_pixels: int = MAX_DECODED_PIXELS) -> Picture:
    """Decode a PNG, JPEG or WebP file to an upright RGB image, with transparency composited over white.

    Format and size are checked from the first bytes and the header, before any pixel is decoded.

    Raises:
        InvalidRequest: ``data`` is not such a file, is damaged, or is too large. The error names ``name``.
    """
    return decode_with_mask(data, name=name, max_pixels=max_pixels)[0]


def decode_with_mask(
    data: bytes, *, name: str = "image", max_pixels: int = MAX_DECODED_PIXELS
) -> tuple[Picture, Picture | None]:
    """Decode an image file as :func:`decode_image` does; also return its transparent pixels as a mask.

    Returns:
        The RGB image, and a mask with 255 for pixels to repaint, or ``None`` if all pixels are opaque.
    """
    image, mask = _load(data, name, max_pixels), None
    if _has_alpha(image):
        rgba = image.convert("RGBA")
        repaint = np.asarray(rgba)[..., 3] < 128
        mask = Picture.from_array(np.where(repaint, 255, 0).astype(np.uint8)) if repaint.any() else None
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    picture = Picture.from_array(np.asarray(image.convert("RGB"), dtype=np.uint8))
    return picture, mask


def has_transparency(data: bytes, *, name: str = "image", max_pixels: int = MAX_DECODED_PIXELS) -> bool:
    """Return whether an image file has pixels that are not opaque; :func:`decode_image` puts white behind them.

    Raises:
        InvalidRequest: ``data`` is not an image that can be read. The error names ``name``.
    """
    if not _has_alpha(_open(data, name, max_pixels)):
        return False
    alpha = np.asarray(_load(data, name, max_pixels).convert("RGBA"), dtype=np.uint8)[..., 3]
    return bool((alpha < 255).any())


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


def _to_srgb(image: Image.Image) -> Image.Image:
    """Convert an image with a color profile to sRGB; return it unchanged without a usable profile."""
    profile = image.info.get("icc_profile")
    if not profile or len(profile) > MAX_PROFILE_BYTES or b"sRGB" in profile or b"s\0R\0G\0B" in profile:
        return image
    if image.mode not in ("RGB", "RGBA", "CMYK") or "transparency" in image.info:
        return image
    try:
        mode = "RGBA" if image.mode == "RGBA" else "RGB"
        source_profile = ImageCms.ImageCmsProfile(BytesIO(profile))
        converted = ImageCms.profileToProfile(image, source_profile, ImageCms.createProfile("sRGB"), outputMode=mode)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):  # damaged, or for other channels
        return image
    return image if converted is None else converted


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit grayscale to 8 bits; return any other image unchanged. Pillow would clip values above 255."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image, dtype=np.uint32) >> 8).clip(0, 255).astype(np.uint8))


def decode_mask(
    data: bytes,
    *,
    convention: MaskConvention = "openai",
    name: str = "mask",
    max_pixels: int = MAX_DECODED_PIXELS,
) -> Picture:
    """Decode a mask file to one channel in which 255 marks the pixels to repaint.

    If all pixels are opaque, with or without an alpha channel, both conventions repaint gray values of 128 and above.
    Otherwise ``openai`` repaints where alpha is below 128, and ``a1111`` where alpha is above 128.

    Raises:
        InvalidRequest: ``data`` is not an image that can be read.
    """
    image = _load(data, name, max_pixels)
    alpha = np.asarray(image.convert("RGBA"), dtype=np.uint8)[..., 3] if _has_alpha(image) else None
    if alpha is None or bool((alpha == 255).all()):
        is_repainted = np.asarray(image.convert("L"), dtype=np.uint8) >= 128
    else:
        is_repainted = alpha > 128 if convention == "a1111" else alpha < 128
    return Picture.from_array(np.where(is_repainted, 255, 0).astype(np.uint8))


def resize(picture: Picture, width_px: int, height_px: int, *, is_padded: bool = False) -> Picture:
    """Resize ``picture`` to ``width_px`` x ``height_px`` and keep its aspect ratio.

    Images use Lanczos resampling. Masks (one channel) use the nearest pixel, so that they stay black and white.

    Args:
        picture: The image or mask to resize.
        width_px: New width.
        height_px: New height.
        is_padded: If the aspect ratios differ, pad by repeating the edges instead of cropping.
    """
    if (picture.width_px, picture.height_px) == (width_px, height_px):
        return picture
    ratios = (picture.width_px / width_px, picture.height_px / height_px)
    if is_padded:
        inner_size = (max(1, round(picture.width_px / max(ratios))), max(1, round(picture.height_px / max(ratios))))
        return _pad(resize(picture, *inner_size), width_px, height_px)
    keep_width, keep_height = width_px * min(ratios), height_px * min(ratios)
    left, top = (picture.width_px - keep_width) / 2, (picture.height_px - keep_height) / 2
    box = (left, top, left + keep_width, top + keep_height)
    return stretch(picture, width_px, height_px, box=box)


def thumbnail(data: bytes, side_px: int) -> bytes:
    """Make a WebP thumbnail of an image file, without its generation parameters.

    Args:
        data: A PNG, JPEG or WebP file that this server wrote; the limit of its size is ``MAX_OWN_PIXELS``.
        side_px: Maximum length of the longer side.

    Raises:
        InvalidRequest: ``data`` cannot be decoded.
    """
    image = Image.fromarray(decode_image(data, max_pixels=MAX_OWN_PIXELS).array)
    image.thumbnail((side_px, side_px), Image.Resampling.LANCZOS, reducing_gap=2.0)
    reduced = Picture.from_array(np.asarray(image, dtype=np.uint8))
    return encode_image(reduced, image_format="webp", quality=THUMBNAIL_QUALITY)


def stretch(
    picture: Picture, width_px: int, height_px: int, *, box: tuple[float, float, float, float] | None = None
) -> Picture:
    """Resize all of ``picture`` to this size without keeping its aspect ratio; masks use the nearest pixel."""
    filter_ = Image.Resampling.NEAREST if picture.channels == 1 else Image.Resampling.LANCZOS
    resized = Image.fromarray(picture.array).resize((width_px, height_px), filter_, box)
    return Picture.from_array(np.asarray(resized, dtype=np.uint8))


def _pad(picture: Picture, width_px: int, height_px: int) -> Picture:
    """Center ``picture`` in ``width_px`` x ``height_px`` and repeat its edge pixels outwards."""
    extra_width, extra_height = width_px - picture.width_px, height_px - picture.height_px
    vertical = (extra_height // 2, extra_height - extra_height // 2)
    horizontal = (extra_width // 2, extra_width - extra_width // 2)
    margins = (vertical, horizontal, (0, 0))
    return Picture.from_array(np.pad(picture.array, margins[: picture.array.ndim], mode="edge"))


def _png_text(infotext: str | None, xmp: str) -> PngImagePlugin.PngInfo:
    chunks = PngImagePlugin.PngInfo()
    if infotext is not None:
        chunks.add_itxt("parameters", infotext)
    chunks.add_text("Software", SOFTWARE)
    if xmp:
        chunks.add_itxt("XML:com.adobe.xmp", xmp)
    return chunks


def _exif(infotext: str | None) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = SOFTWARE
    if infotext is not None:
        comment = UNICODE_HEADER + infotext.encode("utf-16-be", errors="replace")
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    return exif


def _user_comment(image: Image.Image) -> str:
    """Return the EXIF user comment, "" if there is none.

    Raises:
        InvalidRequest: The EXIF block cannot be read.
    """
    try:
        comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
    except Exception as error:  # malformed files raise errors of many types
        raise _damaged_error("image") from error
    if isinstance(comment, str):  # EXIF type ASCII, which Pillow decodes as Latin-1
        comment = comment.encode("latin-1", "replace")
    return decode_user_comment(comment) if isinstance(comment, bytes) else ""


def _load(data: bytes, name: str, max_pixels: int) -> Image.Image:
    image = _open(data, name, max_pixels)
    try:
        image.load()
        return _to_eight_bits(_to_srgb(ImageOps.exif_transpose(image)))
    except Exception as error:  # malformed files raise errors of many types
        raise _damaged_error(name) from error


def _open(data: bytes, name: str, max_pixels: int = MAX_DECODED_PIXELS) -> Image.Image:
    kind = format_of(data, name=name)
    if (problem := problem_of(kind, data)) is not None:
        raise _too_complex(name, problem)
    try:
        image = Image.open(BytesIO(data), formats=(kind.upper(),))
    except Image.DecompressionBombError as error:
        raise _too_large(name, "too large", max_pixels) from error
    except Exception as error:
        raise _damaged_error(name) from error
    if (problem := problem_of_profile(image.info.get("Raw profile type exif"))) is not None:
        raise _too_complex(name, problem)
    width, height = image.size
    if width * height > max_pixels:
        raise _too_large(name, f"{width}x{height}", max_pixels)
    return image


def _too_large(name: str, size: str, max_pixels: int) -> InvalidRequest:
    message = f"{name} is {size}; at most {max_pixels} pixels are allowed."
    return InvalidRequest(message, param=name, code="image_too_large")


def _too_complex(name: str, problem: str) -> InvalidRequest:
    message = f"{name} has {problem}; save it again in a simpler encoding, such as a plain PNG."
    return InvalidRequest(message, param=name, code="image_too_complex")


def _damaged_error(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is damaged or too large to be read.", param=name, code="invalid_image")

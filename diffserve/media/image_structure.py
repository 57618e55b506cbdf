"""Structure checks of image files before decoding, because small malicious files can take minutes to decode.

A progressive JPEG is decoded scan by scan over the whole image: 10,000 scans of a few bytes take 10,000 times as long
as one. PNG and WebP files with very many chunks and JPEG files with very many segments are slow to open.
"""

from __future__ import annotations

import re
from typing import Final

MAX_CHUNKS: Final = 10_000
"""Limit for PNG and WebP, including the frames of an animation, of which only the first is decoded."""

MIN_SCANS, MAX_SCANS = 20, 100
MAX_SCANNED_PIXELS: Final = 400_000_000
"""Limit of pixels times scans of a JPEG, within ``MIN_SCANS`` and ``MAX_SCANS``. Progressive files usually have 10."""

MAX_SEGMENTS: Final = 500
"""Limit for a JPEG. A color profile has at most 255."""

MAX_EXIF_HEADERS: Final = 64
"""Regular files have one. Pillow removes each in a separate pass (CVE-2026-96643)."""

MAX_JUNK_BYTES: Final = 1 << 16
"""Limit of the bytes between the segments of a JPEG; decoders differ in what they skip."""

EXIF_HEADER: Final = b"Exif\0\0"
_SCAN_END: Final = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_EOI, _SOS = 0xD9, 0xDA
_NO_FRAME: Final = frozenset({0xC4, 0xC8, 0xCC})  # markers in 0xC0 .. 0xCF for tables, and a reserved one
_STANDALONE: Final = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})


def problem_of(image_format: str, data: bytes) -> str | None:
    """Return what makes the file too complex to decode ("more than 100 scans"), or ``None``."""
    if data.count(EXIF_HEADER) > MAX_EXIF_HEADERS:
        return f"more than {MAX_EXIF_HEADERS} EXIF headers"
    if image_format == "jpeg":
        return _problem_of_jpeg(data)
    return _problem_of_chunks(data, is_png=image_format == "png")


def problem_of_profile(text: object) -> str | None:
    """Return what makes an EXIF block in hexadecimal (the PNG text ``Raw profile type exif``) too complex."""
    is_long = isinstance(text, str) and text.replace("\n", "").lower().count(EXIF_HEADER.hex()) > MAX_EXIF_HEADERS
    return f"more than {MAX_EXIF_HEADERS} EXIF headers" if is_long else None


def _problem_of_chunks(data: bytes, *, is_png: bool) -> str | None:
    at = 8 if is_png else 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            return None
        if is_png:
            at += 12 + int.from_bytes(data[at : at + 4], "big")
        else:
            num_bytes = int.from_bytes(data[at + 4 : at + 8], "little")
            at += 8 + num_bytes + num_bytes % 2
    return f"more than {MAX_CHUNKS} chunks"


def _problem_of_jpeg(data: bytes) -> str | None:
    """Walk over the JPEG segments to the end of the image; damage is left for the decoder to report."""
    at, num_scans, num_segments, num_frames, num_junk, max_scans = 2, 0, 0, 0, 0, MAX_SCANS
    while True:
        start = data.find(b"\xff", at)
        end = start + 1
        while start >= 0 and data[end : end + 1] == b"\xff" and end - start <= MAX_JUNK_BYTES:
            end += 1
        if start < 0 or end >= len(data):
            return None
        num_junk += end - at - 1
        marker, at = data[end], end + 1
        if marker == _EOI:
            return None
        if marker in _STANDALONE:
            num_junk += 2
        else:
            num_segments += 1
            if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
                num_frames += 1
                height, width = (int.from_bytes(data[at + offset : at + offset + 2], "big") for offset in (3, 5))
                max_scans = max(MIN_SCANS, min(MAX_SCANS, MAX_SCANNED_PIXELS // max(1, width * height)))
            at += max(2, int.from_bytes(data[at : at + 2], "big"))
        if marker == _SOS:
            num_scans += 1
            scan_end = _SCAN_END.search(data, at)
            if scan_end is None:
                return None
            at = scan_end.start()
        if num_scans > max_scans:
            return f"more than {max_scans} scans"
        if num_segments > MAX_SEGMENTS + num_scans:
            return f"more than {MAX_SEGMENTS} segments"
        if num_frames > 1:
            return "more than one frame"
        if num_junk > MAX_JUNK_BYTES:
            return f"more than {MAX_JUNK_BYTES} bytes between its segments"

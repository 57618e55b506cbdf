"""Decoding of text in image files: EXIF user comments, and PNG text chunks in the wrong encoding."""

from __future__ import annotations

import codecs
from typing import Final

UNICODE_HEADER: Final = b"UNICODE\x00"
"""Header of a UTF-16 user comment. The EXIF specification does not define the byte order."""

_ENCODINGS: Final[dict[bytes, tuple[str, ...]]] = {
    UNICODE_HEADER: ("utf-16-be", "utf-16-le", "utf-8"),
    b"ASCII\x00\x00\x00": ("utf-8", "latin-1"),
    b"JIS\x00\x00\x00\x00\x00": ("iso2022_jp", "shift_jis"),
    bytes(8): ("utf-8", "utf-16-be", "utf-16-le", "latin-1"),
}
"""The four headers of a user comment, and the encodings that writers use after each."""

_NO_HEADER: Final = _ENCODINGS[bytes(8)]
_BYTE_ORDER_MARKS: Final = (b"\xfe\xff", b"\xff\xfe")
_SAMPLE_BYTES: Final = 4096
"""Number of bytes that are decoded to choose the encoding."""


def decode_user_comment(comment: bytes) -> str:
    """Decode an EXIF user comment with any of the four headers, or without one, as some tools write it."""
    header = next((header for header in _ENCODINGS if comment.startswith(header)), b"")
    content = comment.removeprefix(header)
    if content.startswith(_BYTE_ORDER_MARKS):
        encoding = "utf-16"
    else:
        encoding = _best_encoding(content, _ENCODINGS.get(header, _NO_HEADER))
    text = codecs.getincrementaldecoder(encoding)("replace").decode(content)  # drops a truncated last character
    return text.removeprefix("\ufeff").rstrip("\0")


def decode_png_text(text: str) -> str:
    """Decode a PNG tEXt or zTXt chunk as UTF-8 if possible; it was read as Latin-1, as the specification says."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text


def _best_encoding(content: bytes, encodings: tuple[str, ...]) -> str:
    """Return the encoding in which ``content`` has the largest share of ASCII text and no invalid sequence."""
    scores = {encoding: _ascii_share(content, encoding) for encoding in encodings}
    best = max(encodings, key=lambda encoding: scores[encoding])
    return best if scores[best] >= 0.0 else "latin-1"


def _ascii_share(content: bytes, encoding: str) -> float:
    """Return the share of ASCII text at the start of ``content``, negative if it is not valid in ``encoding``."""
    num_bytes = len(content) & ~1 if encoding.startswith("utf-16") else len(content)
    is_cut = num_bytes > _SAMPLE_BYTES
    try:
        sample = content[: min(num_bytes, _SAMPLE_BYTES)]
        text = codecs.getincrementaldecoder(encoding)("strict").decode(sample, not is_cut).rstrip("\0")
    except UnicodeError:
        return -1.0
    if any(character < " " and character not in "\t\n\r" for character in text):
        return -1.0
    return sum(character < "\x7f" for character in text) / max(1, len(text))

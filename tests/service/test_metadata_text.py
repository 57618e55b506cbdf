"""Generation parameters in every text encoding that tools write into PNG, JPEG and WebP files, read through the API."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import pytest
from PIL import ExifTags, Image

from diffserve.media.infotext import decode_user_comment
from tests.service.server import RunningServer
from tests.service.test_edits import FEW, picture

PAIRS = "Negative prompt: dog\nSteps: 12, Sampler: Euler a, CFG scale: 7, Seed: 42, Size: 64x64"
WIDE = f"a fox in the snow, F\u00fcchse, \u72d0\u72f8 \U0001f98a\n{PAIRS}"
LATIN = f"a fox in the snow, F\u00fcchse\n{PAIRS}"
PLAIN = f"a fox in the snow\n{PAIRS}"

COMMENTS: dict[str, tuple[bytes, str]] = {
    "UTF-16BE": (b"UNICODE\0" + WIDE.encode("utf-16-be"), WIDE),
    "UTF-16LE": (b"UNICODE\0" + WIDE.encode("utf-16-le"), WIDE),
    "UTF-16 with a byte order mark": (b"UNICODE\0" + WIDE.encode("utf-16"), WIDE),
    "UTF-16LE ending in a null": (b"UNICODE\0" + WIDE.encode("utf-16-le") + b"\0\0", WIDE),
    "UTF-8 marked as Unicode": (b"UNICODE\0" + WIDE.encode(), WIDE),
    "ASCII": (b"ASCII\0\0\0" + PLAIN.encode(), PLAIN),
    "UTF-8 marked as ASCII": (b"ASCII\0\0\0" + WIDE.encode() + b"\0", WIDE),
    "undefined": (bytes(8) + WIDE.encode(), WIDE),
    "undefined UTF-16LE": (bytes(8) + WIDE.encode("utf-16-le"), WIDE),
    "bare UTF-8": (WIDE.encode(), WIDE),
    "bare UTF-8 with a byte order mark": (WIDE.encode("utf-8-sig"), WIDE),
    "JIS": (b"JIS\0\0\0\0\0" + f"\u72d0\n{PAIRS}".encode("iso2022_jp"), f"\u72d0\n{PAIRS}"),
    "bare Latin-1": (LATIN.encode("latin-1"), LATIN),
}


def with_comment(comment: bytes, kind: str, byte_order: str = "<", tag_type: int = 7, side_px: int = 16) -> bytes:
    """Return an image file whose EXIF block holds ``comment``, written byte for byte."""
    exif_ifd_offset, comment_offset = 26, 44
    order = byte_order
    tiff = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    tiff += struct.pack(f"{order}HHHIII", 1, ExifTags.IFD.Exif, 4, 1, exif_ifd_offset, 0)
    tiff += struct.pack(f"{order}HHHIII", 1, ExifTags.Base.UserComment, tag_type, len(comment), comment_offset, 0)
    file = BytesIO()
    Image.fromarray(picture(side_px, side_px)).save(file, kind, exif=b"Exif\0\0" + tiff + comment)
    return file.getvalue()


def with_chunk(kind: bytes, content: bytes) -> bytes:
    """Return a PNG with one more chunk before its pixels."""
    file = BytesIO()
    Image.fromarray(picture(16, 16)).save(file, "PNG")
    png = file.getvalue()
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return png[:33] + chunk + png[33:]


CHUNKS: dict[str, Callable[[str], bytes]] = {
    "tEXt in Latin-1": lambda text: with_chunk(b"tEXt", b"parameters\0" + text.encode("latin-1")),
    "tEXt in UTF-8": lambda text: with_chunk(b"tEXt", b"parameters\0" + text.encode()),
    "zTXt in Latin-1": lambda text: with_chunk(b"zTXt", b"parameters\0\0" + zlib.compress(text.encode("latin-1"))),
    "zTXt in UTF-8": lambda text: with_chunk(b"zTXt", b"parameters\0\0" + zlib.compress(text.encode())),
    "iTXt": lambda text: with_chunk(b"iTXt", b"parameters\0\0\0\0\0" + text.encode()),
    "compressed iTXt": lambda text: with_chunk(
        b"iTXt", b"parameters\0\1\0\0\0" + zlib.compress(text.encode())
    ),
}  # fmt: skip


def info_of(server: RunningServer, file: bytes) -> str:
    answer = server.client.post("/sdapi/v1/png-info", json={"image": base64.b64encode(file).decode()})
    assert answer.status_code == 200, answer.text
    read = answer.json()
    if "Seed" in read["info"]:
        assert (read["parameters"]["Seed"], read["parameters"]["Negative prompt"]) == ("42", "dog")
    return str(read["info"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
@pytest.mark.parametrize("encoding", COMMENTS)
def test_user_comment_is_read_in_every_encoding(server: RunningServer, encoding: str, kind: str) -> None:
    comment, text = COMMENTS[encoding]
    for byte_order in "<>":
        assert info_of(server, with_comment(comment, kind, byte_order)) == text
    for tag_type in (1, 2):  # BYTE and ASCII; the specification requires 7, UNDEFINED
        if tag_type == 1 or b"\0" not in comment:
            assert info_of(server, with_comment(comment, kind, tag_type=tag_type)) == text


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
def test_png_text_chunk_is_read_in_every_encoding(server: RunningServer, chunk: str) -> None:
    text = LATIN if "Latin-1" in chunk else WIDE
    assert info_of(server, CHUNKS[chunk](text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("comment", [b"", bytes(8), b"ASCII\0\0\0      ", b"UNICODE\0" + bytes(20)])
def test_blank_user_comment_is_no_text(server: RunningServer, comment: bytes) -> None:
    assert info_of(server, with_comment(comment, "JPEG")) == ""


@pytest.mark.slow
def test_comment_without_settings_is_neither_a_prompt_nor_parameters(server: RunningServer) -> None:
    """Check comments that cameras and phones write, for example "Screenshot"."""
    file = with_comment(b"ASCII\0\0\0Screenshot", "JPEG", side_px=64)
    image = {"image": base64.b64encode(file).decode()}
    varied = server.client.post("/v1/images/variations", json=image | FEW)
    assert "its variation is generated without one" in varied.json()["warnings"][0]
    verified = server.client.post("/v1/provenance/verify", json=image).json()
    assert (verified["parameters"], info_of(server, file)) == (False, "Screenshot")


@pytest.mark.parametrize("text", ["\u72d0", "fox", "a", "\u00fc", "\U0001f98a", WIDE, LATIN])
def test_short_texts_survive_the_most_common_encodings(text: str) -> None:
    assert decode_user_comment(b"UNICODE\0" + text.encode("utf-16-be")) == text
    assert decode_user_comment(text.encode()) == text


def test_no_bytes_raise() -> None:
    for comment in (
        b"\xff",
        b"UNICODE\0\xd8",
        b"UNICODE\0\xd8\x3d",
        b"JIS\0\0\0\0\0\xff\xff\xff",
        b"\0",
        b"\0\xff" * 9,
    ):
        assert isinstance(decode_user_comment(comment), str)

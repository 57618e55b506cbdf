"""Generators of small image files that are slow to decode, for tests."""

from __future__ import annotations

import struct
from io import BytesIO

from PIL import Image


def jpeg(side_px: int = 64, *, mode: str = "RGB", **options: object) -> bytes:
    """Return a JPEG file of one color."""
    file = BytesIO()
    Image.new(mode, (side_px, side_px), 100).save(file, "JPEG", **options)
    return file.getvalue()


def segment(marker: int, body: bytes) -> bytes:
    """Return a JPEG segment."""
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def with_segments(file: bytes, *segments: bytes) -> bytes:
    """Insert ``segments`` after the first marker of the JPEG ``file``."""
    return file[:2] + b"".join(segments) + file[2:]


def scans(side_px: int, num_scans: int) -> bytes:
    """Return a progressive JPEG of ``num_scans`` scans; all but the first consist of runs of empty blocks.

    A scan of 4096x4096 pixels has 39 bytes and takes a millisecond or more.
    """
    file = jpeg(side_px, progressive=True, subsampling=2)
    first = file.index(b"\xff\xda")
    second = file.index(b"\xff\xda", first + 2)
    tables = file.find(b"\xff\xc4", first, second)  # tables of the second scan
    header = file[: second if tables < 0 else tables]
    run_table = segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\xe0")  # one symbol: a run of at least 2**14 blocks
    num_blocks, bits = (side_px // 8) ** 2, ""
    while num_blocks > 0:
        run = max(min(num_blocks, 32767), 16384)
        bits += "0" + format(run - 16384, "014b")
        num_blocks -= run
    bits += "1" * (-len(bits) % 8)
    data = bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)).replace(b"\xff", b"\xff\0")
    scan = segment(0xDA, b"\x01\x01\x00\x01\x3f\x00") + data
    return header + run_table + scan * (num_scans - 1) + b"\xff\xd9"


def webp(num_frames: int) -> bytes:
    """Return an animated WebP file with ``num_frames`` frames."""
    file = BytesIO()
    images = [Image.new("RGB", (16, 16), (200 * number, 9, 0)) for number in range(2)]
    images[0].save(file, "WEBP", save_all=True, append_images=images[1:], duration=50, lossless=True)
    data = bytearray(file.getvalue())
    data += bytes(data[data.rindex(b"ANMF") :]) * (num_frames - 2)
    data[4:8] = struct.pack("<I", len(data) - 8)
    return bytes(data)

"""Files that are built to be slow to decode are refused by their structure, before decoding."""

from __future__ import annotations

import time
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffserve.api.errors import InvalidRequest
from diffserve.media.images import decode_image, decode_mask, read_infotext, read_xmp
from tests.image_bombs import jpeg, scans, segment, webp, with_segments

FRAME = jpeg()[jpeg().index(b"\xff\xc0") : jpeg().index(b"\xff\xc4")]
EXIF = b"Exif\0\0"


def png_with_profile(num_headers: int) -> bytes:
    file, text = BytesIO(), PngInfo()
    block = f"\nexif\n{6 * num_headers}\n{(EXIF * num_headers).hex()}"
    text.add_text("Raw profile type exif", block, zip=True)
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=text)
    return file.getvalue()


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (scans(4096, 10_000), "more than 23 scans"),
        (scans(1024, 10_000), "more than 100 scans"),
        (scans(64, 101), "more than 100 scans"),
        (with_segments(jpeg(), *[segment(0xE5, b"")] * 100_000), "more than 500 segments"),
        (with_segments(jpeg(), *[segment(0xE1, EXIF + bytes(9000))] * 65), "more than 64 EXIF headers"),
        (with_segments(jpeg(), segment(0xE1, EXIF * 10_000)), "more than 64 EXIF headers"),
        (jpeg().replace(FRAME, 2 * FRAME), "more than one frame"),
        (jpeg()[:2] + b"\xff" * 10_000_000 + jpeg()[2:], "bytes between its segments"),
        (with_segments(jpeg(), segment(0xE5, b"") + bytes(10_000_000)), "bytes between its segments"),
        (webp(10_000), "more than 10000 chunks"),
        (png_with_profile(80_000), "more than 64 EXIF headers"),
    ],
    ids=["scans", "small", "smaller", "segments", "blocks", "headers", "frames", "fill", "junk", "webp", "png"],
)
def test_a_file_that_is_slow_to_decode_is_refused_quickly(file: bytes, problem: str) -> None:
    started_s = time.thread_time()
    for read in (decode_image, decode_mask, read_infotext, read_xmp):
        with pytest.raises(InvalidRequest, match=problem) as refused:
            read(file)
        assert refused.value.code == "image_too_complex"
    assert time.thread_time() - started_s < 2.0


def usual_files() -> list[bytes]:
    """Return regular files: baseline, progressive, restart intervals, profiles, thumbnails, animations."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    profile = [segment(0xE2, b"ICC_PROFILE\0" + bytes((number, 255)) + bytes(1000)) for number in range(1, 256)]
    options: tuple[dict[str, object], ...] = (
        {}, {"progressive": True}, {"progressive": True, "subsampling": 0, "quality": 90},
        {"restart_marker_blocks": 1}, {"restart_marker_rows": 1, "progressive": True},
        {"optimize": True}, {"exif": EXIF + b"II*\0\x08\0\0\0\0\0\0\0\0\0"}, {"comment": b"\xff\xda\xff\xd9" * 100},
    )  # fmt: skip
    files = []
    for option in options:
        file = BytesIO()
        noise.save(file, "JPEG", **option)
        files.append(file.getvalue())
    files += [jpeg(mode=mode, progressive=True) for mode in ("L", "CMYK")]
    thumbnail = segment(0xE1, EXIF + b"II*\0\x08\0\0\0\0\0\0\0\0\0" + jpeg(32, progressive=True))
    files += [
        with_segments(jpeg(), *profile),
        with_segments(jpeg(), thumbnail),
        jpeg() + jpeg(),
        jpeg()[:2] + b"\xff\xff" + jpeg()[2:],
    ]
    files += [scans(4096, 20), scans(64, 100), webp(2), webp(9_000), png_with_profile(1)]
    return files


def test_regular_files_are_decoded() -> None:
    for number, file in enumerate(usual_files()):
        assert decode_image(file).width_px >= 8, number


def test_a_jpeg_that_is_too_large_is_refused_for_its_size() -> None:
    file = BytesIO()
    Image.new("L", (8192, 8192)).save(file, "JPEG", progressive=True)
    with pytest.raises(InvalidRequest, match="8192x8192"):
        decode_image(file.getvalue())

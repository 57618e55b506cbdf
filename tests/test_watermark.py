"""Watermark: invisible, robust against JPEG and WebP, and without false positives."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from benchmarks.bench_watermark import photo_like, saved
from diffserve.api.types import Picture
from diffserve.media.start_picture import StartPicture
from diffserve.media.watermark import detect, embed


def photo(seed: int, side_px: int = 256) -> Picture:
    return photo_like(seed, side_px)


def flat(level: int) -> Picture:
    return Picture.from_array(np.full((128, 128, 3), level, np.uint8))


@pytest.mark.parametrize(
    ("picture", "is_cut_off"),
    [(photo(1), False), (photo(2, 128), False), (flat(0), True), (flat(128), False), (flat(255), True)],
    ids=["photo", "small", "black", "grey", "white"],
)
def test_a_watermark_is_invisible_and_survives_jpeg_and_webp(picture: Picture, is_cut_off: bool) -> None:
    """Check PNG only with ``is_cut_off``: clipping then removes half of the watermark."""
    marked = embed(picture, "generated")
    difference = marked.array.astype(int) - picture.array
    assert np.abs(difference).max() <= 2, "from 3 on, blocks are visible in a sky"
    assert (difference**2).mean() < 0.52, "PSNR of at least 51 dB"
    assert marked == embed(picture, "generated")
    once = saved(marked, "JPEG", 80)
    saves = (once, saved(once, "WEBP", 90), saved(marked, "WEBP", 90))
    for saved_image in (marked, *(() if is_cut_off else saves)):
        watermark = detect(saved_image)
        assert watermark is not None
        assert watermark.kind == "generated"
    composite = detect(embed(picture, "composite"))
    assert composite is not None
    assert (composite.kind, composite.confidence > 0.99) == ("composite", True)
    assert detect(picture) is None


def test_a_watermarked_image_has_the_same_bytes_on_every_machine() -> None:
    rows, columns = np.mgrid[:64, :72]
    pixels = np.stack([rows * 3, columns * 3, (rows * columns) % 256], axis=2).astype(np.uint8)
    assert hashlib.sha256(embed(Picture.from_array(pixels), "generated").data).hexdigest()[:16] == "8c6b657400aadc56"


def test_masks_and_images_smaller_than_a_block_stay_unchanged() -> None:
    for pixels in (np.zeros((7, 64, 3), np.uint8), np.full((64, 64), 255, np.uint8)):
        picture = Picture.from_array(pixels)
        assert embed(picture, "generated") == picture
        assert detect(picture) is None


def test_only_the_repainted_part_of_an_image_is_watermarked() -> None:
    original, generated = photo(3), photo(4)
    mask = np.zeros((256, 256), np.uint8)
    mask[64:192, 64:192] = 255
    start = StartPicture(picture=original, mask=Picture.from_array(mask))
    composite = start.lay_around(generated, lambda picture: embed(picture, "composite")).array
    assert np.array_equal(composite[mask == 0], original.array[mask == 0])
    watermark = detect(Picture.from_array(composite))
    assert watermark is not None
    assert watermark.kind == "composite"
    assert detect(start.lay_around(generated)) is None


@pytest.mark.slow
def test_no_false_positives_in_500_noise_images_and_200_photos() -> None:
    noise = (np.random.default_rng(seed).integers(0, 256, (256, 256, 3), dtype=np.uint8) for seed in range(500))
    assert all(detect(Picture.from_array(pixels)) is None for pixels in noise)
    assert all(
        detect(picture) is None for seed in range(100) for picture in (photo(seed), saved(photo(seed), "JPEG", 80))
    )

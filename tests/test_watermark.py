"""The mark in the pixels: not seen, still there after JPEG and WebP, and never found where there is none."""

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
def test_a_mark_is_not_seen_and_outlives_jpeg_and_webp(picture: Picture, is_cut_off: bool) -> None:
    """``is_cut_off``: half of it lies beyond the end of the scale, and what is left is found in PNG alone."""
    marked = embed(picture, "generated")
    difference = marked.array.astype(int) - picture.array
    assert np.abs(difference).max() <= 2, "blocks are seen in a sky from 3 on"
    assert (difference**2).mean() < 0.52, "51 dB and more"
    assert marked == embed(picture, "generated")
    once = saved(marked, "JPEG", 80)
    saves = (once, saved(once, "WEBP", 90), saved(marked, "WEBP", 90))
    for later in (marked, *(() if is_cut_off else saves)):
        found = detect(later)
        assert found is not None
        assert found.kind == "generated"
    composite = detect(embed(picture, "composite"))
    assert composite is not None
    assert (composite.kind, composite.confidence > 0.99) == ("composite", True)
    assert detect(picture) is None


def test_equal_pictures_are_marked_with_equal_bytes_on_every_machine() -> None:
    rows, columns = np.mgrid[:64, :72]
    pixels = np.stack([rows * 3, columns * 3, (rows * columns) % 256], axis=2).astype(np.uint8)
    assert hashlib.sha256(embed(Picture.from_array(pixels), "generated").data).hexdigest()[:16] == "8c6b657400aadc56"


def test_what_is_too_small_and_what_is_a_mask_stay_as_they_are() -> None:
    for pixels in (np.zeros((7, 64, 3), np.uint8), np.full((64, 64), 255, np.uint8)):
        picture = Picture.from_array(pixels)
        assert embed(picture, "generated") == picture
        assert detect(picture) is None


def test_where_a_mask_keeps_a_picture_nothing_is_marked_and_the_rest_is_found() -> None:
    before, painted = photo(3), photo(4)
    mask = np.zeros((256, 256), np.uint8)
    mask[64:192, 64:192] = 255
    start = StartPicture(picture=before, mask=Picture.from_array(mask))
    laid = start.lay_around(painted, lambda picture: embed(picture, "composite")).array
    assert np.array_equal(laid[mask == 0], before.array[mask == 0])
    found = detect(Picture.from_array(laid))
    assert found is not None
    assert found.kind == "composite"
    assert detect(start.lay_around(painted)) is None


@pytest.mark.slow
def test_of_500_pictures_of_noise_and_200_like_photographs_none_is_said_to_be_marked() -> None:
    noise = (np.random.default_rng(seed).integers(0, 256, (256, 256, 3), dtype=np.uint8) for seed in range(500))
    assert all(detect(Picture.from_array(pixels)) is None for pixels in noise)
    assert all(detect(one) is None for seed in range(100) for one in (photo(seed), saved(photo(seed), "JPEG", 80)))

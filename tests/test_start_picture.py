"""Outpainting: the canvas, its fill, and the mask."""

from __future__ import annotations

import numpy as np
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.start_picture import StartPicture, read_margins


def start(width: int = 64, height: int = 48, mask: Picture | None = None) -> StartPicture:
    pixels = np.random.default_rng(1).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return StartPicture(picture=Picture.from_array(pixels), mask=mask)


@pytest.mark.parametrize("margins", [(0, 0, 32, 0), (16, 8, 24, 40), (0, 5, 0, 0)])
def test_canvas_holds_the_picture_and_masks_what_is_new(margins: tuple[int, int, int, int]) -> None:
    left, top, right, bottom = margins
    old, new = start(), start().extended(margins)
    assert new.mask is not None
    canvas, mask = new.picture.array, new.mask.array
    assert canvas.shape == (48 + top + bottom, 64 + left + right, 3)
    assert np.array_equal(canvas[top : top + 48, left : left + 64], old.picture.array)
    inner = np.zeros(mask.shape, bool)
    inner[top : top + 48, left : left + 64] = True
    assert (mask[~inner] == 255).all()
    band = [8 if margin else 0 for margin in margins]
    unmasked = mask[top + band[1] : top + 48 - band[3], left + band[0] : left + 64 - band[2]]
    assert (unmasked == 0).all()
    assert int((mask == 0).sum()) == unmasked.size


def test_nothing_of_the_fill_shows_and_the_middle_keeps_its_bytes() -> None:
    new = start().extended((0, 0, 64, 0))
    white = Picture.from_array(np.full(new.picture.array.shape, 255, np.uint8))
    result = new.lay_around(white).array
    assert (result[:, 64:] == 255).all(), "the new area is generated"
    assert np.array_equal(result[:, :56], new.picture.array[:, :56])
    assert not np.array_equal(result[:, 56:64], new.picture.array[:, 56:64]), "blended in the band"


def test_fill_is_near_the_colors_of_the_edge_and_the_same_each_time() -> None:
    gray = StartPicture(picture=Picture.from_array(np.full((64, 64, 3), 100, np.uint8)))
    first, second = (gray.extended((64, 0, 0, 0)).picture.array for _ in range(2))
    assert np.array_equal(first, second)
    assert abs(first[:, :64].mean() - 100) < 2
    assert 15 < first[:, :64].std() < 35


def test_a_given_mask_is_kept() -> None:
    mask = np.zeros((48, 64), np.uint8)
    mask[20:24, 10:14] = 255
    new = start(mask=Picture.from_array(mask)).extended((0, 0, 16, 0))
    assert new.mask is not None
    assert (new.mask.array[20:24, 10:14] == 255).all()
    assert (new.mask.array[:20, :50] == 0).all()


@pytest.mark.parametrize(
    "text", ["", "1,2,3", "1,2,3,4,5", "a,0,0,0", "-1,0,0,0", "0,0,0,0", "0,0,0,4096", "1e3,0,0,0"]
)
def test_bad_margins_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_margins(text)
    assert refused.value.param == "outpaint"


def test_margins_are_left_top_right_bottom() -> None:
    assert read_margins(" 1, 2,3 ,4") == (1, 2, 3, 4)

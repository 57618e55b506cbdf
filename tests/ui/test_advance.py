"""Progress of a request for several images: one growing share and one remaining time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from diffserve.client import Failure, LostImage, Progress
from ui.create.painting import Advance

STEPS = 10


def step(index: int | None, done: int, left_s: float, own_left_s: float | None = None) -> Progress:
    own_s = left_s if own_left_s is None else own_left_s
    return Progress(id="1", image_index=index, step=done, steps=STEPS, seconds_left=own_s, request_seconds_left=left_s)


def test_images_generated_in_pairs_have_one_progress() -> None:
    """Report four images, two at a time and a step of both per second: two finish before the others start."""
    advance, shares, left_s = Advance(), [0.0], list[float | None]()
    advance.take(step(None, 0, 20.0), 0.0)
    for second in range(1, 2 * STEPS + 1):
        pair, done = (0, 1) if second <= STEPS else (2, 3), (second - 1) % STEPS + 1
        for index in pair:
            advance.take(step(index, done, 20.0 - second, own_left_s=float(STEPS - done)), float(second))
            shares.append(advance.share(4))
        left_s.append(advance.seconds_left(float(second)))
    assert all(before < after for before, after in pairwise(shares))
    assert shares[-1] == 1.0
    assert left_s == [20.0 - second for second in range(1, 2 * STEPS + 1)], "of all, not of those that are painted now"


def test_the_time_advances_between_reports() -> None:
    advance = Advance()
    advance.take(step(0, 9, 8.0, own_left_s=1.0), 5.0)
    assert advance.seconds_left(6.0) == pytest.approx(7.0)
    assert advance.seconds_left(20.0) == 0.0


def test_a_failed_image_no_longer_counts() -> None:
    advance = Advance()
    advance.take(step(0, 5, 99.0), 5.0)
    advance.take(step(1, 1, 99.0), 5.0)
    advance.take(LostImage(id="1", image_index=1, failure=Failure(code="x", message="lost.")), 5.0)
    assert advance.share(2) == pytest.approx(0.75)


def test_nothing_is_estimated_without_reports() -> None:
    assert Advance().seconds_left(0.0) is None
    assert Advance().share(2) == 0.0

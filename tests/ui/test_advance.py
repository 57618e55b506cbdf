"""How far a request of several pictures is: one number that grows and one that shrinks, whichever picture tells."""

from __future__ import annotations

from itertools import pairwise

import pytest

from diffserve.client import Failure, LostImage, Progress
from ui.create.advance import Advance

STEPS = 10


def step(index: int | None, done: int, seconds_left: float | None = None) -> Progress:
    return Progress(id="1", image_index=index, step=done, steps=STEPS, seconds_left=seconds_left)


def test_pictures_painted_two_by_two_are_told_as_one_work() -> None:
    """Four pictures, two at a time, a step of both each second: half of them are done before the others begin."""
    advance, shares, ends_s = Advance(), [0.0], []
    advance.take(step(None, 0, 20.0), 0.0)
    assert advance.seconds_left(4, 0.0) == pytest.approx(20.0)
    for second in range(1, 2 * STEPS + 1):
        pair, done = (0, 1) if second <= STEPS else (2, 3), (second - 1) % STEPS + 1
        for index in pair:
            advance.take(step(index, done, float(STEPS - done)), float(second))
            shares.append(advance.share(4))
        left_s = advance.seconds_left(4, float(second))
        assert left_s is not None
        ends_s.append(second + left_s)
    assert all(before < after for before, after in pairwise(shares))
    assert shares[-1] == 1.0
    assert ends_s == pytest.approx([20.0] * len(ends_s), rel=0.1), "the end of all, not of those that are painted now"


def test_the_time_left_is_that_of_the_last_and_goes_on_between_what_is_told() -> None:
    advance = Advance()
    advance.take(step(0, 9, 1.0), 5.0)
    advance.take(step(1, 2, 8.0), 5.0)
    assert advance.seconds_left(2, 5.0) == pytest.approx(8.0)
    advance.take(step(0, 10, 0.0), 6.0)
    assert advance.seconds_left(2, 6.0) == pytest.approx(7.0)


def test_a_lost_picture_is_waited_for_no_longer() -> None:
    advance = Advance()
    advance.take(step(0, 5, 5.0), 5.0)
    advance.take(step(1, 1, 99.0), 5.0)
    advance.take(LostImage(id="1", image_index=1, failure=Failure(code="x", message="lost.")), 5.0)
    assert advance.share(2) == pytest.approx(0.75)
    assert advance.seconds_left(2, 5.0) == pytest.approx(5.0)


def test_nothing_is_guessed_where_nothing_is_told() -> None:
    assert Advance().seconds_left(2, 0.0) is None
    assert Advance().share(2) == 0.0

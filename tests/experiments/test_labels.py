"""Placement of labels: apart, as near as possible, and off obstacles."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from diffserve.experiments.labels import Box, choose_place, spread


def test_labels_that_are_apart_stay_where_they_are() -> None:
    assert spread([50.0, 10.0, 30.0], [10, 10, 10], 0, 100) == [50.0, 10.0, 30.0]


def test_equal_labels_share_the_space_around_their_place() -> None:
    assert spread([50.0, 50.0, 50.0], [10, 10, 10], 0, 100) == [40.0, 50.0, 60.0]
    assert spread([50.0, 50.0], [10, 20], 0, 100) == [42.5, 57.5], "the smallest sum of squared moves"
    assert spread([0.0, 0.0], [10, 10], 0, 100) == [5.0, 15.0], "not beyond the lower end"
    assert spread([99.0, 100.0], [10, 10], 0, 100) == [85.0, 95.0], "not beyond the upper end"


@pytest.mark.parametrize("seed", range(20))
def test_random_labels_never_overlap_and_keep_their_order(seed: int) -> None:
    rng = random.Random(seed)
    centers = [rng.choice([0.0, 20.0, rng.uniform(0, 200)]) for _ in range(21)]
    sizes = [rng.uniform(4, 9) for _ in centers]
    moved = spread(centers, sizes, 0, 200)
    order = sorted(range(21), key=lambda index: moved[index])
    for below, above in pairwise(order):
        assert moved[above] - moved[below] >= (sizes[above] + sizes[below]) / 2 - 1e-9
        assert centers[below] <= centers[above]
    assert moved[order[0]] - sizes[order[0]] / 2 >= -1e-9
    assert moved[order[-1]] + sizes[order[-1]] / 2 <= 200 + 1e-9


def test_the_first_free_place_is_chosen_or_the_one_that_covers_least() -> None:
    frame, taken = Box(0, 0, 10, 10), Box(0, 0, 5, 5)
    covered, outside, free = Box(1, 1, 3, 3), Box(9, 9, 12, 12), Box(6, 6, 8, 8)
    assert choose_place([covered, outside, free, Box(5, 5, 7, 7)], [taken], frame) == free
    partly = Box(4, 4, 6, 6)
    assert choose_place([covered, outside, partly], [taken], frame) == partly

"""Bootstrap intervals: right on known distributions, honest about what belongs together."""

from __future__ import annotations

import numpy as np
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.experiments import Share, bootstrap_interval, share_of
from diffserve.experiments.intervals import widen_equal


def test_the_interval_of_a_normal_mean_is_nearly_the_textbook_one() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = bootstrap_interval(values.tolist())
    error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)


def test_a_higher_level_has_the_wider_interval() -> None:
    values = np.random.default_rng(1).normal(size=50).tolist()
    ends = [bootstrap_interval(values, level=level) for level in (0.5, 0.9, 0.99)]
    assert ends[2][0] < ends[1][0] < ends[0][0] < ends[0][1] < ends[1][1] < ends[2][1]


@pytest.mark.slow
def test_the_interval_covers_the_true_share_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for seed in range(100):
        share = share_of((rng.random(80) < 0.7).tolist(), seed=seed)
        covered += share.low <= 0.7 <= share.high
    assert 88 <= covered <= 100


def test_values_that_belong_together_count_as_one() -> None:
    hits = [True, False, True, True, False, True, False, False] * 8
    alone = share_of(hits)
    same = share_of([hit for hit in hits for _ in range(4)], [index for index in range(len(hits)) for _ in range(4)])
    assert (same.low, same.high) == (alone.low, alone.high)
    naive = share_of([hit for hit in hits for _ in range(4)])
    assert naive.high - naive.low < 0.6 * (same.high - same.low)


def test_groups_of_different_sizes_weigh_by_their_values() -> None:
    low, high = bootstrap_interval([1, 1, 1, 0], ["a", "a", "a", "b"])
    assert (low, high) == (0, 1)
    ones = [1.0] * 30 + [0.0]
    low, high = bootstrap_interval(ones, [*range(30), 30])
    assert low < np.mean(ones) <= high


def test_all_hits_or_none_leave_the_rule_of_three() -> None:
    assert share_of([True] * 60) == Share(60, 60, 1 - 3 / 60, 1.0)
    assert share_of([False] * 60) == Share(0, 60, 0.0, 3 / 60)
    assert share_of([True] * 60, [index // 4 for index in range(60)]) == Share(60, 60, 1 - 3 / 15, 1.0)
    assert share_of([True]) == Share(1, 1, 0.0, 1.0)


def test_pictures_of_one_prompt_are_resampled_one_by_one() -> None:
    hits = [True, False] * 20
    assert share_of(hits, ["the same"] * 40) == share_of(hits)


def test_a_share_says_itself() -> None:
    assert str(Share(3, 4, 0.25, 1.0)) == "75 % (3 of 4; 95 % interval 25..100 %)"


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [0.0, 1.0, 4.0, 2.0, 7.0]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval([value + 1 for value in values], seed=3)


@pytest.mark.parametrize(
    ("values", "groups", "level", "message"),
    [([], None, 0.95, "no values"), ([1.0, 2.0], ["a"], 0.95, "1 groups"), ([1.0], None, 95, "95")],
)
def test_what_has_no_interval_is_refused(
    values: list[float], groups: list[str] | None, level: float, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        bootstrap_interval(values, groups, level=level)


def test_equal_changes_have_the_width_of_the_rule_of_three() -> None:
    assert widen_equal(0.0, 0.0, 60) == (-0.05, 0.05)
    assert widen_equal(0.0, 0.0, 1) == (-1.0, 1.0)
    assert widen_equal(-0.1, 0.2, 60) == (-0.1, 0.2)

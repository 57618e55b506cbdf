"""Differences in words: never surer than the interval, and signs that agree with the words."""

from __future__ import annotations

import pytest

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.findings import describe_difference, describe_gains, join_numbers
from diffserve.experiments.verdicts import Judged


@pytest.mark.parametrize(
    ("measure", "estimate", "outcome", "sentence"),
    [
        (Measure.EXACT, Estimate(0.5, 0.4, 0.6), 1, "a is better by 50.0 points (95 % interval 40 to 60)"),
        (Measure.EXACT, Estimate(-0.5, -0.6, -0.4), -1, "a is worse by 50.0 points (95 % interval 40 to 60)"),
        (Measure.FRECHET, Estimate(-2.0, -3.0, -1.0), 1, "a is better by 2 (95 % interval 1 to 3)"),
        (Measure.FRECHET, Estimate(0.25, -0.5, 1.0), 0, "a is 0.25 higher, within noise (95 % interval -0.5 to 1)"),
        (Measure.EXACT, Estimate(0.0, -0.0, 0.0), 0, "a is level, within noise (95 % interval 0 to 0)"),
        (Measure.KID, Estimate(-0.1), 0, "a is 0.1 lower, with too few prompts for a confidence interval"),
    ],
)
def test_a_difference_is_described_with_its_interval(
    measure: Measure, estimate: Estimate, outcome: int, sentence: str
) -> None:
    assert describe_difference("a", measure, Judged(estimate, outcome)) == sentence


def test_a_larger_gain_says_whether_it_is_far_larger() -> None:
    gain = Estimate(0.3, 0.2, 0.4)
    surely = "ddpm gains more by 30.0 points (95 % interval 20 to 40), clearly more than twice as much"
    assert describe_gains(Measure.EXACT, Judged(gain, 1), is_far_more=True) == surely
    assert ", but not clearly more" in describe_gains(Measure.EXACT, Judged(gain, 1), is_far_more=False)
    assert describe_gains(Measure.EXACT, Judged(gain, -1), is_far_more=False).startswith(
        "ddpm gains less by 30.0 points"
    )


def test_numbers_are_listed_as_people_say_them() -> None:
    assert [join_numbers(steps) for steps in ([], [5], [10, 5], [20, 5, 10])] == ["", "5", "5 and 10", "5, 10 and 20"]

"""The benchmark's parts that are not time: the ladder of workloads, the report."""

from __future__ import annotations

from benchmarks.report import summary
from benchmarks.workload import GUIDANCE, RUNGS, SAMPLERS, STEPS, batches, kinds, shuffled

SIZES = ((128, 128), (128, 192))


def test_each_rung_mixes_one_thing_more() -> None:
    variety = [
        [len({getattr(kind, field) for kind in kinds(rung, SIZES)}) for field in kinds(rung, SIZES)[0].__slots__]
        for rung in RUNGS
    ]
    assert variety == [
        [1, 1, 1, 1, 1],
        [len(STEPS), 1, 1, 1, 1],
        [len(STEPS), len(SAMPLERS), 1, 1, 1],
        [len(STEPS), len(SAMPLERS), len(GUIDANCE), 1, 1],
        [len(STEPS), len(SAMPLERS), len(GUIDANCE), 1, 2],
    ]


def test_a_round_is_repeatable_and_the_next_one_is_fresh() -> None:
    first = [[one.prompt for one in group] for group in batches("+steps", SIZES, copies=2, round_index=0)]
    again = [[one.prompt for one in group] for group in batches("+steps", SIZES, copies=2, round_index=0)]
    other = [[one.prompt for one in group] for group in batches("+steps", SIZES, copies=2, round_index=1)]
    assert first == again
    assert not {prompt for group in first for prompt in group} & {prompt for group in other for prompt in group}


def test_shuffling_loses_nobody() -> None:
    groups = batches("+guidance", SIZES, copies=3, round_index=0)
    mixed = shuffled(groups, 0)
    assert len(mixed) == 48
    assert {one.request_id for one in mixed} == {one.request_id for group in groups for one in group}


def test_a_summary_is_median_least_and_most() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}

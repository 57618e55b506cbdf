"""Out of memory: a cap for one shape, learnt and unlearnt."""

from __future__ import annotations

from diffserve.engine.image.buckets import FIRST_PAUSE_S, LONGEST_PAUSE_S, NO_LIMIT, RowCaps
from diffserve.engine.image.task import GroupKey

SMALL, LARGE = GroupKey(64, 64, 77), GroupKey(128, 128, 77)


class Clock:
    """A clock that stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_one_shape_that_ran_out_caps_no_other() -> None:
    caps = RowCaps(Clock())
    caps.record_out_of_memory(LARGE, 16)
    assert caps.cap(LARGE) == 8
    assert caps.cap(SMALL) == NO_LIMIT


def test_after_a_pause_twice_as_many_rows_are_tried_until_nothing_is_capped() -> None:
    clock = Clock()
    caps = RowCaps(clock)
    caps.record_out_of_memory(LARGE, 8)
    caps.record_call(LARGE, 4, 16)
    clock.now_s = FIRST_PAUSE_S - 1
    assert caps.cap(LARGE) == 4
    clock.now_s = FIRST_PAUSE_S
    assert caps.cap(LARGE) == 8
    caps.record_call(LARGE, 8, 16)
    assert caps.cap(LARGE) == 16
    caps.record_call(LARGE, 16, 16)
    assert caps.cap(LARGE) == NO_LIMIT


def test_a_try_that_runs_out_again_waits_twice_as_long_and_never_for_ever() -> None:
    clock = Clock()
    caps = RowCaps(clock)
    caps.record_out_of_memory(LARGE, 8)
    clock.now_s = FIRST_PAUSE_S
    caps.record_out_of_memory(LARGE, 8)
    assert caps.cap(LARGE) == 4
    clock.now_s = 3 * FIRST_PAUSE_S - 1
    assert caps.cap(LARGE) == 4
    clock.now_s = 3 * FIRST_PAUSE_S
    assert caps.cap(LARGE) == 8
    for _ in range(20):
        caps.record_out_of_memory(LARGE, 8)
    clock.now_s += LONGEST_PAUSE_S
    assert caps.cap(LARGE) == 8


def test_shapes_that_are_capped_are_few() -> None:
    caps = RowCaps(Clock())
    for side in range(1, 500):
        caps.record_out_of_memory(GroupKey(8 * side, 8, 77), 4)
    assert sum(caps.cap(GroupKey(8 * side, 8, 77)) == 2 for side in range(1, 500)) == 64

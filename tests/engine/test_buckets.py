"""Covering rows with buckets, and the knee of the cost curve."""

from __future__ import annotations

from diffserve.engine.image.buckets import RETRY_EVERY, CostCurve, KneeCap, split, updated_estimate


def curve(costs: dict[int, float], *, is_exact: bool = True) -> CostCurve:
    """Return a cost curve with measured costs."""
    curve = CostCurve(tuple(costs), is_exact=is_exact)
    for size, seconds in costs.items():
        curve.observe(size, seconds)
    return curve


STEEP = {4: 5.0, 8: 9.0, 16: 17.0}
FLAT = {4: 10.0, 8: 10.5, 16: 11.0}


def test_rows_are_decomposed_rather_than_rounded_far_up() -> None:
    assert curve(STEEP).cover(12) == (8, 4)
    assert curve(STEEP).cover(18) == (16, 4)
    assert curve(STEEP).cover(3) == (4,)


def test_rounding_up_wins_where_a_call_costs_more_than_its_rows() -> None:
    assert curve(FLAT).cover(12) == (16,)


def test_every_number_of_rows_is_covered_and_only_the_last_call_is_padded() -> None:
    for rows in range(1, 40):
        calls = split(rows, curve(STEEP).cover(rows))
        assert [start for start, _, _ in calls] == [0, *(stop for _, stop, _ in calls[:-1])]
        assert calls[-1][1] == rows
        assert all(stop - start == bucket for start, stop, bucket in calls[:-1])


def test_without_exactness_rows_are_one_call() -> None:
    assert curve(STEEP, is_exact=False).cover(13) == (13,)


def test_no_call_is_larger_than_there_is_memory_for_unless_it_is_the_smallest() -> None:
    assert curve(FLAT).cover(12, max_rows=8) == (8, 4)
    assert curve(FLAT).cover(3, max_rows=2) == (4,)
    assert curve(FLAT).cover(12) == (16,)
    assert curve(STEEP, is_exact=False).cover(13, max_rows=8) == (8, 5)


def test_rows_of_which_nothing_is_known_have_calls_of_their_own() -> None:
    cautious = CostCurve((4,), is_alone=True)
    assert cautious.calls(3) == [(0, 1, 4), (1, 2, 4), (2, 3, 4)]
    assert cautious.knee(16) == 2


def test_a_size_that_is_thought_dear_is_called_again_now_and_then_and_mends() -> None:
    measured = curve({1: 1.0, 2: 1.9, 4: 9.0})
    covers = [[bucket for *_, bucket in measured.calls(5)] for _ in range(2 * RETRY_EVERY)]
    assert [at for at, cover in enumerate(covers) if 4 in cover] == [RETRY_EVERY - 1, 2 * RETRY_EVERY - 1]
    assert all(len(measured.cover(num_rows)) == 1 for num_rows in (1, 2))
    assert {4} != set(measured.cover(4))
    for _ in range(4):
        measured.observe(4, 3.0)  # what it really takes
    assert [bucket for *_, bucket in measured.calls(5)] == [4, 1]
    assert measured.calls(3, max_rows=2) == [(0, 2, 2), (2, 3, 1)]


def test_the_knee_is_the_fewest_rows_at_nearly_the_best_cost_per_row() -> None:
    assert curve({1: 1.0, 2: 1.9, 4: 3.8, 8: 7.6}).knee(16) == 2
    assert curve({1: 2.4, 2: 3.5, 4: 6.1, 8: 11.5, 16: 21.1}).knee(16) == 16
    assert curve(FLAT).knee(8) == 8
    assert CostCurve((1,)).knee(16) == 2


def test_half_the_rows_take_twice_the_ticks_including_overhead() -> None:
    measured = curve({8: 0.0230, 16: 0.0445})
    cap = KneeCap(16, "latency")
    assert cap.of(measured) == 8, "within 5 % of the best"
    cap.overhead_s = 0.0015
    assert [cap.of(measured) for _ in range(40)] == [16] * 40
    assert updated_estimate(None, 0.002) == 0.002
    assert 0.002 < updated_estimate(0.002, 3.0) < 0.0022, "one tick that was interrupted says little"
    assert updated_estimate(0.002, 0.001) == 0.0015


def test_one_slow_reading_hardly_moves_the_estimate_and_fast_ones_do() -> None:
    measured = curve({8: 1.0})
    measured.observe(8, 100.0)
    assert measured.seconds(8) < 1.06
    for _ in range(8):
        measured.observe(8, 0.5)
    assert measured.seconds(8) < 0.51

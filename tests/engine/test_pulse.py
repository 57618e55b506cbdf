"""When a tick counts as hanging: never soon, and never where ticks are long by nature."""

from __future__ import annotations

from diffserve.engine.process import Pulse


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ticked(pulse: Pulse, clock: Clock, *seconds: float, scale: float = 1.0) -> None:
    for interval_s in seconds:
        with pulse.ticking(scale):
            clock.now_s += interval_s


def test_a_pulse_counts_ticks_and_tells_how_long_the_running_one_has_taken() -> None:
    clock = Clock()
    pulse = Pulse(60.0, clock)
    assert (pulse.num_ticks, pulse.running_s) == (0, 0.0)
    ticked(pulse, clock, 1.0, 2.0)
    with pulse.ticking():
        clock.now_s += 7.0
        assert (pulse.num_ticks, pulse.running_s) == (2, 7.0)
    assert (pulse.num_ticks, pulse.running_s) == (3, 0.0)


def test_short_ticks_leave_the_configured_patience() -> None:
    clock = Clock()
    pulse = Pulse(60.0, clock)
    ticked(pulse, clock, *[0.1] * 200)
    assert pulse.patience_s == 60.0


def test_where_ticks_are_long_so_is_patience_and_a_single_long_one_does_not_count() -> None:
    clock = Clock()
    pulse = Pulse(60.0, clock)
    ticked(pulse, clock, *[0.1] * 198, 30.0)
    assert pulse.patience_s == 60.0
    ticked(pulse, clock, *[30.0] * 5)
    assert pulse.patience_s == 300.0


def test_the_trial_picture_speaks_for_a_slow_machine_before_any_tick_and_is_not_forgotten() -> None:
    clock = Clock()
    pulse = Pulse(60.0, clock)
    with pulse.trial():
        clock.now_s += 40.0
    assert pulse.patience_s == 400.0
    ticked(pulse, clock, *[1.0] * 2000)
    assert pulse.patience_s == 400.0


def test_a_larger_picture_may_take_longer_than_any_tick_did_and_teaches_nothing_wrong_of_small_ones() -> None:
    clock = Clock()
    pulse = Pulse(60.0, clock)
    ticked(pulse, clock, *[8.0] * 10)
    assert pulse.patience_s == 80.0
    with pulse.ticking(scale=16.0):
        assert pulse.patience_s == 16 * 80.0
        clock.now_s += 100.0
    assert pulse.patience_s == 80.0


def test_a_tick_that_raises_is_over_all_the_same() -> None:
    clock = Clock()
    pulse = Pulse(60.0, clock)
    try:
        ticked(pulse, clock, 1.0)
        with pulse.ticking():
            raise ValueError
    except ValueError:
        pass
    assert (pulse.num_ticks, pulse.running_s) == (2, 0.0)

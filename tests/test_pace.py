"""Speed measurement ignores a pause of the process and adapts to slower work."""

from __future__ import annotations

import pytest

from diffserve.api.pace import Pace, TokenCost


class Clock:
    """A manually set clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def working(step_s: float = 0.02, num_steps: int = 200, *, num_images: int = 1) -> tuple[Pace, Clock]:
    """Return a measurement after ``num_steps`` steps of ``num_images`` images with one unit of work each."""
    clock = Clock()
    pace = Pace(clock)
    pace.begin()
    work(pace, clock, step_s, num_steps, num_images=num_images)
    return pace, clock


def work(pace: Pace, clock: Clock, step_s: float, num_steps: int, *, num_images: int = 1) -> None:
    for _ in range(num_steps):
        clock.now_s += step_s
        for _ in range(num_images):
            pace.did(1.0)
            clock.now_s += 1e-5


@pytest.mark.parametrize("pause_s", [5.0, 20.0, 600.0])
def test_a_pause_of_the_engine_is_ignored(pause_s: float) -> None:
    pace, clock = working()
    before = pace.per_s
    for _ in range(10):  # requests arrive and leave meanwhile
        clock.now_s += pause_s / 10
        pace.did(0.0)
        pace.begin()
    pace.did(1.0)
    assert pace.per_s == pytest.approx(before, rel=0.02)
    work(pace, clock, 0.02, 10)
    clock.now_s += pause_s
    pace.did(1.0)
    assert pace.per_s == pytest.approx(before, rel=0.02), "a second pause after some work, too"


def test_a_pause_before_idle_time_is_ignored() -> None:
    pace, clock = working()
    before = pace.per_s
    clock.now_s += 60.0
    pace.pause()
    assert pace.per_s == pytest.approx(before, rel=0.02)
    pace.begin()
    work(pace, clock, 0.02, 50)
    assert pace.per_s == pytest.approx(before, rel=0.02)


def test_slower_work_is_measured_from_the_second_step() -> None:
    pace, clock = working()
    work(pace, clock, 4.0, 2)
    assert pace.per_s is not None
    assert pace.per_s < 25.0
    work(pace, clock, 4.0, 40)
    assert pace.per_s == pytest.approx(0.25, rel=0.1)


def test_long_steps_of_many_images_are_not_pauses() -> None:
    pace, clock = working(step_s=3.0, num_steps=20, num_images=64)
    assert pace.per_s == pytest.approx(64 / 3, rel=0.02)
    clock.now_s += 300.0
    pace.did(1.0)
    assert pace.per_s == pytest.approx(64 / 3, rel=0.2)


def test_several_workers_share_the_time() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin(2)
    work(pace, clock, 0.02, 200, num_images=2)
    assert pace.per_s == pytest.approx(50.0, rel=0.02)
    pace.begin(1)
    work(pace, clock, 0.02, 5000)
    assert pace.per_s == pytest.approx(50.0, rel=0.02)


def test_a_pause_in_a_call_of_the_language_model_is_ignored() -> None:
    cost = TokenCost()
    for num_tokens in [1, 64] * 20:
        cost.learn(num_tokens, 0.004 + 0.0005 * num_tokens)
    cost.learn(8, 20.0)
    assert cost.line == pytest.approx((0.004, 0.0005), rel=1e-3)
    for num_tokens in [1, 64] * 200:
        cost.learn(num_tokens, 2.0 + 0.1 * num_tokens)
    assert cost.line == pytest.approx((2.0, 0.1), rel=0.05), "slower calls that go on are learned"

"""Times of an experiment: what a moment of something else on the machine does to them, which is little."""

from __future__ import annotations

import asyncio

import pytest

from diffserve.client import AsyncClient, ServerUnreachable
from ui.experiment.speed import SpeedProbe, StepTime, TimedRequest, Timing, each_step_s, timing_of

NOBODY = "http://127.0.0.1:9"


def test_steps_that_are_told_at_once_share_their_time() -> None:
    assert each_step_s([StepTime(10.0, 1), StepTime(10.2, 3), StepTime(10.5, 4)]) == pytest.approx((0.1, 0.1, 0.3))


def test_a_pause_of_the_machine_does_not_count() -> None:
    steps_s = each_step_s([StepTime(0.0, 1), StepTime(0.4, 5), StepTime(14.5, 6), StepTime(14.9, 10)])
    paused = TimedRequest(steps_s, rest_s=20.0, evaluations=20, num_steps=10)
    calm = TimedRequest((0.1,) * 9, rest_s=0.2, evaluations=20, num_steps=10)
    timing = timing_of([paused, calm, calm])
    assert timing == pytest.approx(Timing(row_s=0.05, rest_s=0.2))
    assert timing.seconds(20) == pytest.approx(10 * 0.1 + 0.2)


def test_the_speed_of_a_server_that_is_away_is_an_error_that_says_so() -> None:
    async def ask() -> None:
        async with AsyncClient(NOBODY) as client:
            await SpeedProbe().speed(client)

    with pytest.raises(ServerUnreachable, match="diffserve serve"):
        asyncio.run(ask())

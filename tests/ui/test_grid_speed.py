"""Timing of experiments is hardly affected by short interruptions on the machine."""

from __future__ import annotations

import asyncio

import pytest

from diffserve.client import AsyncClient, ServerUnreachable
from ui.experiment.speed import (
    SpeedProbe,
    StepTime,
    Timing,
    WatchedRequest,
    each_step_s,
    timing_alone,
    timing_together,
)

NOBODY = "http://127.0.0.1:9"


def test_steps_reported_together_share_their_time() -> None:
    assert each_step_s([StepTime(10.0, 1), StepTime(10.2, 3), StepTime(10.5, 4)]) == pytest.approx((0.1, 0.1, 0.3))


def test_a_pause_of_the_machine_does_not_count() -> None:
    paused_steps = (StepTime(0.0, 1), StepTime(0.4, 5), StepTime(14.5, 6), StepTime(14.9, 10))
    paused = WatchedRequest(-20.1, paused_steps, 14.9, evaluations=20, num_steps=10)
    calm_steps = tuple(StepTime(0.1 * step, step) for step in range(1, 11))
    calm = WatchedRequest(-0.1, calm_steps, 1.1, evaluations=20, num_steps=10)
    timing = timing_alone([paused, calm, calm])
    assert timing == pytest.approx(Timing(row_s=0.05, rest_s=0.2))
    assert timing.seconds(20) == pytest.approx(10 * 0.1 + 0.2)


def test_a_request_without_events_of_its_steps_is_spread_evenly() -> None:
    assert timing_alone([WatchedRequest(0.0, (), 2.0, evaluations=8, num_steps=4)]) == Timing(0.25, 0.0)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_time_per_image_does_not_depend_on_the_batch_of_reports(at_once: int) -> None:
    """Time four images of four steps with ``at_once`` per call of half a second.

    The text takes a second before them, and the files two seconds after them.
    """
    times, clock_s = [], 1.0
    for first in range(0, 4, at_once):
        for step in range(1, 5):
            clock_s += 0.5
            times += [StepTime(clock_s + 0.001 * index, step, index) for index in range(first, first + at_once)]
    timing = timing_together(WatchedRequest(0.0, tuple(times), clock_s + 2.0, evaluations=32, num_steps=4), 4)
    assert timing.row_s == pytest.approx(0.5 / (2 * at_once), rel=0.02)
    assert timing.rest_s == pytest.approx(3.0 / 4, rel=0.02)


def test_images_that_finish_together_are_timed_too() -> None:
    times = tuple(StepTime(1.0, 1, index) for index in range(4))
    assert timing_together(WatchedRequest(0.0, times, 2.0, evaluations=8, num_steps=1), 4) == Timing(0.25, 0.0)


def test_the_speed_of_an_unreachable_server_is_an_error() -> None:
    async def ask() -> None:
        async with AsyncClient(NOBODY) as client:
            await SpeedProbe().speed(client)

    with pytest.raises(ServerUnreachable, match="diffserve serve"):
        asyncio.run(ask())

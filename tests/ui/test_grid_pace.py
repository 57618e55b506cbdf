"""Times of an experiment: what a moment of something else on the machine does to them, which is little."""

from __future__ import annotations

import asyncio

import pytest

from diffserve.client import AsyncClient, ServerUnreachable
from ui.experiment.pace import Pacer, Timing, Told, Watched, each_step_s, timing_of

NOBODY = "http://127.0.0.1:9"


def test_steps_that_are_told_at_once_share_their_time() -> None:
    assert each_step_s([Told(10.0, 1), Told(10.2, 3), Told(10.5, 4)]) == pytest.approx((0.1, 0.1, 0.3))


def test_a_pause_of_the_machine_does_not_count() -> None:
    steps_s = each_step_s([Told(0.0, 1), Told(0.4, 5), Told(14.5, 6), Told(14.9, 10)])
    paused = Watched(steps_s, rest_s=20.0, evaluations=20, num_steps=10)
    calm = Watched((0.1,) * 9, rest_s=0.2, evaluations=20, num_steps=10)
    timing = timing_of([paused, calm, calm])
    assert timing == pytest.approx(Timing(row_s=0.05, rest_s=0.2))
    assert timing.seconds(20) == pytest.approx(10 * 0.1 + 0.2)


def test_the_pace_of_a_server_that_is_away_is_an_error_that_says_so() -> None:
    async def ask() -> None:
        async with AsyncClient(NOBODY) as client:
            await Pacer().pace(client)

    with pytest.raises(ServerUnreachable, match="diffserve serve"):
        asyncio.run(ask())

"""Scheduling policies: which rows run in the next tick, and that no request starves. Simulated, without torch."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.baseline_policies import BASELINES
from diffserve.api.errors import ConfigError
from diffserve.api.types import Finished, Progress
from diffserve.engine.image import policy
from diffserve.engine.image.task import GroupKey, LiveRequest, TickPlan
from diffserve.settings.config import POLICIES, EngineConfig
from tests.engine.simulated_scheduler import ConstantCosts, Simulation


class SecondsARow(ConstantCosts):
    """A call takes a second, and so much more for each row: 1 + ``row_s`` * rows."""

    def __init__(self, row_cap: int, row_s: float) -> None:
        super().__init__(row_cap)
        self.row_s = row_s

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        return 1.0 + self.row_s * num_rows


def who(plan: TickPlan) -> list[str]:
    return sorted(task.live.request_id for task in plan.rows)


def run_and_watch(sim: Simulation) -> list[list[str]]:
    """Ticks until nothing is left: who was in each that had rows."""
    ticks = []
    while sim.scheduler.has_work:
        plan, _ = sim.tick()
        if plan.rows:
            ticks.append(who(plan))
    return ticks


def test_every_name_that_can_be_configured_is_a_policy() -> None:
    assert tuple(policy.POLICIES) == POLICIES
    for name in ("fifo", *BASELINES):
        with pytest.raises(ConfigError, match=f"policy is '{name}'; choose one of latency, throughput, goodput."):
            EngineConfig(policy=name)


@pytest.mark.parametrize("ageing", [2.0, 8.0])
@pytest.mark.parametrize("name", ["latency", "throughput", "goodput"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_steps=st.integers(1, 12),
    is_wide=st.booleans(),
    row_cap=st.sampled_from([2, 3, 8]),
    arrivals=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 6), st.booleans(), st.sampled_from([1.0, 5.0])),
        min_size=1,
        max_size=4,
    ),
)
def test_nobody_starves_while_others_keep_coming(
    name: str,
    num_steps: int,
    is_wide: bool,
    ageing: float,
    row_cap: int,
    arrivals: list[tuple[int, int, bool, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Submit ``arrivals`` (count, steps, wide, guidance) in every tick, without end.

    Only requests that came within cost / ageing ticks can overtake the first one, and each tick that does not run it
    finishes at least one of their steps.
    """
    monkeypatch.setattr(policy, "AGEING_ROWS_PER_TICK", ageing)
    sim = Simulation(row_cap=row_cap, policy=name, max_lanes=8)
    for _ in range(3):
        sim.submit(num_steps=9)
    victim = sim.submit(num_steps=num_steps, width_px=96 if is_wide else 64, height_px=64)
    times = policy.LATE if name == "goodput" else 1.0
    overtaking_ticks = 2 + int(times * victim.tasks[0].total_cost / ageing)
    steps_before = 3 * 9 + num_steps
    num_ticks = 0
    while not victim.is_over:
        number, steps, wide, scale = arrivals[num_ticks % len(arrivals)]
        for _ in range(number):
            sim.submit(num_steps=steps, width_px=96 if wide else 64, height_px=64, guidance_scale=scale)
        if num_ticks <= overtaking_ticks:
            steps_before += number * steps
        sim.tick()
        num_ticks += 1
        assert num_ticks <= overtaking_ticks + 2 * steps_before


@pytest.mark.parametrize("name", POLICIES)
def test_completion_is_forecast_while_an_image_waits_for_decoding(name: str) -> None:
    sim = Simulation(policy=name, max_decodes_per_tick=1)  # of two that end together one waits for its picture
    sim.scheduler.estimates.timer = lambda: 0.0  # a forecast takes no time: one is made in every tick
    for num_steps in (2, 2, 9):
        sim.submit(num_steps=num_steps)
    progress_events = [event for event in sim.run() if isinstance(event, Progress)]
    assert len(progress_events) == 13
    assert all(event.seconds_left is not None for event in progress_events)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_ends_with_everybody_served_once(name: str, seed: int) -> None:
    walk = random.Random(seed)
    sim = Simulation(row_cap=6, policy=name, max_lanes=5, max_prepares_per_tick=2)
    ended: list[str] = []
    submitted: list[LiveRequest] = []
    for _ in range(200):
        if walk.random() < 0.3:
            submitted.append(
                sim.submit(
                    num_steps=walk.randint(1, 6),
                    num_images=walk.randint(1, 3),
                    width_px=walk.choice([64, 96]),
                    guidance_scale=walk.choice([1.0, 5.0]),
                    client=walk.choice(["a", "b"]),
                )
            )
        plan, events = sim.tick()
        assert len({task.group for task in plan.rows}) <= 1
        ended += [event.request_id for event in events if isinstance(event, Finished)]
        sim.scheduler.check_integrity()
    ended += [event.request_id for event in sim.run() if isinstance(event, Finished)]
    assert sorted(ended) == sorted(live.request_id for live in submitted)


def test_throughput_gives_the_tick_to_the_group_that_does_most_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "AGEING_ROWS_PER_TICK", 0.1)
    sim = Simulation(policy="throughput")
    sim.submit(request_id="wide", num_steps=3, width_px=96, height_px=64)
    for number in range(4):
        sim.submit(request_id=f"square {number}", num_steps=3)
    watched = run_and_watch(sim)
    assert watched == [[f"square {number}" for number in range(4)]] * 3 + [["wide"]] * 3


def test_goodput_fills_a_tick_as_long_as_those_in_it_stay_in_time() -> None:
    """Alone a guided image takes 3 s a tick, 9 s are allowed, of which calls get three quarters; four rows take 5 s."""
    costs = SecondsARow(row_cap=16, row_s=1.0)
    sim = Simulation(costs=costs, policy="goodput")
    for _ in range(6):
        sim.submit(num_steps=10)
    plan = sim.plan()
    assert len(plan.prepare) == 6
    sim.apply(plan)
    assert sim.plan().num_rows == 4, "six rows take 7 s, and would leave too little for the rest"
    full = Simulation(costs=costs, policy="latency")
    for _ in range(6):
        full.submit(num_steps=10)
    full.tick()
    assert full.plan().num_rows == 12


def test_goodput_puts_off_who_is_late_and_then_fills_ticks_with_them() -> None:
    sim = Simulation(costs=SecondsARow(row_cap=16, row_s=1.0), policy="goodput")
    late = sim.submit(num_steps=5)
    sim.now_s += 40.0
    early = sim.submit(num_steps=20)
    sim.tick()
    assert sim.plan().num_rows == 4, "there is room for both"
    sim.scheduler.policy.costs = ConstantCosts(row_cap=2)
    assert sim.plan().rows == (early.tasks[0],)
    sim.now_s += 1000.0
    assert sim.plan().rows == (late.tasks[0],), "both are late: the shorter one is first"


def test_a_deadline_of_ones_own_counts_where_it_is_earlier() -> None:
    sim = Simulation(policy="goodput")
    assert sim.submit(num_steps=10).due_s == 30.0
    assert sim.submit(num_steps=10, deadline_s=12.0).due_s == 12.0
    assert sim.submit(num_steps=10, deadline_s=600.0).due_s == 30.0
    assert sim.submit(num_steps=10, num_images=3, guidance_scale=1.0).solo_s == 10.0

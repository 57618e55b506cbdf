"""The baseline policies of the benchmarks: which requests share a tick under each of them."""

from __future__ import annotations

import pytest

from benchmarks.baseline_policies import Static, use
from tests.engine.simulated_scheduler import Simulation
from tests.engine.test_policy import run_and_watch, who


def baseline_desk(policy: str, *, row_cap: int = 8, delay_s: float = 0.0) -> Simulation:
    sim = Simulation(row_cap=row_cap)
    use(sim.scheduler, policy)
    if isinstance(sim.scheduler.policy, Static):
        sim.scheduler.policy.max_batch_delay_s = delay_s
    return sim


def test_serial_serves_one_request_at_a_time_in_order_of_arrival() -> None:
    sim = baseline_desk("serial")
    sim.submit(request_id="long", num_steps=4)
    sim.tick()
    sim.submit(request_id="pair", num_steps=1, num_images=2)
    assert run_and_watch(sim) == [["long"]] * 4 + [["pair", "pair"]]


def test_static_lets_equals_wait_for_each_other_and_nobody_join() -> None:
    sim = baseline_desk("static", row_cap=8, delay_s=5.0)
    for name in ("a", "b"):
        sim.submit(request_id=name, num_steps=2)
    sim.submit(request_id="other", num_steps=3)
    ticks = [who(sim.tick()[0]) for _ in range(5)]
    assert ticks == [[]] * 5, "none is full, and nobody has waited for long"
    assert who(sim.tick()[0]) == ["a", "b"]
    sim.submit(request_id="c", num_steps=2)
    assert sim.tick()[0].prepare
    assert who(sim.tick()[0]) == ["a", "b"]
    assert run_and_watch(sim) == [["other"]] * 3 + [["c"]] * 2


def test_a_full_static_batch_waits_for_nothing() -> None:
    sim = baseline_desk("static", row_cap=4, delay_s=100.0)
    for name in ("a", "b"):
        sim.submit(request_id=name, num_steps=1)
    sim.tick()
    assert who(sim.tick()[0]) == ["a", "b"]


@pytest.mark.parametrize("difference", [{"sampler": "euler"}, {"num_steps": 5}, {"guidance_scale": 7.0}, {"eta": 0.5}])
def test_same_key_lets_equals_join_and_nobody_else(difference: dict[str, object]) -> None:
    sim = baseline_desk("same-key")
    common_fields: dict[str, object] = {"num_steps": 4, "sampler": "ddim"}
    sim.submit(request_id="first", **common_fields)
    sim.tick()
    sim.tick()
    sim.submit(request_id="equal", **common_fields)
    sim.submit(request_id="other", **common_fields | difference)
    sim.tick()
    watched = run_and_watch(sim)
    assert watched[:2] == [["equal", "first"]] * 2
    assert all(names == ["other"] for names in watched[4:])
    assert len(watched) > 4

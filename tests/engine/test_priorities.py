"""Interactive and batch work: who goes first, and that neither starves. Stories in a simulation without torch."""

from __future__ import annotations

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Finished
from diffserve.engine.image.fair_share import BATCH_SHARE
from diffserve.engine.image.task import GroupKey
from tests.engine.simulated_scheduler import ConstantCosts, Simulation, request


def test_batch_work_fills_the_rows_that_interactive_work_leaves() -> None:
    sim = Simulation(row_cap=4)
    batch = sim.submit(num_steps=10, priority="batch")
    sim.tick()
    hasty = [sim.submit(num_steps=5) for _ in range(2)]
    sim.tick()
    assert set(sim.tick()[0].rows) >= {live.tasks[0] for live in hasty}, "who is interactive comes first"
    for _ in range(5):
        sim.tick()
    assert all(live.is_over for live in hasty)
    assert sim.tick()[0].rows == (batch.tasks[0],)
    alone = sim.submit(num_steps=5)
    sim.tick()
    assert set(sim.tick()[0].rows) == {batch.tasks[0], alone.tasks[0]}, "and what is left is filled"
    sim.run()
    sim.scheduler.check_integrity()


@pytest.mark.parametrize("width_px", [64, 96], ids=["sharing calls", "never sharing a call"])
@pytest.mark.parametrize("policy", ["latency", "throughput", "goodput"])
def test_under_a_sustained_load_batch_work_has_its_tenth_and_not_much_more(policy: str, width_px: int) -> None:
    """Always as many interactive pictures as fill every tick and every slot; the batch's are of their size, or not."""
    sim = Simulation(row_cap=8, max_lanes=8, policy=policy)
    for _ in range(40):
        sim.submit(client="bulk", num_steps=10, priority="batch", width_px=width_px, height_px=64)
    work = dict.fromkeys(("interactive", "batch", "one", "two"), 0.0)
    for tick in range(400):
        while sum(live.request.priority == "interactive" for live in sim.scheduler.live.values()) < 12:
            sim.submit(client=f"someone {tick % 5}", num_steps=10)
        plan, _ = sim.tick()
        for task in plan.rows:
            work[task.live.request.priority] += task.settings.cost_of_row[0]
    share = work["batch"] / (work["batch"] + work["interactive"])
    assert 0.9 * BATCH_SHARE < share < 1.6 * BATCH_SHARE
    sim.scheduler.check_integrity()


@pytest.mark.parametrize("client", ["bulk", "another"])
def test_a_flood_of_batch_work_leaves_slots_and_the_next_tick_to_who_comes(client: str) -> None:
    """Also to interactive work of the very client that floods."""
    sim = Simulation(row_cap=4, max_lanes=8)
    for _ in range(100):
        sim.submit(client="bulk", num_steps=50, priority="batch", num_images=4)
    for _ in range(20):
        sim.tick()
    guest = sim.submit(client=client, num_steps=10)
    assert sim.tick()[0].prepare == (guest.tasks[0],)
    ticks = 1
    while not guest.is_over:
        sim.tick()
        ticks += 1
    assert ticks <= 1 + 10 / (1.0 - 2.0 * BATCH_SHARE)
    sim.scheduler.check_integrity()


def test_who_is_interactive_does_not_wait_for_the_same_picture_of_a_batch() -> None:
    sim = Simulation(row_cap=2, result_cache_bytes=1 << 20)
    batch = sim.submit(num_steps=10, seed=1, priority="batch")
    hasty = sim.submit(num_steps=10, seed=1)
    ended = [event.request_id for event in sim.run() if isinstance(event, Finished)]
    assert ended == [hasty.request_id, batch.request_id]


def test_a_client_with_twice_the_share_gets_twice_the_work() -> None:
    sim = Simulation(row_cap=2)
    for client, share in (("one", 1.0), ("two", 2.0)):
        for _ in range(60):
            sim.submit(client=client, num_steps=10, share=share)
    work = dict.fromkeys(("interactive", "batch", "one", "two"), 0.0)
    for _ in range(300):
        for task in sim.tick()[0].rows:
            work[task.live.client] += task.settings.cost_of_row[0]
    assert work["two"] / work["one"] == pytest.approx(2.0, rel=0.15)


class LinearCosts(ConstantCosts):
    """Costs of one second per row, as on a CPU: a full tick takes longer."""

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        return float(num_rows)


def guest_seconds(sim: Simulation, crowd: int) -> list[float]:
    """Return the latencies of one client's sequential images, with ``crowd`` other images always in the queue."""
    seconds = []
    for _ in range(20):
        while sum(live.client == "crowd" for live in sim.scheduler.live.values()) < crowd:
            sim.submit(client="crowd", num_steps=10)
        guest, took_s = sim.submit(client="guest", num_steps=10), 0.0
        while not guest.is_over:
            took_s += sim.tick()[0].num_rows
        seconds.append(took_s)
    return seconds


def test_ten_fold_overload_by_one_key_leaves_another_its_pace() -> None:
    """95 % of its images take at most twice as long as alone, plus the tick that runs when they arrive.

    A full tick takes four times as long as one of its ticks.
    """
    alone, crowded_s = (guest_seconds(Simulation(8, LinearCosts(8)), crowd) for crowd in (0, 80))
    assert sorted(crowded_s)[18] <= 2.0 * sorted(alone)[18] + 8.0


def test_priorities_and_shares_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="priority is 'urgent'; give interactive or batch"):
        request(priority="urgent")
    with pytest.raises(InvalidRequest, match="share is 0"):
        request(share=0.0)

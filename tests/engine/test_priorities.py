"""Interactive and batch work: who goes first, and that neither starves. Stories at a desk without torch."""

from __future__ import annotations

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Finished
from diffserve.engine.image.fair_share import BATCH_SHARE
from diffserve.engine.image.task import GroupKey
from tests.engine.desk import Desk, DeskCosts, request


def test_batch_work_fills_the_rows_that_interactive_work_leaves() -> None:
    desk = Desk(row_cap=4)
    batch = desk.submit(num_steps=10, priority="batch")
    desk.tick()
    hasty = [desk.submit(num_steps=5) for _ in range(2)]
    desk.tick()
    assert set(desk.tick()[0].rows) >= {live.tasks[0] for live in hasty}, "who is interactive comes first"
    for _ in range(5):
        desk.tick()
    assert all(live.is_over for live in hasty)
    assert desk.tick()[0].rows == (batch.tasks[0],)
    alone = desk.submit(num_steps=5)
    desk.tick()
    assert set(desk.tick()[0].rows) == {batch.tasks[0], alone.tasks[0]}, "and what is left is filled"
    desk.run()
    desk.scheduler.check_integrity()


@pytest.mark.parametrize("width_px", [64, 96], ids=["sharing calls", "never sharing a call"])
@pytest.mark.parametrize("policy", ["latency", "throughput", "goodput"])
def test_under_a_sustained_load_batch_work_has_its_tenth_and_not_much_more(policy: str, width_px: int) -> None:
    """Always as many interactive pictures as fill every tick and every slot; the batch's are of their size, or not."""
    desk = Desk(row_cap=8, max_lanes=8, policy=policy)
    for _ in range(40):
        desk.submit(client="bulk", num_steps=10, priority="batch", width_px=width_px, height_px=64)
    work = dict.fromkeys(("interactive", "batch", "one", "two"), 0.0)
    for tick in range(400):
        while sum(live.request.priority == "interactive" for live in desk.scheduler.live.values()) < 12:
            desk.submit(client=f"someone {tick % 5}", num_steps=10)
        plan, _ = desk.tick()
        for task in plan.rows:
            work[task.live.request.priority] += task.settings.cost_of_row[0]
    share = work["batch"] / (work["batch"] + work["interactive"])
    assert 0.9 * BATCH_SHARE < share < 1.6 * BATCH_SHARE
    desk.scheduler.check_integrity()


@pytest.mark.parametrize("client", ["bulk", "another"])
def test_a_flood_of_batch_work_leaves_slots_and_the_next_tick_to_who_comes(client: str) -> None:
    """Also to interactive work of the very client that floods."""
    desk = Desk(row_cap=4, max_lanes=8)
    for _ in range(100):
        desk.submit(client="bulk", num_steps=50, priority="batch", num_images=4)
    for _ in range(20):
        desk.tick()
    guest = desk.submit(client=client, num_steps=10)
    assert desk.tick()[0].prepare == (guest.tasks[0],)
    ticks = 1
    while not guest.is_over:
        desk.tick()
        ticks += 1
    assert ticks <= 1 + 10 / (1.0 - 2.0 * BATCH_SHARE)
    desk.scheduler.check_integrity()


def test_who_is_interactive_does_not_wait_for_the_same_picture_of_a_batch() -> None:
    desk = Desk(row_cap=2, result_cache_bytes=1 << 20)
    batch = desk.submit(num_steps=10, seed=1, priority="batch")
    hasty = desk.submit(num_steps=10, seed=1)
    ended = [event.request_id for event in desk.run() if isinstance(event, Finished)]
    assert ended == [hasty.request_id, batch.request_id]


def test_a_client_with_twice_the_share_gets_twice_the_work() -> None:
    desk = Desk(row_cap=2)
    for client, share in (("one", 1.0), ("two", 2.0)):
        for _ in range(60):
            desk.submit(client=client, num_steps=10, share=share)
    work = dict.fromkeys(("interactive", "batch", "one", "two"), 0.0)
    for _ in range(300):
        for task in desk.tick()[0].rows:
            work[task.live.client] += task.settings.cost_of_row[0]
    assert work["two"] / work["one"] == pytest.approx(2.0, rel=0.15)


class LinearCosts(DeskCosts):
    """Costs of one second per row, as on a CPU: a full tick takes longer."""

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        return float(num_rows)


def guest_seconds(desk: Desk, crowd: int) -> list[float]:
    """Return the latencies of one client's sequential images, with ``crowd`` other images always in the queue."""
    seconds = []
    for _ in range(20):
        while sum(live.client == "crowd" for live in desk.scheduler.live.values()) < crowd:
            desk.submit(client="crowd", num_steps=10)
        guest, took_s = desk.submit(client="guest", num_steps=10), 0.0
        while not guest.is_over:
            took_s += desk.tick()[0].num_rows
        seconds.append(took_s)
    return seconds


def test_ten_fold_overload_by_one_key_leaves_another_its_pace() -> None:
    """95 % of its images take at most twice as long as alone, plus the tick that runs when they arrive.

    A full tick takes four times as long as one of its ticks.
    """
    alone, crowded_s = (guest_seconds(Desk(8, LinearCosts(8)), crowd) for crowd in (0, 80))
    assert sorted(crowded_s)[18] <= 2.0 * sorted(alone)[18] + 8.0


def test_priorities_and_shares_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="priority is 'urgent'; give interactive or batch"):
        request(priority="urgent")
    with pytest.raises(InvalidRequest, match="share is 0"):
        request(share=0.0)

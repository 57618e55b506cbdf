"""Fair sharing between several clients, on a simulated engine without torch."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from diffserve.api.types import Finished, Progress
from diffserve.engine.image.task import GroupKey, ImageTask, LiveRequest
from diffserve.engine.records import Stage
from tests.engine.simulated_scheduler import ConstantCosts, Simulation

STEPS = 10
TURN_TICKS = STEPS + 1
"""A picture of one client, its preparation included."""


def ticks_until_painted(sim: Simulation, live: LiveRequest, max_ticks: int = 10_000) -> int:
    """Ticks, but those that only prepare, that pass until ``live`` is over."""
    for tick in range(1, max_ticks):
        sim.step()
        if live.is_over:
            return tick
    raise AssertionError(f"not painted after {max_ticks} ticks")


def submit_many(sim: Simulation, client: str, number: int, **fields: object) -> list[LiveRequest]:
    return [sim.submit(client=client, num_steps=STEPS, **fields) for _ in range(number)]


@pytest.mark.parametrize("row_cap", [2, 8, 16])
@pytest.mark.parametrize("head_start", [0, 1, 7, 300])
@pytest.mark.parametrize("width_px", [64, 96])
def test_eighty_requests_of_one_delay_the_first_picture_of_another_by_one_turn(
    row_cap: int, head_start: int, width_px: int
) -> None:
    sim = Simulation(row_cap=row_cap)
    submit_many(sim, "crowd", 80)
    for _ in range(head_start):
        sim.tick()
    guest = sim.submit(client="guest", num_steps=STEPS, width_px=width_px, height_px=64)
    own_work = TURN_TICKS * width_px / 64  # in ticks of the crowd's pictures
    assert ticks_until_painted(sim, guest) <= TURN_TICKS + own_work
    sim.scheduler.check_integrity()


@pytest.mark.parametrize("max_lanes", [1, 4, 16, 64])
def test_pictures_of_a_thousand_steps_do_not_keep_another_from_a_slot(max_lanes: int) -> None:
    sim = Simulation(row_cap=8, max_lanes=max_lanes)
    for _ in range(80):
        sim.submit(client="crowd", num_steps=1000, num_images=10)
    for _ in range(30):
        sim.tick()
    assert (len(sim.scheduler.in_flight), sim.scheduler.slots.num_free) == (max_lanes, 0), "one alone has them all"
    guest = sim.submit(client="guest", num_steps=STEPS)
    assert sim.tick()[0].prepare == (guest.tasks[0],)
    assert ticks_until_painted(sim, guest) <= TURN_TICKS


def test_a_picture_that_is_nearly_done_is_finished_before_a_newcomers() -> None:
    sim = Simulation(row_cap=2)
    old = sim.submit(client="old", num_steps=STEPS)
    for _ in range(STEPS):
        sim.tick()
    new = sim.submit(client="new", num_steps=STEPS)
    sim.step()
    assert old.is_over
    assert ticks_until_painted(sim, new) <= TURN_TICKS


def test_among_many_with_one_picture_each_the_shortest_comes_first() -> None:
    """Alternating step by step would delay every client until the last image is done."""
    sim = Simulation(row_cap=2, max_lanes=8)
    lives = {steps: sim.submit(client=f"client {steps}", num_steps=steps) for steps in (9, 3, 6, 1)}
    ended = [event.request_id for event in sim.run() if isinstance(event, Finished)]
    assert ended == [lives[steps].request_id for steps in (1, 3, 6, 9)]


@pytest.mark.parametrize("sizes", [(64, 64), (64, 96)], ids=["one size", "two sizes"])
def test_two_with_much_to_do_get_the_same_amount_of_work(sizes: tuple[int, int]) -> None:
    sim = Simulation(row_cap=8)
    for client, width_px in zip(("left", "right"), sizes, strict=True):
        submit_many(sim, client, 60, width_px=width_px, height_px=64)
    work = {"left": 0.0, "right": 0.0}
    for _ in range(150):
        plan, _ = sim.tick()
        for task in plan.rows:
            work[task.live.client] += 2 * (task.settings.width_px * task.settings.height_px) / 64**2
    a_round = 8 * STEPS * 1.5
    assert abs(work["left"] - work["right"]) <= 2 * a_round


def test_the_work_of_large_pictures_is_weighed_by_their_pixels() -> None:
    sim = Simulation(row_cap=2)
    large = submit_many(sim, "large", 40, width_px=128, height_px=128)
    small = submit_many(sim, "small", 120)
    for _ in range(STEPS * 50):
        sim.tick()
    num_large, num_small = (sum(live.is_over for live in lives) for lives in (large, small))
    assert num_large >= 8
    assert num_small == pytest.approx(4 * num_large, abs=8)


def test_a_long_picture_is_not_overtaken_for_ever_by_clients_who_come_and_go() -> None:
    sim = Simulation(row_cap=2)
    long = sim.submit(client="long", num_steps=100)
    sim.tick()
    for number in range(200):
        sim.submit(client=f"passer-by {number}", num_steps=5)
        for _ in range(5):
            sim.step()
        if long.is_over:
            break
    assert long.is_over
    assert number <= 3 * 100 / 5


def test_nobody_saves_up_by_staying_away() -> None:
    sim = Simulation(row_cap=2)
    crowd = submit_many(sim, "crowd", 60)
    early = sim.submit(client="early", num_steps=1)
    for _ in range(STEPS * 20):
        sim.tick()
    assert early.is_over
    before = sum(live.is_over for live in crowd)
    submit_many(sim, "early", 60)
    for _ in range(STEPS * 10):
        sim.tick()
    assert sum(live.is_over for live in crowd) - before >= 4


def test_room_that_others_could_not_use_is_not_held_against_anybody_for_long() -> None:
    """The crowd fills the ticks of a slow client's one picture; a newcomer must not keep it waiting for all of that."""
    sim = Simulation(row_cap=16)
    crowd = submit_many(sim, "crowd", 200)
    sim.submit(client="slow", num_steps=200)
    for _ in range(150):
        sim.tick()
    before = sum(live.is_over for live in crowd)
    submit_many(sim, "newcomer", 100)
    for _ in range(STEPS * 6):
        sim.step()
    assert sum(live.is_over for live in crowd) - before >= 8


def test_taking_requests_back_costs_no_turn() -> None:
    sim = Simulation(row_cap=2)
    for live in submit_many(sim, "fickle", 50):
        sim.scheduler.cancel(live.request_id)
    submit_many(sim, "crowd", 20)
    sim.tick()
    again = sim.submit(client="fickle", num_steps=STEPS)
    assert ticks_until_painted(sim, again) <= 2 * TURN_TICKS


def test_pictures_of_another_are_not_decoded_after_all_of_a_crowds() -> None:
    sim = Simulation(row_cap=64, max_decodes_per_tick=1, max_prepares_per_tick=64)
    crowd = [sim.submit(client="crowd", num_steps=1) for _ in range(20)]
    sim.tick()
    sim.tick()
    guest = sim.submit(client="guest", num_steps=1)
    assert ticks_until_painted(sim, guest) <= 3
    assert sum(live.is_over for live in crowd) < 6


def test_one_alone_is_served_shortest_first_as_if_there_were_no_clients() -> None:
    walk = random.Random(7)
    sim = Simulation(row_cap=6, max_lanes=20)
    num_shared = 0
    for _ in range(300):
        if walk.random() < 0.3:
            width_px, scale = walk.choice([64, 96]), walk.choice([1.0, 5.0])
            sim.submit(client="somebody", num_steps=walk.randint(1, 30), width_px=width_px, guidance_scale=scale)
        ready = [task for task in sim.scheduler.in_flight if task.stage is Stage.DENOISING]
        ready.sort(key=sim.scheduler._key)
        expected: list[ImageTask] = []
        for task in ready:
            if task.group == ready[0].group and sum(member.rows_now for member in (*expected, task)) <= 6:
                expected.append(task)
        plan = sim.plan()
        if plan.prepare:
            assert not plan.rows
        else:
            assert set(plan.rows) == set(expected)
            num_shared += len(plan.rows) < len(ready)
        sim.apply(plan)
    assert num_shared > 50, "there was hardly anything to choose"


@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_of_many_clients_loses_nothing_and_remembers_nobody(seed: int) -> None:
    walk = random.Random(seed)
    sim = Simulation(row_cap=walk.choice([2, 3, 8]), max_lanes=4, max_prepares_per_tick=2, max_decodes_per_tick=1)
    over = Counter[str]()
    for number in range(400):
        action = walk.random()
        if action < 0.3 and len(sim.scheduler.live) < 20:
            client = walk.choice(["a", "b", "c", f"new {number}"])
            sim.submit(client=client, num_steps=walk.randint(1, 8), num_images=walk.randint(1, 3))
        elif action < 0.4 and sim.scheduler.live:
            sim.scheduler.cancel(walk.choice(list(sim.scheduler.live)))
        else:
            over.update(event.request_id for event in sim.tick()[1] if isinstance(event, Finished))
        sim.scheduler.check_integrity()
    sim.run()
    assert set(over.values()) <= {1}
    assert sim.scheduler.slots.num_free == 4
    assert sim.scheduler._share._shares["interactive"]._clocks == {}


def test_the_forecast_of_a_new_client_does_not_count_the_queue_of_another() -> None:
    """The crowd has pictures for many minutes."""
    sim = Simulation(row_cap=4)
    submit_many(sim, "crowd", 60)
    for _ in range(5):
        sim.step()
    predictions: list[tuple[float, float]] = []
    for _ in range(6):
        guest = sim.submit(client="guest", num_steps=STEPS)
        completions: list[tuple[float, float]] = []
        while not guest.is_over:
            _, events = sim.tick()
            completions += [
                (sim.now_s, event.seconds_left)
                for event in events
                if isinstance(event, Progress)
                and event.request_id == guest.request_id
                and event.seconds_left is not None
            ]
        predictions += [(seconds, sim.now_s - at_s) for at_s, seconds in completions if at_s < sim.now_s]
    assert len(predictions) > 30
    assert max(seconds / true_s for seconds, true_s in predictions[STEPS:]) < 4.0


class CostsByRows(ConstantCosts):
    """Costs of one second for each row of a call, so that no row is free."""

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        return float(num_rows)


def test_a_saturating_client_gets_a_third_share_next_to_a_light_client() -> None:
    sim = Simulation(costs=CostsByRows(8))
    submit_many(sim, "crowd", 200)
    rows = Counter[str]()
    for _ in range(20):
        guest = sim.submit(client="guest", num_steps=STEPS)
        while not guest.is_over:
            plan, _ = sim.tick()
            rows.update(task.live.client for task in plan.rows)
    assert rows["guest"] == 20 * STEPS
    assert rows["crowd"] == pytest.approx(rows["guest"] / 3, rel=0.3)

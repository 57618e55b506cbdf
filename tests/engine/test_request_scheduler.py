"""Who runs next: stories in a simulation without torch."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from diffserve.api.types import Failed, Finished, ImageFailed, ImageFinished, Preview, Progress, Queued
from diffserve.engine.image import policy
from diffserve.engine.image.task import TickOutcome
from diffserve.engine.records import FailureReason, Stage
from tests.engine.simulated_scheduler import Simulation


def test_the_policy_runs_without_torch() -> None:
    code = "import sys, tests.engine.simulated_scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_request_walks_from_waiting_to_painted() -> None:
    sim = Simulation(max_lanes=2)
    live = sim.submit(num_steps=2)
    [task] = live.tasks
    plan, events = sim.tick()
    assert (plan.prepare, plan.rows, events) == ((task,), (), [])
    assert (task.stage, task.slot) == (Stage.DENOISING, 0)
    plan, events = sim.tick()
    assert (plan.rows, plan.num_rows, plan.decode) == ((task,), 2, ())
    left = {"seconds_left": 1.0, "request_seconds_left": 1.0}
    assert events == [Progress(request_id=live.request_id, image_index=0, step_index=1, num_steps=2, **left)]
    plan, events = sim.tick()
    assert plan.decode == (task,)
    assert [type(event) for event in events] == [Progress, ImageFinished, Finished]
    assert isinstance(events[1], ImageFinished)
    assert events[1].result.num_evaluations == 4
    assert (task.stage, task.slot, sim.scheduler.in_flight) == (Stage.DONE, None, ())


def test_times_add_up_and_waiting_counts_as_queueing() -> None:
    sim = Simulation(row_cap=2, max_lanes=1)
    sim.submit(num_steps=3)
    second = sim.submit(num_steps=4)
    painted = {event.request_id: event.result for event in sim.run() if isinstance(event, ImageFinished)}
    timings = painted[second.request_id].timings
    assert timings.denoise_s == 4.0
    assert timings.step_s == 1.0
    assert (timings.encode_s, timings.decode_s) == (0.25, 0.5)
    assert timings.queue_s == pytest.approx(5.0 - 0.25)


def test_newcomers_join_at_the_next_step_and_finished_rows_leave_at_once() -> None:
    sim = Simulation(row_cap=8)
    first = sim.submit(num_steps=3)
    sim.tick()
    assert sim.tick()[0].rows == (first.tasks[0],)
    second = sim.submit(num_steps=1)
    plan, _ = sim.tick()
    assert (plan.prepare, plan.rows) == ((second.tasks[0],), ()), "rows wait while it is prepared"
    assert sim.tick()[0].rows == (first.tasks[0], second.tasks[0])
    assert sim.tick()[0].rows == (first.tasks[0],)
    assert not sim.scheduler.has_work


def test_rows_wait_for_one_lot_of_newcomers_and_not_for_those_who_come_meanwhile() -> None:
    sim = Simulation(row_cap=8)
    first = sim.submit(num_steps=20)
    sim.tick()
    for _ in range(10):
        sim.submit(num_steps=1)
        assert (len(sim.tick()[0].prepare), len(sim.tick()[0].rows)) == (1, 2)
    assert first.tasks[0].row_index == 10, "one in two ticks, however many come"
    sim.submit(num_steps=1)
    sim.tick()
    late = sim.submit(num_steps=1)
    plan, _ = sim.tick()
    assert (plan.prepare, len(plan.rows)) == ((), 2)
    plan, _ = sim.tick()
    assert (plan.prepare, plan.rows) == ((late.tasks[0],), ())


def test_rows_do_not_wait_for_ever_for_who_waits_for_pages() -> None:
    sim = Simulation(row_cap=8)
    first = sim.submit(num_steps=20)
    sim.tick()
    unlucky = sim.submit(num_steps=1)
    for _ in range(10):
        plan = sim.plan()
        assert plan.prepare == (unlucky.tasks[0],)
        outcome = TickOutcome(postponed=list(plan.prepare), rows_started_s=sim.now_s, rows_ended_s=sim.now_s + 1.0)
        sim.scheduler.apply(plan, outcome, sim.now_s)
    assert first.tasks[0].row_index == 9, "it is asked for in every tick, and all but the first have rows"


def test_the_pair_of_an_image_is_never_split_and_a_single_row_fills_the_gap() -> None:
    sim = Simulation(row_cap=5)
    for _ in range(3):
        sim.submit(num_steps=10)
    sim.submit(num_steps=40, guidance_scale=1.0)
    sim.tick()
    plan, _ = sim.tick()
    assert plan.num_rows == 5
    assert sorted(task.rows_now for task in plan.rows) == [1, 2, 2]


def test_outside_its_guidance_interval_an_image_costs_one_row() -> None:
    sim = Simulation()
    sim.submit(num_steps=10, guidance_interval=(0.2, 0.5))
    sim.tick()
    counts = [plan.num_rows for plan, _ in (sim.tick() for _ in range(10))]
    assert counts == [1, 1, 2, 2, 2, 1, 1, 1, 1, 1]


def test_the_shortest_job_runs_first_and_takes_the_place_of_a_longer_one() -> None:
    sim = Simulation(row_cap=2)
    long = sim.submit(num_steps=50)
    sim.tick()
    sim.tick()
    short = sim.submit(num_steps=2)
    sim.tick()
    assert sim.tick()[0].rows == (short.tasks[0],)
    assert sim.tick()[0].rows == (short.tasks[0],)
    assert sim.tick()[0].rows == (long.tasks[0],)


def test_queue_positions_are_sent_on_change_and_periodically() -> None:
    sim = Simulation(max_lanes=1)
    sim.submit(num_steps=1000)
    sim.tick()
    longer, shorter = sim.submit(num_steps=50), sim.submit(num_steps=2)
    places = {longer.request_id: 1, shorter.request_id: 0}
    moved = [event for event in sim.scheduler.position_events(sim.now_s) if isinstance(event, Queued)]
    assert {event.request_id: event.queue_position for event in moved} == {longer.request_id: 1}
    assert {request.request_id: request.queue_position for request in (longer, shorter)} == places
    assert sim.scheduler.position_events(sim.now_s + 1.0) == []
    sim.scheduler.cancel(shorter.request_id)
    assert sim.scheduler.position_events(sim.now_s + 1.1) == [], "too soon after the last time"
    assert sim.scheduler.position_events(sim.now_s + 2.0) == [Queued(request_id=longer.request_id, queue_position=0)]
    assert sim.scheduler.position_events(sim.now_s + 6.9) == []
    again = sim.scheduler.position_events(sim.now_s + 7.5)
    assert again == [Queued(request_id=longer.request_id, queue_position=0)], "it is told again where nothing changes"


@pytest.mark.parametrize("ageing", [0.25, 0.5, 2.0])
def test_a_long_job_is_overtaken_only_by_those_who_come_soon_after_it(
    ageing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "AGEING_ROWS_PER_TICK", ageing)
    sim = Simulation(row_cap=2)
    long = sim.submit(num_steps=50)
    arrivals = {}
    order = []
    while long.request_id in sim.scheduler.live:
        short = sim.submit(num_steps=2)
        arrivals[short.request_id] = sim.scheduler.num_ticks
        _, events = sim.tick()
        order += [event.request_id for event in events if isinstance(event, Finished)]
    overtakers = [arrivals[request_id] for request_id in order[:-1]]
    assert order[-1] == long.request_id
    assert max(overtakers) <= 100 / ageing + 1


def test_a_row_weighs_as_many_pixels_as_it_has() -> None:
    """A picture of four times the pixels and half the steps is twice the work, and comes second."""
    sim = Simulation(row_cap=2)
    large = sim.submit(num_steps=5, width_px=128, height_px=128)
    small = sim.submit(num_steps=10, width_px=64, height_px=64)
    assert [event.request_id for event in sim.run() if isinstance(event, Finished)] == [
        small.request_id,
        large.request_id,
    ]


def test_a_large_picture_waits_longer_before_it_is_overtaken_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ageing is in rows of the native size: what N steps of a large picture age through is N times its pixels."""
    monkeypatch.setattr(policy, "AGEING_ROWS_PER_TICK", 1.0)
    last = {}
    for side_px in (64, 128):
        sim = Simulation(row_cap=2)
        long = sim.submit(num_steps=30, width_px=side_px, height_px=side_px)
        while not long.is_over:
            sim.submit(num_steps=2, request_id=f"short-{sim.scheduler.num_ticks}")
            events = sim.tick()[1]
            for event in events:
                if isinstance(event, Finished) and event.request_id != long.request_id:
                    last[side_px] = int(event.request_id.partition("-")[2])
    assert last[64] <= 60
    assert 180 <= last[128] <= 240


def test_sizes_do_not_share_a_tick_and_both_get_their_turn() -> None:
    sim = Simulation(row_cap=8)
    square = [sim.submit(num_steps=3) for _ in range(2)]
    wide = [sim.submit(num_steps=3, width_px=96, height_px=64) for _ in range(2)]
    groups = []
    while sim.scheduler.has_work:
        plan, _ = sim.tick()
        assert len({task.group for task in plan.rows}) <= 1
        groups.append(plan.group)
    assert {group.width_px for group in groups if group} == {64, 96}
    assert all(live.num_painted == 1 for live in (*square, *wide))


def test_a_full_house_makes_newcomers_wait_for_a_slot() -> None:
    sim = Simulation(row_cap=16, max_lanes=2)
    first = sim.submit(num_steps=2, num_images=2)
    second = sim.submit(num_steps=3)
    assert len(sim.tick()[0].prepare) == 2
    assert not second.has_started
    sim.tick()
    sim.tick()
    assert first.is_over
    assert sim.tick()[0].prepare == (second.tasks[0],)
    sim.run()
    sim.scheduler.check_integrity()


def test_few_are_prepared_and_few_decoded_in_one_tick() -> None:
    sim = Simulation(row_cap=32, max_prepares_per_tick=3, max_decodes_per_tick=2)
    sim.submit(num_steps=1, num_images=5)
    assert len(sim.tick()[0].prepare) == 3
    assert len(sim.tick()[0].prepare) == 2
    plan, events = sim.tick()
    assert (len(plan.rows), len(plan.decode)) == (5, 2)
    assert sum(isinstance(event, ImageFinished) for event in events) == 2
    assert len(sim.tick()[0].decode) == 2
    assert len(sim.tick()[0].decode) == 1
    assert not sim.scheduler.has_work


def test_previews_come_each_so_many_steps_but_not_with_the_last() -> None:
    sim = Simulation()
    sim.submit(num_steps=6, preview_every=2, sampler="heun")
    previews = [event.step_index for event in sim.run() if isinstance(event, Preview)]
    assert previews == [2, 4]


def test_a_step_of_heun_reports_progress_once_though_it_takes_two_rows() -> None:
    sim = Simulation()
    live = sim.submit(num_steps=3, sampler="heun", guidance_scale=1.0)
    events = sim.run()
    assert [event.step_index for event in events if isinstance(event, Progress)] == [1, 2, 3]
    [painted] = [event.result for event in events if isinstance(event, ImageFinished)]
    assert painted.num_evaluations == live.settings.table.num_rows == 5


def test_the_last_failure_of_a_request_ends_it_with_the_first_reason() -> None:
    sim = Simulation()
    live = sim.submit(num_steps=2, num_images=2)
    sim.tick()
    plan = sim.plan()
    reasons = {task: FailureReason("numerical_error", f"image {task.image_index} is bad") for task in plan.rows}
    events = sim.apply(plan, reasons)
    assert [type(event) for event in events] == [ImageFailed, ImageFailed, Failed]
    assert events[-1] == Failed(request_id=live.request_id, code="numerical_error", message="image 0 is bad")
    sim.scheduler.check_integrity()


def test_a_newcomer_that_cannot_be_prepared_gives_its_slot_back() -> None:
    sim = Simulation(max_lanes=1)
    sim.submit()
    plan = sim.plan()
    events = sim.apply(plan, {plan.prepare[0]: FailureReason("invalid_value", "the prompt is too long", "prompt")})
    assert isinstance(events[-1], Failed)
    assert events[-1].param == "prompt"
    assert sim.scheduler.slots.num_free == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_over_few_slots_loses_nothing(seed: int) -> None:
    walk = random.Random(seed)
    sim = Simulation(row_cap=walk.choice([2, 3, 8]), max_lanes=3, max_prepares_per_tick=2, max_decodes_per_tick=1)
    positions: dict[str, int] = {}
    for _ in range(300):
        action = walk.random()
        if action < 0.3 and len(sim.scheduler.live) < 12:
            live = sim.submit(
                num_steps=walk.randint(1, 8),
                guidance_scale=walk.choice([1.0, 5.0]),
                num_images=walk.randint(1, 3),
                width_px=walk.choice([64, 96]),
                deadline_s=walk.choice([None, 3.0, 30.0]),
            )
            positions[live.request_id] = 0
        elif action < 0.4 and sim.scheduler.live:
            for event in sim.scheduler.cancel(walk.choice(list(sim.scheduler.live))):
                positions[event.request_id] += 1
        else:
            events = sim.scheduler.expire(sim.now_s)
            plan = sim.plan()
            bad = {task: FailureReason("numerical_error", "bad") for task in plan.tasks if walk.random() < 0.05}
            for event in [*events, *sim.apply(plan, bad)]:
                positions[event.request_id] += isinstance(event, Finished | Failed)
        sim.scheduler.check_integrity()
    for event in sim.run():
        positions[event.request_id] += isinstance(event, Finished | Failed)
    sim.scheduler.check_integrity()
    assert sim.scheduler.slots.num_free == 3
    assert set(positions.values()) == {1}

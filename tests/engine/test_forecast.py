"""Times left and deadlines: what is told is held against what comes, over a clock that is made of costs. No torch."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import pytest

from benchmarks.open_loop import quantile
from benchmarks.simulator import SCHEDULE, Costs, SimulatedEngine, model_info
from benchmarks.trace import Recorded, mixed
from diffserve.config import EngineConfig
from diffserve.engine.image.admission import ImageAdmission
from diffserve.engine.image.buckets import CostCurve, KneeCap
from diffserve.engine.image.task import LiveRequest
from diffserve.types import Event, Failed, Painted, Progress
from tests.engine.desk import Desk

COSTS = Costs(
    calls={
        "64x64": {1: 0.010, 2: 0.014, 4: 0.022, 8: 0.040, 16: 0.078},
        "96x64": {1: 0.015, 2: 0.021, 4: 0.033, 8: 0.06},
    },
    prepare_s=0.004,
    decode_s=0.012,
    tick_s=0.002,
)
LEAST_S = 0.1
"""Of what is nearer a tick is too large a part."""


class Watched:
    """A simulated engine whose requests all come at once; after a first one, of which it learns its pace."""

    def __init__(self, trace: list[Recorded], policy: str = "latency") -> None:
        info = model_info(COSTS)
        self.engine = SimulatedEngine(COSTS, EngineConfig(policy=policy), info)
        self.engine.scheduler.forecast.timer = lambda: 0.0  # to look ahead takes no time here
        self.door = ImageAdmission(info, SCHEDULE, {})
        self.now_s = 0.0
        self.foreseen: dict[str, tuple[float, float]] = {}
        self.told: list[tuple[str, float, float]] = []
        self.done: dict[str, float] = {}
        for one in mixed(2, COSTS.sizes, seed=9):
            self.submit(one)
        self.run()
        self.told.clear()
        for one in trace:
            self.submit(one)
        self.run()

    def submit(self, one: Recorded) -> LiveRequest:
        live = self.door.admit(one.request(f"request {len(self.done)} {len(self.engine.inbox)}"), self.now_s)
        left_s = self.engine.scheduler.seconds_left(live, self.engine.inbox, self.now_s)
        if left_s is not None:
            self.foreseen[live.request_id] = (left_s, self.now_s)
        self.engine.inbox.append(live)
        return live

    def run(self) -> None:
        while self.engine.has_work:
            self.now_s, _ = self.engine.begin(self.now_s)
            for event in self.engine.end(self.now_s):
                self.take(event)

    def take(self, event: Event) -> None:
        if isinstance(event, Progress) and event.seconds_left is not None:
            self.told.append((event.request_id, event.seconds_left, self.now_s))
        if isinstance(event, Painted):
            self.done[event.request_id] = self.now_s

    @property
    def errors(self) -> list[float]:
        """Of every event with steps: |told - true| / true."""
        true_s = [(told_s, self.done[name] - at_s) for name, told_s, at_s in self.told]
        return [abs(told_s - true_s) / true_s for told_s, true_s in true_s if true_s > LEAST_S]


@pytest.mark.parametrize(("policy", "most"), [("latency", 0.15), ("throughput", 0.15), ("goodput", 0.4)])
def test_times_left_are_true_where_nobody_comes_later(policy: str, most: float) -> None:
    """Two sizes, which share no calls, four numbers of steps, five samplers, three clients, some of batch priority.

    Under goodput who is late gives way, and who is late changes in the middle of a stride."""
    trace = [
        msgspec.structs.replace(one, client=f"{place % 3}", priority="interactive" if place % 5 else "batch")
        for place, one in enumerate(mixed(24, COSTS.sizes, seed=3))
    ]
    watched = Watched(trace, policy)
    errors = watched.errors
    assert len(errors) > 200
    assert statistics.median(errors) < 0.06
    assert quantile(errors, 0.9) < most


def test_of_one_client_whole_runs_are_foreseen_at_once() -> None:
    """Nobody gets another's turn, so the ticks up to the next end are one stride."""
    watched = Watched(mixed(24, COSTS.sizes, seed=3))
    assert len(watched.errors) > 200
    assert quantile(watched.errors, 0.9) < 0.1
    scheduler, strides = watched.engine.scheduler, 0
    for one in mixed(24, COSTS.sizes, seed=5):
        watched.submit(one)
    watched.now_s, _ = watched.engine.begin(watched.now_s)
    advance = scheduler.forecast._advance

    def counted(*told: Any) -> Any:
        nonlocal strides
        strides += 1
        return advance(*told)

    scheduler.forecast._advance = counted  # type: ignore[assignment]
    left_s = scheduler._foresee(watched.now_s)
    assert len(left_s) == 24
    assert strides < 1.5 * 24, f"{strides} strides to the ends of 24 pictures"


def test_probes_of_a_cap_are_foreseen_and_not_counted() -> None:
    curve, cap = CostCurve((1, 2, 4, 8, 16)), KneeCap(16, "latency")
    for num_rows, seconds in COSTS.calls["64x64"].items():
        curve.observe(num_rows, seconds)
    foreseen = [cap.of(curve, ahead=place) for place in range(40)]
    assert [cap.of(curve) for _ in range(40)] == foreseen
    assert len(set(foreseen)) == 2


def test_the_last_who_comes_is_told_when_all_before_it_are_done() -> None:
    trace = mixed(20, COSTS.sizes, seed=4)
    watched = Watched([*trace, msgspec.structs.replace(trace[0], num_steps=50)])
    name, (left_s, at_s) = list(watched.foreseen.items())[-1]
    assert left_s == pytest.approx(watched.done[name] - at_s, rel=0.2)


def test_a_picture_alone_is_foreseen_to_a_tick() -> None:
    watched = Watched(
        [Recorded(arrival_s=0, num_steps=30, sampler="ddim", guidance_scale=5.0, width_px=64, height_px=64)]
    )
    left_s, at_s = watched.foreseen["request 2 0"]
    assert left_s == pytest.approx(watched.done["request 2 0"] - at_s, abs=0.05)
    assert max(watched.errors) < 0.05


@pytest.mark.parametrize("is_looked_for", [True, False])
@pytest.mark.parametrize(("max_lanes", "fields"), [(1, {"num_images": 3}), (2, {"num_images": 5, "seed": 1})])
def test_a_request_is_foreseen_until_its_last_picture(
    max_lanes: int, fields: dict[str, int], is_looked_for: bool
) -> None:
    """Though some wait for a lane meanwhile, and others want the same pictures."""
    desk = Desk(max_lanes=max_lanes)
    if is_looked_for:
        desk.scheduler.forecast.timer = lambda: 0.0
    desk.submit(num_steps=10)
    desk.run()
    lives = [desk.submit(num_steps=10, **fields) for _ in range(2 if "seed" in fields else 1)]
    lives[0].seconds_left = 11.0 * fields["num_images"] / max_lanes  # as the engine notes it when it comes
    told: list[tuple[Progress, float]] = []
    painted_s: dict[tuple[str, int], float] = {}
    while desk.scheduler.has_work:
        for event in desk.tick()[1]:
            if isinstance(event, Progress):
                told.append((event, desk.now_s))
            elif isinstance(event, Painted):
                painted_s[event.request_id, event.result.image_index] = desk.now_s
    assert len(told) == 10 * fields["num_images"] * len(lives)
    for event, now_s in told:
        assert event.seconds_left is not None
        assert event.request_seconds_left is not None
        assert event.request_seconds_left >= event.seconds_left
        if is_looked_for:
            last_s = max(at_s for (name, _), at_s in painted_s.items() if name == event.request_id)
            assert event.request_seconds_left == pytest.approx(last_s - now_s, rel=0.3, abs=3.0)
            own_s = painted_s[event.request_id, event.image_index]
            assert event.seconds_left == pytest.approx(own_s - now_s, rel=0.3, abs=3.0)
    if "seed" not in fields:
        first = told[0][0]
        assert first.seconds_left is not None
        assert first.request_seconds_left is not None
        assert first.request_seconds_left > 2 * first.seconds_left


@pytest.mark.parametrize("where", ["in a tick", "between two ticks"])
def test_a_pause_of_the_process_leaves_the_forecast_as_it_was(where: str) -> None:
    watched = Watched(mixed(4, COSTS.sizes, seed=5))
    forecast = watched.engine.scheduler.forecast
    before, prepare_s = forecast.pace, forecast._prepare_s
    for recorded in mixed(2, COSTS.sizes, seed=6):
        watched.submit(recorded)
    for num_ticks in range(8):
        pause_s = 60.0 if num_ticks in (0, 4) else 0.0
        watched.now_s += pause_s if where == "between two ticks" else 0.0
        watched.now_s, _ = watched.engine.begin(watched.now_s)
        watched.now_s += pause_s if where == "in a tick" else 0.0
        watched.engine.end(watched.now_s)
    assert forecast.pace == pytest.approx(before, rel=0.1)
    assert forecast._prepare_s == pytest.approx(prepare_s, rel=0.1)


def test_nothing_is_told_before_anything_was_seen() -> None:
    desk = Desk()
    live = desk.door.admit(desk.submit(num_steps=3).request, 0.0)
    assert desk.scheduler.seconds_left(live, (), 0.0) is None


def test_foreseeing_changes_nothing() -> None:
    """Who asks when a newcomer would be done leaves the queue and the shares as they are."""
    ran: list[list[list[tuple[int, int]]]] = []
    for is_asked in (True, False):
        desk = Desk(row_cap=4)
        lives = [
            desk.submit(
                client=f"{number % 2}", num_steps=5 + number, priority="batch" if number == 3 else "interactive"
            )
            for number in range(6)
        ]
        ran.append([])
        while desk.scheduler.has_work:
            if is_asked:
                desk.scheduler.seconds_left(desk.door.admit(lives[0].request, desk.now_s), (), desk.now_s)
            ran[-1].append([(lives.index(task.live), task.row_index) for task in desk.tick()[0].rows])
    assert ran[0] == ran[1]


def test_what_cannot_be_done_in_time_any_more_is_given_up_without_another_step() -> None:
    desk = Desk(row_cap=2)
    for _ in range(3):
        desk.submit(num_steps=4)
    desk.run()
    late = desk.submit(num_steps=20, deadline_s=40.0)
    first = [desk.submit(client=str(number), num_steps=15) for number in range(2)]
    ran, events = 0, list[Event]()
    while desk.scheduler.has_work:
        events += desk.scheduler.expire(desk.now_s)
        ran += sum(task.live is late for task in desk.tick()[0].rows)
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.request_id, failed.code, failed.param) == (late.request_id, "deadline_exceeded", "deadline_s")
    assert "cannot be kept any more" in failed.message
    assert ran == 0, "its neighbours were shorter, and it had no time left when its turn came"
    assert all(live.is_over for live in first)

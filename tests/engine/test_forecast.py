"""Completion forecasts and deadlines, compared with the actual times of a simulated clock. No torch."""

from __future__ import annotations

import statistics

import msgspec
import pytest

from benchmarks.open_loop import quantile
from benchmarks.simulator import SCHEDULE, Costs, SimulatedEngine, model_info
from benchmarks.trace import Recorded, mixed
from diffserve.api.types import Event, Failed, ImageFinished, Progress
from diffserve.engine.image.admission import ImageAdmission
from diffserve.engine.image.buckets import CostCurve, KneeCap
from diffserve.engine.image.forecast import MAX_FORECAST_SHARE
from diffserve.engine.image.task import LiveRequest
from diffserve.settings.config import EngineConfig
from tests.engine.simulated_scheduler import Simulation

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
        self.engine.scheduler.estimates.timer = lambda: 0.0  # a forecast takes no time here
        self.door = ImageAdmission(info, SCHEDULE, {})
        self.now_s = 0.0
        self.foreseen: dict[str, tuple[float, float]] = {}
        self.told: list[tuple[str, float, float]] = []
        self.done: dict[str, float] = {}
        for request in mixed(2, COSTS.sizes, seed=9):
            self.submit(request)
        self.run()
        self.told.clear()
        for request in trace:
            self.submit(request)
        self.run()

    def submit(self, request: Recorded) -> LiveRequest:
        live = self.door.admit(request.request(f"request {len(self.done)} {len(self.engine.inbox)}"), self.now_s)
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
        if isinstance(event, ImageFinished):
            self.done[event.request_id] = self.now_s

    @property
    def errors(self) -> list[float]:
        """Return the relative forecast error of every event with steps."""
        true_s = [(estimate_s, self.done[name] - at_s) for name, estimate_s, at_s in self.told]
        return [abs(estimate_s - true_s) / true_s for estimate_s, true_s in true_s if true_s > LEAST_S]


@pytest.mark.parametrize(
    ("policy", "median", "p90"), [("latency", 0.25, 0.7), ("throughput", 0.25, 0.7), ("goodput", 0.4, 2.0)]
)
def test_times_left_are_about_right_while_no_request_comes_later(policy: str, median: float, p90: float) -> None:
    """Two sizes, which share no calls, four numbers of steps and five samplers, of one client.

    Under goodput late images give way later than the forecast knows.
    """
    errors = Watched(mixed(24, COSTS.sizes, seed=3), policy).errors
    assert len(errors) > 200
    assert statistics.median(errors) < median
    assert quantile(errors, 0.9) < p90


def test_times_left_stay_about_right_with_three_clients_and_both_priorities() -> None:
    trace = [
        msgspec.structs.replace(request, client=f"{place % 3}", priority="interactive" if place % 5 else "batch")
        for place, request in enumerate(mixed(24, COSTS.sizes, seed=3))
    ]
    errors = Watched(trace).errors
    assert len(errors) > 200
    assert statistics.median(errors) < 0.5


def test_images_that_share_ticks_are_not_forecast_one_after_another() -> None:
    sim = Simulation(row_cap=8)
    sim.submit(num_steps=3)
    sim.run()
    lives = [sim.submit(num_steps=10) for _ in range(8)]
    sim.tick()
    left_s = sim.scheduler.estimates.seconds_left(sim.now_s)
    first, last = left_s[lives[0].tasks[0]], left_s[lives[-1].tasks[0]]
    assert first == pytest.approx(10.0, abs=2.5), "four images share a tick of one second"
    assert last == pytest.approx(20.0, abs=5.0), "the other four follow"


@pytest.mark.parametrize("crowd", [0, 80])
def test_the_forecast_of_a_light_client_counts_no_full_ticks_of_a_saturating_one(crowd: int) -> None:
    """The scheduler limits the rows of the other client in the ticks of this one."""
    watched = Watched([])
    request = mixed(1, COSTS.sizes[:1], seed=3)[0]
    for _ in range(crowd):
        watched.submit(msgspec.structs.replace(request, client="crowd", num_steps=20))
    for _ in range(10 if crowd else 0):
        watched.now_s, _ = watched.engine.begin(watched.now_s)
        watched.engine.end(watched.now_s)
    guest = watched.submit(msgspec.structs.replace(request, client="guest", num_steps=20))
    while guest.request_id not in watched.done:
        watched.now_s, _ = watched.engine.begin(watched.now_s)
        for event in watched.engine.end(watched.now_s):
            watched.take(event)
    estimates = [(estimate_s, at_s) for name, estimate_s, at_s in watched.told if name == guest.request_id]
    ratios = [estimate_s / (watched.done[guest.request_id] - at_s) for estimate_s, at_s in estimates[:15]]
    assert 0.8 < statistics.median(ratios) < 1.5


def test_the_row_cap_of_a_forecast_is_the_knee_and_is_not_counted() -> None:
    curve, cap = CostCurve((1, 2, 4, 8, 16)), KneeCap(16, "latency")
    for num_rows, seconds in COSTS.calls["64x64"].items():
        curve.observe(num_rows, seconds)
    expected = [cap.of(curve) for _ in range(40)]
    again = KneeCap(16, "latency")
    bucket_pairs = [(again.of(curve, may_probe=False), again.of(curve)) for _ in range(40)]
    assert [probed for _, probed in bucket_pairs] == expected
    assert {knee for knee, _ in bucket_pairs} == {min(expected)}
    assert len(set(expected)) == 2


def test_forecasts_take_a_small_share_of_the_time() -> None:
    sim, num_forecasts = Simulation(), 0

    def timer() -> float:
        nonlocal num_forecasts
        num_forecasts += 1
        return 0.25 * num_forecasts

    sim.scheduler.estimates.timer = timer
    for _ in range(40):
        sim.submit(num_steps=10)
    events = sim.run()
    assert sum(isinstance(event, Progress) for event in events) == 400
    assert 1 <= num_forecasts // 2 <= 1 + MAX_FORECAST_SHARE * sim.now_s / 0.25
    live = sim.admission.admit(sim.submit(num_steps=3).request, sim.now_s)
    sim.scheduler.estimates.seconds_left(sim.now_s)
    assert sim.scheduler.seconds_left(live, (), sim.now_s) is None
    urgent = sim.admission.admit(sim.submit(num_steps=3, deadline_s=100.0).request, sim.now_s)
    assert sim.scheduler.seconds_left(urgent, (), sim.now_s) is not None, "a deadline is always checked"


def test_the_last_request_is_forecast_to_end_after_all_earlier_requests() -> None:
    trace = mixed(20, COSTS.sizes, seed=4)
    watched = Watched([*trace, msgspec.structs.replace(trace[0], num_steps=50)])
    name, (left_s, at_s) = list(watched.foreseen.items())[-1]
    assert left_s == pytest.approx(watched.done[name] - at_s, rel=0.2)


def test_the_forecast_for_a_single_image_is_exact_to_a_tick() -> None:
    watched = Watched(
        [Recorded(arrival_s=0, num_steps=30, sampler="ddim", guidance_scale=5.0, width_px=64, height_px=64)]
    )
    left_s, at_s = watched.foreseen["request 2 0"]
    assert left_s == pytest.approx(watched.done["request 2 0"] - at_s, abs=0.05)
    assert max(watched.errors) < 0.05


@pytest.mark.parametrize(("max_lanes", "fields"), [(1, {"num_images": 3}), (2, {"num_images": 5, "seed": 1})])
def test_a_request_is_forecast_until_its_last_image(max_lanes: int, fields: dict[str, int]) -> None:
    """Though some wait for a slot meanwhile, and others want the same pictures."""
    sim = Simulation(max_lanes=max_lanes)
    sim.scheduler.estimates.timer = lambda: 0.0
    sim.submit(num_steps=10)
    sim.run()
    lives = [sim.submit(num_steps=10, **fields) for _ in range(2 if "seed" in fields else 1)]
    progress_events: list[tuple[Progress, float]] = []
    painted_s: dict[tuple[str, int], float] = {}
    while sim.scheduler.has_work:
        for event in sim.tick()[1]:
            if isinstance(event, Progress):
                progress_events.append((event, sim.now_s))
            elif isinstance(event, ImageFinished):
                painted_s[event.request_id, event.result.image_index] = sim.now_s
    assert len(progress_events) == 10 * fields["num_images"] * len(lives)
    for event, now_s in progress_events:
        assert event.seconds_left is not None
        assert event.request_seconds_left is not None
        assert event.request_seconds_left >= event.seconds_left
        last_s = max(at_s for (name, _), at_s in painted_s.items() if name == event.request_id)
        assert event.request_seconds_left == pytest.approx(last_s - now_s, rel=0.3, abs=3.0)
        own_s = painted_s[event.request_id, event.image_index]
        assert event.seconds_left == pytest.approx(own_s - now_s, rel=0.3, abs=3.0)
    if "seed" not in fields:
        first = progress_events[0][0]
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


def test_no_value_is_reported_before_the_first_observation() -> None:
    sim = Simulation()
    live = sim.admission.admit(sim.submit(num_steps=3).request, 0.0)
    assert sim.scheduler.seconds_left(live, (), 0.0) is None


def test_foreseeing_changes_nothing() -> None:
    """A forecast for a new request leaves the queue and the shares unchanged."""
    ran: list[list[list[tuple[int, int]]]] = []
    for is_asked in (True, False):
        sim = Simulation(row_cap=4)
        lives = [
            sim.submit(client=f"{number % 2}", num_steps=5 + number, priority="batch" if number == 3 else "interactive")
            for number in range(6)
        ]
        ran.append([])
        while sim.scheduler.has_work:
            if is_asked:
                sim.scheduler.seconds_left(sim.admission.admit(lives[0].request, sim.now_s), (), sim.now_s)
            ran[-1].append([(lives.index(task.live), task.row_index) for task in sim.tick()[0].rows])
    assert ran[0] == ran[1]


def test_what_cannot_be_done_in_time_any_more_is_given_up_without_another_step() -> None:
    sim = Simulation(row_cap=2)
    for _ in range(3):
        sim.submit(num_steps=4)
    sim.run()
    late = sim.submit(num_steps=20, deadline_s=40.0)
    first = [sim.submit(client=str(number), num_steps=15) for number in range(2)]
    ran, events = 0, list[Event]()
    while sim.scheduler.has_work:
        events += sim.scheduler.expire(sim.now_s)
        ran += sum(task.live is late for task in sim.tick()[0].rows)
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.request_id, failed.code, failed.param) == (late.request_id, "deadline_exceeded", "deadline_s")
    assert "cannot be met" in failed.message
    assert ran == 0, "its neighbours were shorter, and it had no time left when its turn came"
    assert all(live.is_over for live in first)

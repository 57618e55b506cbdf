"""A discrete-event simulator of engines: a recorded trace over measured costs, by the scheduler that serves.

    python benchmarks/simulator.py --costs costs.json --trace trace.jsonl --policy goodput
    python benchmarks/simulator.py --costs costs.json --loads 0.9 --requests 100000 --engines 1000

Every simulated engine has a ``RequestScheduler`` of its own: lanes, fair shares, policy, ageing and decoding are the
code that serves, and only the tensors are replaced by what they were measured to take. A router sends each request to
the engine with the least work. Without ``--trace`` the mixed workload is drawn, at ``--loads`` times what the engines
can do with full ticks.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.baseline_policies import ALL_POLICIES, configured, use
from benchmarks.open_loop import quantile
from benchmarks.report import write
from benchmarks.trace import Recorded, at_poisson_times, load, mixed
from diffserve.api.types import Event, Finished, ModelInfo
from diffserve.engine.image.admission import ImageAdmission
from diffserve.engine.image.buckets import CostCurve, KneeCap
from diffserve.engine.image.policy import solo_s
from diffserve.engine.image.scheduler import RequestScheduler
from diffserve.engine.image.task import GroupKey, LiveRequest, TickOutcome, TickPlan
from diffserve.settings.config import EngineConfig
from schedulers import NoiseSchedule

IDLE_S = 1e-3
"""Seconds after which an empty tick is tried again, as in the engine."""

HALVINGS = 10
"""Relative tolerance of the search for the request rate that gives a busy share."""

PIXELS = np.zeros((8, 8, 3), dtype=np.uint8)
SCHEDULE = NoiseSchedule(np.linspace(0.999, 0.005, 1000))


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of a machine, in seconds.

    calls      "128x192" (width x height) -> rows in a call -> seconds; the first size is the native one
    prepare_s  of a new image: encode its text, draw its noise
    decode_s   of an image
    tick_s     of a tick in addition
    """

    calls: dict[str, dict[int, float]]
    prepare_s: float
    decode_s: float
    tick_s: float

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(width, height) in pixels."""
        pairs = (size.split("x") for size in self.calls)
        return [(int(width), int(height)) for width, height in pairs]


class SimulatedCalls:
    """Tick costs from measured seconds, with the engine's curves, covers and knees."""

    def __init__(self, costs: Costs, config: EngineConfig) -> None:
        self._curves: dict[tuple[int, int], CostCurve] = {}
        for (width_px, height_px), seconds in zip(costs.sizes, costs.calls.values(), strict=True):
            curve = self._curves[height_px, width_px] = CostCurve(tuple(seconds))
            for num_rows, wall_s in seconds.items():
                curve.observe(num_rows, wall_s)
        self._knee_cap = KneeCap(max(max(rows) for rows in costs.calls.values()), config.policy)
        self._knee_cap.overhead_s = costs.tick_s
        self._fixed = config.max_rows
        self._seconds: dict[tuple[GroupKey, int], float] = {}

    def row_cap(self, group: GroupKey, *, may_probe: bool = True) -> int:
        """Return the maximum number of rows of a tick."""
        return self._fixed or self._knee_cap.of(self._curves[group[:2]], may_probe=may_probe)

    def call_s(self, group: GroupKey, num_rows: int) -> float:
        """Return the seconds of ``num_rows`` rows. Raises KeyError for a size that was not measured."""
        if (group, num_rows) not in self._seconds:
            self._seconds[group, num_rows] = self._curves[group[:2]].total_s(num_rows)
        return self._seconds[group, num_rows]


class SimulatedEngine:
    """Scheduler whose ticks take the times of ``costs``; ``busy_s`` sums ticks that did work."""

    def __init__(self, costs: Costs, config: EngineConfig, info: ModelInfo) -> None:
        self.costs = costs
        self.calls = SimulatedCalls(costs, config)
        self.scheduler = RequestScheduler(config, info, self.calls)
        self.scheduler.estimates.timer = itertools.count().__next__  # forecasts are not read here: make few
        self.inbox: list[LiveRequest] = []
        self.busy_s = 0.0
        self._plan: TickPlan | None = None

    @property
    def has_work(self) -> bool:
        """Whether a tick would do something."""
        return bool(self.inbox) or self.scheduler.has_work

    def begin(self, now_s: float) -> tuple[float, float]:
        """Plan a tick at ``now_s``; return its end and the work that it does."""
        for live in self.inbox:
            self.scheduler.add(live)
        self.inbox.clear()
        plan = self._plan = self.scheduler.plan(now_s)
        if not plan.tasks:
            return now_s + IDLE_S, 0.0
        seconds = self.costs.tick_s + self.costs.prepare_s * len(plan.prepare)
        if plan.group is not None:
            seconds += self.calls.call_s(plan.group, plan.num_rows)
        seconds += self.costs.decode_s * len(plan.decode)
        self.busy_s += seconds
        return now_s + seconds, plan.cost

    def end(self, now_s: float) -> list[Event]:
        """Apply the tick that ends at ``now_s``; return its events."""
        plan = self._plan
        assert plan is not None
        outcome = TickOutcome(rows_started_s=now_s, rows_ended_s=now_s)
        for task in plan.prepare:
            outcome.groups[task] = GroupKey(task.settings.height_px, task.settings.width_px, 1)
            outcome.prepare_s[task] = self.costs.prepare_s
        for task in plan.decode:
            outcome.pictures[task] = PIXELS
            outcome.decode_s[task] = self.costs.decode_s
        return self.scheduler.apply(plan, outcome, now_s)


class Served(NamedTuple):
    """Served request: seconds from its arrival to its end, and seconds that it takes alone."""

    latency_s: float
    solo_s: float

    def is_good(self, slo_scale: float) -> bool:
        """Whether it was within its SLO."""
        return self.latency_s <= slo_scale * self.solo_s


NOT_SERVED = Served(math.inf, 0.0)


class Replay(NamedTuple):
    """Replayed trace: ``served`` in the order of the trace, and the share of time that engines were busy."""

    served: list[Served]
    utilisation: float
    num_ticks: int

    def summary(self, slo_scale: float) -> dict[str, float]:
        """Return the figures of the replay."""
        return summary(self.served, slo_scale) | {"utilisation": round(self.utilisation, 4), "ticks": self.num_ticks}


def summary(served: Sequence[Served], slo_scale: float) -> dict[str, float]:
    """p50, p99 and mean in seconds, and goodput: the share within ``slo_scale`` times what they take alone."""
    latencies = [request.latency_s for request in served]
    return {
        "requests": len(served),
        "p50_s": round(quantile(latencies, 0.5), 4),
        "p99_s": round(quantile(latencies, 0.99), 4),
        "mean_s": round(statistics.fmean(latencies), 4),
        "goodput": round(statistics.fmean(request.is_good(slo_scale) for request in served), 4),
    }


def replay(
    trace: Sequence[Recorded], costs: Costs, config: EngineConfig, *, num_engines: int = 1, policy: str = ""
) -> Replay:
    """Serve ``trace``, in the order of arrival, on ``num_engines`` engines behind a router that sees work left.

    ``policy``: a baseline policy to use in place of the configured one.

    Raises ValueError for a size that was not measured.
    """
    unknown = {(request.width_px, request.height_px) for request in trace} - set(costs.sizes)
    if unknown:
        raise ValueError(f"the costs say nothing of {sorted(unknown)}; they know {', '.join(costs.calls)}.")
    info = model_info(costs)
    door = ImageAdmission(info, SCHEDULE, {})
    calls = SimulatedCalls(costs, config)
    engines = [SimulatedEngine(costs, config, info) for _ in range(num_engines)]
    for engine in engines:
        use(engine.scheduler, policy)
    work = np.zeros(num_engines)  # left, by engine
    ends: list[tuple[float, int]] = []  # of the ticks that run, the earliest first
    served: list[Served] = [NOT_SERVED] * len(trace)
    arrived: dict[str, tuple[int, LiveRequest]] = {}

    def begin(number: int, now_s: float) -> None:
        end_s, done = engines[number].begin(now_s)
        work[number] -= done
        heapq.heappush(ends, (end_s, number))

    def advance_to(until_s: float) -> float:
        """Run all ticks that end until then; when the last of them did."""
        now_s = 0.0
        while ends and ends[0][0] <= until_s:
            now_s, number = heapq.heappop(ends)
            for request_id in (event.request_id for event in engines[number].end(now_s) if isinstance(event, Finished)):
                place, live = arrived.pop(request_id)
                served[place] = Served(now_s - live.submitted_s, isolated_s(live, calls, costs))
            if engines[number].has_work:
                begin(number, now_s)
            else:
                work[number] = 0.0
        return now_s

    for place, request in enumerate(trace):
        advance_to(request.arrival_s)
        live = door.admit(request.request(f"request {place}"), request.arrival_s)
        arrived[live.request_id] = (place, live)
        number = int(work.argmin())
        work[number] += sum(task.cost_left for task in live.tasks)
        is_idle = not engines[number].has_work
        engines[number].inbox.append(live)
        if is_idle:
            begin(number, request.arrival_s)
    ended_s = advance_to(math.inf)
    busy_s = sum(engine.busy_s for engine in engines)
    num_ticks = sum(engine.scheduler.num_ticks for engine in engines)
    return Replay(served, busy_s / (num_engines * ended_s) if served else 0.0, num_ticks)


def isolated_s(live: LiveRequest, calls: SimulatedCalls, costs: Costs) -> float:
    """Return the seconds that a request takes alone."""
    num_images = live.request.num_images
    besides_s = live.settings.table.num_rows * costs.tick_s + num_images * (costs.prepare_s + costs.decode_s)
    return solo_s(live, calls) + besides_s


def model_info(costs: Costs) -> ModelInfo:
    """Describe a model that has only the measured sizes."""
    return ModelInfo(
        model_id="simulated",
        family="sd1",
        digest="",
        prediction_type="epsilon",
        vae_factor=8,
        latent_channels=4,
        size_multiple_px=8,
        good_sizes=tuple(costs.sizes),
        max_side_px=max(max(size) for size in costs.sizes),
        train_timesteps=1000,
        is_inpainting=False,
        default_sampler="ddim",
        default_num_steps=20,
        default_guidance_scale=7.5,
        default_spacing="leading",
        device="none",
        dtype="none",
        choice_reason="simulated",
        num_parameters=0,
        weights_bytes=0,
    )


def capacity_per_s(requests: Sequence[Recorded], costs: Costs, config: EngineConfig) -> float:
    """Compute the requests per second of one engine with always full ticks."""
    door, calls = ImageAdmission(model_info(costs), SCHEDULE, {}), SimulatedCalls(costs, config)
    seconds = 0.0
    for number, request in enumerate(requests):
        live = door.admit(request.request(f"request {number}"), 0.0)
        group = GroupKey(request.height_px, request.width_px, 0)
        cap = calls.row_cap(group, may_probe=False)
        num_rows = live.settings.table.num_rows + int(live.settings.guided.sum())
        a_row_s = (calls.call_s(group, cap) + costs.tick_s) / cap
        seconds += request.num_images * (num_rows * a_row_s + costs.prepare_s + costs.decode_s)
    return len(requests) / seconds


def isolated_times(trace: Sequence[Recorded], costs: Costs, config: EngineConfig) -> list[float]:
    """Return the seconds that each request of ``trace`` takes alone."""
    door, calls = ImageAdmission(model_info(costs), SCHEDULE, {}), SimulatedCalls(costs, config)
    return [isolated_s(door.admit(request.request("alone"), 0.0), calls, costs) for request in trace]


def loaded(requests: Sequence[Recorded], costs: Costs, load: float, *, engines: int = 1, seed: int) -> list[Recorded]:
    """Place ``requests`` at Poisson times, at ``load`` times the capacity of ``engines`` with full ticks."""
    capacity = engines * capacity_per_s(requests[:2000], costs, EngineConfig())
    return at_poisson_times(requests, load * capacity, seed=seed)


def busy_for(
    requests: Sequence[Recorded], costs: Costs, share: float, config: EngineConfig, *, seed: int, policy: str = ""
) -> list[Recorded]:
    """Place ``requests`` at Poisson times so that one simulated engine is busy for ``share`` of the time.

    Unlike ``loaded``, it accounts for ticks that are not full: 0.95 can be served.
    """
    slow, fast = 0.0, 2.0  # of what full ticks can do
    for _ in range(HALVINGS):
        middle = (slow + fast) / 2
        if replay(loaded(requests, costs, middle, seed=seed), costs, config, policy=policy).utilisation < share:
            slow = middle
        else:
            fast = middle
    return loaded(requests, costs, fast, seed=seed)


def main(
    costs: Annotated[Path, typer.Option(help="JSON file of call costs, written by benchmarks/validate_simulator.py.")],
    trace: Annotated[Path | None, typer.Option(help="Recorded trace (JSON lines); default: a random one.")] = None,
    policy: Annotated[str, typer.Option(help=f"Comma-separated policies: {', '.join(ALL_POLICIES)}.")] = "latency",
    loads: Annotated[str, typer.Option(help="Comma-separated loads of a random trace; 1 is the capacity.")] = "0.9",
    requests: Annotated[int, typer.Option(min=1, help="Requests of a random trace.")] = 2000,
    engines: Annotated[int, typer.Option(min=1, max=10_000, help="Number of engines behind the router.")] = 1,
    slo_scale: Annotated[
        float, typer.Option(help="A request meets its target within this many times its duration alone.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of a random trace.")] = 1,
    out: Annotated[Path | None, typer.Option(help="File for the JSON results.")] = None,
) -> None:
    """Simulate, and print one JSON document as the last line of stdout."""
    measured = read_costs(costs)
    document: dict[str, Any] = {
        "benchmark": "simulator",
        "note": "simulated over measured costs; nothing was painted",
        "command": " ".join(["python", "benchmarks/simulator.py", *(Path(word).name for word in sys.argv[1:])]),
        "costs": msgspec.to_builtins(measured),
        "slo_scale": slo_scale,
        "points": [],
    }
    gc.set_threshold(200_000, 50, 100)  # requests and images point at each other, and there are many
    configs = {
        name: EngineConfig(policy=configured(name), slo_scale=slo_scale, max_waiting=100_000)
        for name in policy.split(",")
    }
    for part in ["recorded"] if trace else loads.split(","):
        if trace:
            arrivals = load(trace)
        else:
            drawn = mixed(requests, measured.sizes, seed=seed)
            arrivals = loaded(drawn, measured, float(part), engines=engines, seed=seed)
        for name, config in configs.items():
            started_s = time.process_time()
            figures = replay(arrivals, measured, config, num_engines=engines, policy=name).summary(slo_scale)
            took_s = round(time.process_time() - started_s, 2)
            point = {"policy": name, "engines": engines, "load": part, **figures, "simulated_in_cpu_s": took_s}
            document["points"].append(point)
            print(point, file=sys.stderr, flush=True)
    if out is not None:
        write(document, out)
    print(json.dumps(document))


def read_costs(path: Path) -> Costs:
    """Read costs from a file. Raises typer.BadParameter if it has none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Costs)
    except (OSError, msgspec.MsgspecError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None


if __name__ == "__main__":
    typer.run(main)

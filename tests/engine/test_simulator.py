"""The simulator: what can be worked out by hand, and that it does what an engine does whose calls take as long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.baseline_policies import ALL_POLICIES, configured, use
from benchmarks.painted_trace import run
from benchmarks.simulator import Costs, isolated_times, loaded, replay
from benchmarks.trace import Recorded, at_poisson_times, load, mixed, save
from benchmarks.validate_simulator import compare, fit
from diffserve.engine.image.task import RowLabel, TickTrace, UNetCall
from diffserve.settings.config import EngineConfig
from tests.engine.conftest import MakeEngine

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE = (64, 64)
CALLS = {
    "64x64": {rows: 1.0 + 0.25 * rows for rows in range(1, 17)},
    "64x96": {rows: 1.5 * rows for rows in (2, 4, 8)},
}
COSTS = Costs(calls=CALLS, prepare_s=0.0, decode_s=0.5, tick_s=0.0)


def make_request(arrival_s: float, num_steps: int = 4, **fields: Any) -> Recorded:
    request = Recorded(
        arrival_s=arrival_s, num_steps=num_steps, sampler="ddim", guidance_scale=5.0, width_px=64, height_px=64
    )
    return msgspec.structs.replace(request, **fields)


@pytest.mark.parametrize("policy", [name for name in ALL_POLICIES if name != "static"])
def test_a_request_alone_takes_its_isolated_time(policy: str) -> None:
    costs = msgspec.structs.replace(COSTS, prepare_s=0.125, tick_s=0.0625)
    config = EngineConfig(policy=configured(policy))
    [served] = replay([make_request(3.0)], costs, config, policy=policy).served
    [solo_s] = isolated_times([make_request(3.0)], costs, config)
    assert solo_s == 4 * (1.5 + 0.0625) + 0.125 + 0.5
    assert served.latency_s == pytest.approx(solo_s + 0.0625), "texts are read in a tick of their own"


def test_serial_is_a_queue_before_one_server() -> None:
    """Lindley's recursion: one begins when it is there and the last is over."""
    trace = at_poisson_times(mixed(60, [SIZE], seed=3), 0.02, seed=4)
    config = EngineConfig()
    outcome = replay(trace, COSTS, config, policy="serial")
    over_s = 0.0
    for request, solo_s, served in zip(trace, isolated_times(trace, COSTS, config), outcome.served, strict=True):
        over_s = max(over_s, request.arrival_s) + solo_s
        assert served.latency_s == pytest.approx(over_s - request.arrival_s)
    assert outcome.utilisation == pytest.approx(sum(request.solo_s for request in outcome.served) / over_s)


def test_two_who_come_together_share_calls_on_one_engine_and_none_on_two() -> None:
    """The second comes while the texts of the first are read; rows wait while its own are, and all are shared."""
    trace, costs = [make_request(0.0), make_request(0.0, seed=1)], msgspec.structs.replace(COSTS, prepare_s=0.125)
    shared = replay(trace, costs, EngineConfig()).served
    assert [request.latency_s for request in shared] == [2 * 0.125 + 4 * 2.0 + 2 * 0.5] * 2
    apart = replay(trace, costs, EngineConfig(), num_engines=2).served
    assert [request.latency_s for request in apart] == [0.125 + 4 * 1.5 + 0.5] * 2


def test_the_router_sends_to_the_engine_with_the_least_work_left() -> None:
    trace = [make_request(0.0, num_steps=40), make_request(0.0, num_steps=2), make_request(10.0, num_steps=2)]
    served = replay(trace, COSTS, EngineConfig(), num_engines=2).served
    assert served[2].latency_s == served[1].latency_s, "the engine of the second is empty again"


def test_more_engines_keep_pace_with_as_much_more_to_do() -> None:
    trace = loaded(mixed(400, [SIZE], seed=1), COSTS, 0.8, engines=10, seed=1)
    many, few = (replay(trace, COSTS, EngineConfig(), num_engines=number) for number in (10, 9))
    assert 0.7 < many.utilisation <= 1.0
    assert few.summary(3.0)["mean_s"] > many.summary(3.0)["mean_s"]


def test_a_size_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the costs say nothing of \[\(96, 64\)\]; they know 64x64, 64x96"):
        replay([make_request(0.0, width_px=96)], COSTS, EngineConfig())


def test_a_trace_comes_back_from_its_file_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = at_poisson_times(mixed(20, [SIZE], seed=1), 1.0, seed=2)
    save(trace, path)
    assert load(path) == trace
    path.write_bytes(path.read_bytes() + b'{"arrival_s": "soon"}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl, line 21: Expected `float`"):
        load(path)


def test_costs_are_found_again_in_ticks() -> None:
    ticks = []
    for number in range(60):
        num_rows, prepared, decoded = (2, 4, 8)[number % 3], number % 4, number % 5 // 2
        call = UNetCall((RowLabel("a", 0, 0, "cond"),) * num_rows, 0, 0.0)
        wall_s = COSTS.calls["64x64"][num_rows] + 0.25 * prepared + 0.5 * decoded
        ticks.append(TickTrace(tick=number, calls=(call,), num_prepared=prepared, num_decoded=decoded, wall_s=wall_s))
    fitted_costs = fit(ticks, "64x64", COSTS)
    assert (fitted_costs.prepare_s, fitted_costs.decode_s) == pytest.approx((0.25, 0.5))
    assert fitted_costs.calls["64x64"] == pytest.approx(COSTS.calls["64x64"])


class HandClock:
    """A clock that advances only when a test advances it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def skip_to(self, until_s: float) -> None:
        self.now_s = max(self.now_s, until_s)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["latency", "throughput", "goodput", "serial", "same-key"])
def test_an_engine_whose_calls_take_what_the_costs_say_does_what_the_simulator_says(
    policy: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real ticks on real tensors, on a clock that UNet calls, decoding and newcomers move."""
    clock = HandClock()
    costs = msgspec.structs.replace(COSTS, prepare_s=0.125)
    config = EngineConfig(policy=configured(policy), max_rows=8)
    engine = make_engine(
        clock=clock, policy=config.policy, max_rows=8, deterministic=False, trace_ticks=10_000, cache_dir=""
    )
    use(engine.scheduler, policy)
    predict, decode, prepare = (
        engine.model.unet.predict,
        engine.model.vae.decode_later,
        engine.runners._preparer.prepare,
    )

    def slow_predict(x: Any, *args: Any, **kwargs: Any) -> Any:
        clock.now_s += costs.calls["64x64"][len(x)]
        return predict(x, *args, **kwargs)

    def slow_decode(*args: Any) -> Any:
        clock.now_s += costs.decode_s
        return decode(*args)

    def slow_prepare(*args: Any) -> Any:
        clock.now_s += costs.prepare_s
        return prepare(*args)

    trace = [
        msgspec.structs.replace(request, num_steps=min(request.num_steps, 8))
        for request in loaded(mixed(16, [SIZE], seed=5), costs, 0.8, seed=6)
    ]
    engine.warm_up()
    monkeypatch.setattr(engine.model.unet, "predict", slow_predict)
    monkeypatch.setattr(engine.model.vae, "decode_later", slow_decode)
    monkeypatch.setattr(engine.runners._preparer, "prepare", slow_prepare)
    for num_rows in range(1, 17):
        engine.runners.groups.facts_of(next(iter(engine.buckets))).curve._seconds[num_rows] = costs.calls["64x64"][
            num_rows
        ]
    real, _, _ = run(engine, clock, trace)
    assert [request.latency_s for request in real] == pytest.approx(
        [request.latency_s for request in replay(real, costs, config, policy=policy).served]
    )
    assert set(compare(real, costs, config, policy)["relative_error"].values()) == {0.0}


@pytest.mark.slow
def test_the_command_simulates_what_it_is_given(tmp_path: Path) -> None:
    costs, trace, out = tmp_path / "costs.json", tmp_path / "trace.jsonl", tmp_path / "out.json"
    costs.write_bytes(msgspec.json.encode(COSTS))
    save([make_request(0.0), make_request(1.0)], trace)
    command = [sys.executable, str(ROOT / "benchmarks" / "simulator.py"), "--costs", str(costs), "--out", str(out)]
    options = ["--trace", str(trace), "--policy", "latency,serial"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written == json.loads(done.stdout.splitlines()[-1])
    assert [point["policy"] for point in written["points"]] == ["latency", "serial"]
    assert written["points"][0]["requests"] == 2

"""The goodput benchmark's parts that are not time, and one small run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.bench_goodput import LEAST_REQUESTS, kind_of, num_requests, point_of, rows_of
from benchmarks.painted_trace import PaintedTrace, WallTime
from benchmarks.trace import Recorded, load
from tests.benches import run_bench
from tests.tiny_models import ONE_LEVEL

ONE = Recorded(arrival_s=0.0, num_steps=20, sampler="ddim", guidance_scale=7.5, width_px=64, height_px=64)
PLAIN = msgspec.structs.replace(ONE, num_steps=4, guidance_scale=1.0)


def painted(*latencies: float, digests: str = "ab") -> PaintedTrace:
    served = [
        msgspec.structs.replace(request, latency_s=latency_s)
        for request, latency_s in zip((ONE, PLAIN), latencies, strict=True)
    ]
    return PaintedTrace(served, [], list(digests))


def test_good_is_within_the_slo_of_its_kind_and_rounds_are_taken_together() -> None:
    alone = {kind_of(ONE): 1.0, kind_of(PLAIN): 0.1}
    rounds = [
        {"serial": painted(2.0, 2.0), "goodput": painted(2.9, 0.2)},
        {"serial": painted(4.0, 0.2), "goodput": painted(3.1, 0.2, digests="aX")},
    ]
    point = point_of(0.95, rounds, alone, 3.0)
    assert point["goodput_of_rounds"] == {"serial": [0.5, 0.5], "goodput": [1.0, 0.5]}
    assert (point["ours"], point["ours_over"]["serial"]["goodput"]) == ("goodput", 1.5)
    assert point["pictures_equal_in_all_arms"] == "3 of 4"


def test_as_many_requests_as_there_is_time_for() -> None:
    assert (rows_of(ONE), rows_of(PLAIN)) == (40, 4)
    assert num_requests(600.0, runs=4, num_arms=3, capacity=2.0, alone_s=1.0) == 60
    assert num_requests(1.0, runs=4, num_arms=3, capacity=2.0, alone_s=1.0) == LEAST_REQUESTS


def test_a_clock_that_is_put_forward_never_goes_back() -> None:
    clock = WallTime()
    later = clock() + 1000.0
    clock.skip_to(later)
    clock.skip_to(later - 500.0)
    assert later <= clock() < later + 100.0


@pytest.mark.slow
def test_a_small_run_paints_the_same_pictures_under_every_policy(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    options = ["--model", tiny_model(ONE_LEVEL), "--dtype", "float32", "--device", "cpu", "--minutes", 0.05]
    options += ["--loads", 0.9, "--rounds", 1, "--capacity-s", 0.2, "--divisor", 4]
    document = run_bench("bench_goodput", *options, out=tmp_path / "goodput.json")
    [point] = document["points"]
    count = document["settings"]["requests_of_a_trace"]
    assert {name: arm["requests"] for name, arm in point["arms"].items()} == dict.fromkeys(
        ("serial", "same-key", "goodput"), count
    )
    assert point["pictures_equal_in_all_arms"] == f"{count} of {count}"
    assert point["sample_equal_alone"] == "3 of 3"
    assert len(load(tmp_path / "goodput-trace-0.9-0.jsonl")) == count

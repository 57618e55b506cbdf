"""How many engines for a load: what can be worked out by hand, and the page as committed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.capacity import FIGURES, LAUNCH_S, REACHED, ROWS, gpu_costs, pool
from benchmarks.capacity_page import PAGE, engines_for, front_ms, page
from benchmarks.simulator import Costs
from diffserve.runtime.roofline import find_gpu
from tests.benches import run_bench

ARM = {
    "pools": [
        {"engines": 1, "per_s": 0.0},
        {"engines": 4, "per_s": 2.0},
        {"engines": 16, "per_s": 16.0},
    ]
}
COSTS = Costs(calls={"64x64": {1: 0.01, 2: 0.015, 4: 0.02}}, prepare_s=0.0, decode_s=0.01, tick_s=0.0)


def test_the_page_is_what_the_committed_figures_give() -> None:
    document = json.loads(FIGURES.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(document), "run: python benchmarks/capacity.py --page-only"
    assert "No GPU has been measured" in PAGE.read_text(encoding="utf-8")


def test_engines_for_a_load_are_of_the_largest_pool_that_is_needed() -> None:
    assert engines_for(ARM, 0.1) == (4, 0.5), "fewer do not keep the SLO, however small the load"
    assert engines_for(ARM, 4.0) == (8, 0.5)
    assert engines_for(ARM, 8.0) == (16, 0.5)
    assert engines_for(ARM, 16.0) == (16, 1.0)
    assert engines_for(ARM, 1000.0) == (1000, 1.0)
    assert engines_for({"pools": [{"engines": 1, "per_s": 0.0}]}, 1.0) is None


def test_the_front_takes_by_pixels_what_was_not_measured() -> None:
    assert front_ms(512 * 512) == 54.0
    assert front_ms(1024 * 1024) == 216.0


def test_a_pool_bears_more_under_a_looser_slo_and_nothing_under_one_that_cannot_be_kept() -> None:
    tight, loose = (pool(COSTS, 2, slo_s, 60) for slo_s in (0.7, 60.0))
    assert loose["load"] == 0.95
    assert tight["load"] is None or tight["load"] < loose["load"]
    assert loose["per_s"] == 0.95 * loose["full_per_s"]
    assert pool(COSTS, 1, 0.001, 50)["per_s"] == 0.0


@pytest.mark.slow
def test_what_a_gpu_takes_is_its_roofline_and_no_less_than_its_launches() -> None:
    small, large = (gpu_costs("tiny-random", find_gpu(name)) for name in ("h200", "t4"))
    [calls] = small.calls.values()
    assert tuple(calls) == ROWS
    assert len(set(calls.values())) == 1, "of a tiny model the launches are all that counts"
    assert calls[1] % LAUNCH_S < 1e-9 or math.isclose(calls[1] % LAUNCH_S, LAUNCH_S)
    assert large.decode_s >= small.decode_s
    assert 0 < REACHED <= 1


def test_a_small_case_says_what_it_is(tmp_path: Path) -> None:
    options = ("--arms", "embedded", "--engines", "1,2", "--requests", 20, "--commits", 3)
    found = run_bench("capacity", *options, out=tmp_path / "capacity.json")
    [arm] = found["arms"]
    assert (arm["derived"], [one["engines"] for one in arm["pools"]]) == (False, [1, 2])
    assert found["front"]["commit_ms"] > 0
    told = page(found)
    assert "| embedded 128x128, two CPU cores | measured |" in told
    assert "from the roofline, no GPU was measured" in found["note"]

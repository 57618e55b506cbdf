"""How many engines a load needs: what can be worked out by hand, predicted figures with their ranges, and the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks.capacity import (
    EXPECTED,
    FAST,
    FIGURES,
    ROWS,
    SLOW,
    SUITE,
    SUITE_ROWS,
    assumptions,
    gpu_costs,
    measured_launches_s,
    pool,
    predicted_ranges,
)
from benchmarks.capacity_page import PAGE, engines_for, front_ms, page
from benchmarks.simulator import Costs
from diffserve.runtime.dry_run import find_gpu
from tests.benches import run_bench

ARM = {
    "pools": [
        {"engines": 1, "per_s": 0.0},
        {"engines": 4, "per_s": 2.0},
        {"engines": 16, "per_s": 16.0},
    ]
}
COSTS = Costs(calls={"64x64": {1: 0.01, 2: 0.015, 4: 0.02}}, prepare_s=0.0, decode_s=0.01, tick_s=0.0)
RANGE = re.compile(r"[\d.,]+ \([\d.,]+ to [\d.,]+\)")


def test_the_page_is_what_the_committed_figures_give() -> None:
    document = json.loads(FIGURES.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(document), "run: python benchmarks/capacity.py --page-only"


def test_predicted_figures_are_marked_and_have_a_range_and_only_the_h200_is_marked_as_measured() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| SD")]
    with_kind = [row for row in rows if "| predicted |" in row]
    measured = [row for row in rows if "| measured |" in row]
    front = [row for row in rows if row not in with_kind + measured and "H200" not in row]
    assert len(with_kind) >= 4 * 6
    assert len(measured) >= 2 * 6
    assert len(front) == 4
    assert all("H200" in row and not RANGE.search(row) for row in measured)
    assert sum("H200" in row for row in with_kind) == 2, "the prediction of each measured model"
    fixed = {"SLO": r"^\d+ s$", "engines of a pool": r"^\d+$", "load": r"^0\.\d\d$"}
    for row in with_kind:
        cells = [cell.strip() for cell in row.strip("|").split("|")][2:]
        bare = [cell for cell in cells if not RANGE.fullmatch(cell)]
        assert all(any(re.match(pattern, cell) for pattern in fixed.values()) for cell in bare), row
        assert len(bare) <= len(fixed), row
    assert all(RANGE.search(row) for row in front)


def test_measured_calls_are_those_of_the_cost_curves_of_the_gpu_suite() -> None:
    arms = {arm["name"]: arm for arm in json.loads(FIGURES.read_text(encoding="utf-8"))["arms"]}
    rows = json.loads(SUITE.read_text(encoding="utf-8"))["rows"]
    for name, row in SUITE_ROWS.items():
        curve = rows[row]["points"]["curve"]["result"]["points"]
        expected = {str(point["rows"]): point["ms_per_row"] for point in curve if point["rows"] in ROWS}
        assert arms[name]["row_ms"] == pytest.approx(expected, abs=1e-3)


def test_what_the_h200_measured_is_within_the_range_of_its_prediction() -> None:
    arms = json.loads(FIGURES.read_text(encoding="utf-8"))["arms"]
    checked = [arm for arm in arms if "prediction" in arm]
    assert len(checked) == 2
    for arm in checked:
        ranges = arm["prediction"]["predicted"]
        for rows in ("2", "4", "8", "16"):
            low, high = ranges["row_ms"][rows]
            # Two rows of SDXL took 8% less than the shortest launch time of the embedded model predicts.
            assert 0.9 * low < arm["row_ms"][rows] < high, (arm["name"], rows)
        assert ranges["decode_ms"][0] < arm["decode_ms"] < ranges["decode_ms"][1]


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
def test_a_call_takes_its_roofline_and_no_less_than_its_launches() -> None:
    small, large = (gpu_costs("tiny-random", find_gpu(name)) for name in ("h200", "t4"))
    [calls] = small.calls.values()
    assert tuple(calls) == ROWS
    assert len(set(calls.values())) == 1, "launches are all that takes time in a tiny model"
    kernels = calls[1] / EXPECTED.launch_s
    assert math.isclose(kernels, round(kernels))
    assert large.decode_s >= small.decode_s
    [slower] = gpu_costs("tiny-random", find_gpu("h200"), EXPECTED._replace(launch_s=9e-6)).calls.values()
    assert math.isclose(slower[1], kernels * 9e-6)


@pytest.mark.slow
def test_a_decoder_is_predicted_by_its_own_share_of_the_roofline() -> None:
    expected, faster = (
        gpu_costs("sd15-random", find_gpu("h100"), EXPECTED._replace(decode_reached=share)) for share in (0.1, 0.2)
    )
    assert math.isclose(expected.decode_s, 2 * faster.decode_s)
    assert expected.calls == faster.calls


@pytest.mark.slow
def test_a_predicted_range_contains_the_expected_figure_and_is_that_of_the_measured_launch_times() -> None:
    assumed = predicted_ranges("tiny-random", find_gpu("h100"), [])
    low, high = assumed["row_ms"][1]
    assert math.isclose(high / low, SLOW.launch_s / FAST.launch_s)
    assert assumed["rate"][0] < 1.0 < assumed["rate"][1]
    measured = predicted_ranges("tiny-random", find_gpu("h100"), [6e-6, 8e-6, 9e-6])
    assert math.isclose(measured["row_ms"][1][1] / measured["row_ms"][1][0], 9 / 6)


def test_launch_times_are_those_of_all_results_of_a_gpu(tmp_path: Path) -> None:
    assert measured_launches_s(tmp_path) == []
    assert assumptions([]) == (SLOW, EXPECTED, FAST)
    for name, device, launch_us in (("old", "cuda", 9.0), ("new", "cuda", 5.5), ("dry", "cpu", 400.0)):
        point = {"result": {"network_launch_us": launch_us, "launch_us": 1.0}}
        document = {"device": device, "rows": {"start": {"points": {"machine": point}}}}
        (tmp_path / f"gpu-suite-{name}.json").write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "gpu-suite-failed.json").write_text(json.dumps({"device": "cuda"}))
    launches_s = measured_launches_s(tmp_path)
    assert launches_s == pytest.approx([5.5e-6, 9e-6])
    slow, expected, fast = assumptions(launches_s)
    assert (slow.launch_s, expected.launch_s, fast.launch_s) == pytest.approx((9e-6, 7.25e-6, 5.5e-6))
    assert (slow.reached, fast.reached) == (SLOW.reached, FAST.reached)


def test_a_small_case_says_what_it_is(tmp_path: Path) -> None:
    options = ("--arms", "embedded", "--engines", "1,2", "--requests", 20, "--commits", 3, "--launch-us", 7.5)
    document = run_bench("capacity", *options, out=tmp_path / "capacity.json")
    [arm] = document["arms"]
    assert (arm["predicted"], [entry["engines"] for entry in arm["pools"]]) == (None, [1, 2])
    assert document["front"]["commit_ms"] > 0
    assert {each["launch_us"] for each in document["assumptions"].values()} == {7.5}
    html = page(document)
    assert "| embedded 128x128, two CPU cores | measured |" in html
    assert "7.5 microseconds, measured on a GPU" in html

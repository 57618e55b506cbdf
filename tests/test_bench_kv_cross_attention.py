"""The cross-attention benchmark's parts that are not time, and one small run of all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_kv_cross_attention import in_turn, ratio
from tests.benches import run_bench


def test_arms_take_turns_at_going_first() -> None:
    order: list[str] = []
    seconds = in_turn({"plain": lambda: order.append("plain"), "paged": lambda: order.append("paged")}, 3)
    assert order == ["plain", "paged", "plain", "paged", "paged", "plain", "plain", "paged"]
    assert {name: len(times) for name, times in seconds.items()} == {"plain": 3, "paged": 3}


def test_a_ratio_can_be_worded_in_three_ways() -> None:
    seconds = {"paged": [1.0, 4.0, 3.0], "plain": [2.0, 2.0, 4.0]}
    assert ratio(seconds, "paged", "plain") == {"of_medians": 1.5, "of_least": 0.5, "median_of_pairs": 0.75}


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tmp_path: Path) -> None:
    options = ["--model", "tiny-random", "--device", "cpu", "--rows", 2, "--rounds", 2]
    written = run_bench("bench_kv_cross_attention", *options, out=tmp_path / "found.json")
    assert written["command"].startswith("python benchmarks/bench_kv_cross_attention.py --model tiny-random")
    assert written["unet_step"][0]["max_difference"] < 0.05
    assert {"unet", "text1"} == written["tenants"].keys()

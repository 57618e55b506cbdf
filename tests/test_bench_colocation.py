"""The colocation benchmark's parts that are not time, and one small run of all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bench_colocation import Window, compare
from tests.benches import run_bench
from tests.engine.combined.talker import save_talker


def rounds(*, token_s: float, tpot_s: float, num_rows: int) -> list[dict[str, Window]]:
    """Alone: 10 ms a token, 100 rows in a second; together as given."""
    alone = {
        "rewrites": Window(1.0, [0.01, 0.01, 0.2], [0.01], num_rewrites=1),
        "pictures": Window(1.0, num_rows=100, num_steps=10),
    }
    return [{**alone, "both": Window(1.0, [token_s, token_s, 9.0], [tpot_s], num_rewrites=1, num_rows=num_rows)}] * 3


def test_ratios_are_of_medians_within_a_round() -> None:
    comparison = compare(rounds(token_s=0.02, tpot_s=0.04, num_rows=75))
    assert comparison["token_p50_ratio"]["median"] == pytest.approx(2.0)
    assert comparison["tpot_p50_ratio"]["median"] == pytest.approx(4.0)
    assert comparison["unet_rows_kept"]["median"] == pytest.approx(0.75)
    assert list(comparison["goals"].values()) == [True, False, True]


@pytest.mark.parametrize(("token_s", "num_rows", "goals"), [(0.031, 75, (False, True)), (0.02, 69, (True, False))])
def test_a_missed_goal_is_reported(token_s: float, num_rows: int, goals: tuple[bool, bool]) -> None:
    met = list(compare(rounds(token_s=token_s, tpot_s=0.01, num_rows=num_rows))["goals"].values())
    assert (met[0], met[2]) == goals


def test_a_window_tells_milliseconds_and_rates() -> None:
    summary = Window(2.0, [0.01, 0.02, 0.06], [0.03], num_rewrites=4, num_rows=50, num_steps=5, busy_s=1.0).results()
    assert summary["rows_per_s"] == 25.0
    assert summary["tokens_per_s"] == 1.5
    assert summary["rewrites_per_s"] == 2.0
    assert (summary["token_p50_ms"], summary["token_mean_ms"], summary["tpot_p50_ms"]) == (20.0, 30.0, 30.0)


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tmp_path: Path) -> None:
    talker = save_talker(tmp_path / "talker", "fox")
    options = ["--model", "tiny-random", "--rewriter", talker, "--clock", "cpu", "--num-steps", 4]
    few = ["--rounds", 1, "--seconds", 0.3, "--settle", 0.1, "--pictures", 2, "--rewrites", 2]
    written = run_bench("bench_colocation", *options, *few, out=tmp_path / "found.json")
    assert written["command"].startswith("python benchmarks/bench_colocation.py --model tiny-random")
    assert str(tmp_path) not in json.dumps(written)
    (point,) = written["points"]
    assert [set(round_result) for round_result in point["rounds"]] == [{"rewrites", "pictures", "both"}]
    assert all(
        round_result["both"]["tokens_per_s"] > 0 < round_result["both"]["rows_per_s"]
        for round_result in point["rounds"]
    )

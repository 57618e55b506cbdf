"""The benchmark of the semantic cache: its cases, and one small run of all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_latent_cache import RELATIVES, cases
from tests.benches import run_bench


def test_a_relative_differs_from_its_caption_in_what_its_name_says() -> None:
    case_list = cases(6)
    assert [case.relation for case in case_list] == [*RELATIVES, *RELATIVES]
    assert case_list[:3] == cases(3)
    assert all(case.relative != case.prompt for case in case_list if case.relation != "other words")


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tmp_path: Path) -> None:
    written = run_bench("bench_latent_cache", "--prompts", 1, "--thresholds", 0.5, out=tmp_path / "found.json")
    threshold_results = written["thresholds"]["0.5"]
    assert threshold_results["all"]["pictures"] == threshold_results["all"]["begun"] == 1
    assert list(threshold_results["by_steps_left_out"]) != ["0"]

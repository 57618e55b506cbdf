"""The benchmark of split guidance: one small run of all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benches import run_bench


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tmp_path: Path) -> None:
    options = ["--model", "tiny-random", "--side-px", 64, "--pairs", 1, "--steps", 3, "--dtype", "float32"]
    written = run_bench("bench_split_guidance", *options, out=tmp_path / "split.json")
    assert written["same_bytes"] == [1, 1]
    assert written["first_bytes"] > written["later_bytes"] > 0

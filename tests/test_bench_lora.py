"""The LoRA benchmark: one small run of all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benches import run_bench


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_small_run_writes_what_it_prints(is_whole: bool, tmp_path: Path) -> None:
    options = ["--model", "tiny-random", "--side-px", 64, "--pairs", 1, "--rows", 4, "--rank", 4, "--steps", 2]
    options += [] if is_whole else ["--calls-alone"]
    written = run_bench("bench_lora", *options, "--layers", "everything", "--dtype", "float32", out=tmp_path / "l.json")
    assert written["same_bytes_as_alone"] == [4, 4]
    assert written["padded_rank"] == 16
    assert set(written["ms_per_row"]) == {"plain", "loras"}
    assert ("calls" in written, "stacked_bytes" in written) == (is_whole, not is_whole)
    assert all(sum(calls.values()) >= 2 for calls in written.get("calls", {}).values())

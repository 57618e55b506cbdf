"""The benchmark of pruning: one small run of all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benches import run_bench
from tests.tiny_models import EMBEDDED


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--model", tiny_model(EMBEDDED), "--prompts", 1, "--cuts", "0.5:0.5", "--steps", 2, "--dtype", "float32"]
    written = run_bench("bench_pruning", *options, out=tmp_path / "found.json")
    original, pruned = written["models"]["whole"], written["models"]["0.5:0.5"]
    assert all(pruned[name] < original[name] for name in ("parameters", "unet_bytes", "flops_a_row"))
    assert original["psnr_db"] is None
    assert pruned["psnr_db"]["value"] < 60

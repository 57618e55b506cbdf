"""The benchmark of pruning: one small run of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tmp_path: Path) -> None:
    script, out = ROOT / "benchmarks" / "bench_pruning.py", tmp_path / "found.json"
    options = ["--prompts", "1", "--cuts", "0.5:0.5", "--steps", "2", "--out", str(out)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written == json.loads(done.stdout.splitlines()[-1])
    whole, pruned = written["models"]["whole"], written["models"]["0.5:0.5"]
    assert all(pruned[name] < whole[name] for name in ("parameters", "unet_bytes", "flops_a_row"))
    assert whole["psnr_db"] is None
    assert pruned["psnr_db"]["value"] < 60

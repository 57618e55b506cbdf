"""The benchmark of the semantic cache: its cases, and one small run of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_latent_cache import RELATIVES, cases

ROOT = Path(__file__).resolve().parent.parent


def test_a_relative_differs_from_its_caption_in_what_its_name_says() -> None:
    found = cases(6)
    assert [case.relation for case in found] == [*RELATIVES, *RELATIVES]
    assert found[:3] == cases(3)
    assert all(case.relative != case.prompt for case in found if case.relation != "other words")


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tmp_path: Path) -> None:
    script, out = ROOT / "benchmarks" / "bench_latent_cache.py", tmp_path / "found.json"
    options = ["--prompts", "1", "--thresholds", "0.5", "--out", str(out)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written == json.loads(done.stdout.splitlines()[-1])
    found = written["thresholds"]["0.5"]
    assert found["all"]["pictures"] == found["all"]["begun"] == 1
    assert list(found["by_steps_left_out"]) != ["0"]

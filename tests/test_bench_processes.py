"""One small run of the processes benchmark: whichever engine of an arm paints a picture, its bytes are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import ONE_LEVEL

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_a_small_run_redistributes_requests_and_generates_the_same_images(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    options = ["--model", str(tiny_model(ONE_LEVEL)), "--rounds", "2", "--requests", "3", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_processes.py", *options, "--cores", "2", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document == json.loads(done.stdout.splitlines()[-1])
    assert document["pictures_equal_in_all_rounds"] == {"one": "4 of 4", "many": "4 of 4"}
    assert {name: len(each) for name, each in document["engines"].items()} == {"one": 1, "many": 2}
    assert document["many_over_one"]["pictures_per_s"]["median"] > 0

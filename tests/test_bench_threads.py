"""The threads benchmark's parts that are not time, and one small run of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.bench_threads import burning, ratio
from tests.tiny_models import ONE_LEVEL

ROOT = Path(__file__).resolve().parent.parent


def test_a_ratio_is_the_median_of_pairs_with_the_better_arm() -> None:
    turns = [{"one": {"s": 2.0}, "all": {"s": 9.0}, "auto": {"s": auto}} for auto in (2.0, 2.2, 9.0)]
    assert ratio(turns, "auto", ("one", "all")) == 1.1


def test_neighbours_end_with_the_block() -> None:
    before = set(children())
    with burning(2):
        assert len(set(children()) - before) == 2
    assert set(children()) <= before


def children() -> list[str]:
    """Process numbers of this process's children."""
    return Path("/proc/self/task").joinpath(str(Path("/proc/self").resolve().name), "children").read_text().split()


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    script, out = ROOT / "benchmarks" / "bench_threads.py", tmp_path / "found.json"
    options = [
        "--model",
        str(tiny_model(ONE_LEVEL)),
        "--loads",
        "0",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--out",
        str(out),
    ]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written == json.loads(done.stdout.splitlines()[-1])
    assert written["points"][0]["s"].keys() == {"one", "all", "auto", "today"}

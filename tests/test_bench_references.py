"""The benchmark of reference images: one small run of all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benches import run_bench


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["base", "plus"])
def test_a_small_run_writes_what_it_prints(kind: str, tmp_path: Path) -> None:
    options = ["--model", "tiny-random", "--side-px", 64, "--pairs", 1, "--rows", 4, "--steps", 2, "--kind", kind]
    options += ["--calls", 2]
    written = run_bench("bench_references", *options, "--dtype", "float32", out=tmp_path / "references.json")
    assert written["same_bytes_as_alone"] == [4, 4]
    assert written["num_tokens"] == {"base": 4, "plus": 16}[kind]
    assert set(written["ms_per_row"]) == {"plain", "references"}
    assert all(sum(calls.values()) >= 2 for calls in written["calls"].values())
    figures = (written, written["call"])
    assert all(document["references_over_plain"]["median"] > 0.0 for document in figures)
    assert written["call"]["references_over_plain_cpu_time"]["median"] > 0.0

"""The edge profile keeps its word: every process together below 1 GB, and nothing grows from picture to picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_edge import ARMS, GOAL_BYTES, measure


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="asks Linux")
def test_edge_is_below_a_gigabyte_with_everything_and_does_not_grow() -> None:
    measurement = measure(ARMS["edge"], num_pictures=8, fields={"num_inference_steps": 2})
    assert 200e6 < measurement["resident_bytes"] < GOAL_BYTES
    assert measurement["proportional_bytes"] <= measurement["resident_bytes"]
    assert measurement["growth_bytes"] < 40e6, "five pictures that each leave what their decoding takes would be more"
    assert len(measurement["seconds"]) == 8

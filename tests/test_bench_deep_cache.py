"""The DeepCache benchmark: both arms paint the same, and one small run of all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.bench_deep_cache import requests
from tests.benches import run_bench


def test_arms_differ_in_the_interval_alone() -> None:
    off, cached = requests(4, 6, 64, 1, 2), requests(4, 6, 64, 3, 2)
    for image, other in zip(off, cached, strict=True):
        assert replace(other.diffusion, cache_interval=1) == image.diffusion
        assert replace(other, request_id="", diffusion=image.diffusion) == replace(image, request_id="")
    assert len({request.diffusion for request in off}) == 4


@pytest.mark.slow
def test_a_small_run_writes_what_it_prints(tmp_path: Path) -> None:
    options = ["--model", "tiny-random", "--side-px", 64, "--pairs", 1, "--prompts", 0]
    written = run_bench("bench_deep_cache", *options, out=tmp_path / "found.json")
    assert written["speed"]["rows"] == {"off": {"full": 26}, "cached": {"full": 10, "shallow": 16}}
    assert written["same_bytes_in_reverse_order"] == [2, 2]

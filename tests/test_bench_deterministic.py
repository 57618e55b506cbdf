"""The benchmark of deterministic calls: every arm has its turns, and the one that promises bytes keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.bench_deterministic import main, requests


def test_rounds_differ_in_seeds_alone() -> None:
    first, second = requests(2, 3, 64, 1), requests(2, 3, 64, 2)
    assert [request.seed for request in first] == [100, 101]
    assert [request.seed for request in second] == [200, 201]
    assert {request.diffusion for request in (*first, *second)} == {first[0].diffusion}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of diffusers, which is imported here
def test_a_small_run_writes_what_it_prints(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    main(model=str(tiny_model("sd15")), dtype="float32", side_px=64, steps=2, rounds=2, out=out)
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document == json.loads(capsys.readouterr().out)
    assert document["found"]["seconds"].keys() == {"deterministic", "free", "diffusers"}
    assert document["found"]["deterministic_over_diffusers"]["min"] > 0
    assert document["same_bytes_alone"]["deterministic"]

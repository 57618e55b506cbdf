"""The GPU's benchmarks, dry: every point is made on a CPU, and one that fails keeps no other from being made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_suite
from tests.benches import run_bench
from tests.tiny_models import ONE_LEVEL

POINTS = ["load", "warm-up", "D1 cost curve", "D4 +guidance", "D9 exactness", "D3 served", "D8 memory"]


@pytest.mark.slow
def test_the_dry_run_makes_every_point(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    options = ["--models", tiny_model(ONE_LEVEL), "--dtypes", "float32", "--device", "cpu", "--quick"]
    document = run_bench("gpu_suite", *options, out=tmp_path / "suite.json")
    points = {point["point"].partition(": ")[2]: point for point in document["points"]}
    assert [point.get("error") for point in document["points"]] == [None] * len(POINTS)
    assert list(points) == POINTS
    assert points["D9 exactness"]["found"]["bytes_equal_to_solo_run"] == 2
    assert points["D9 exactness"]["found"]["max_latent_error_against_diffusers"] < 1e-3
    served = points["D3 served"]["found"]
    assert served["images"] == 3
    assert 0.0 < served["p50_s"] <= served["p99_s"]
    assert [point["rows"] for point in points["D1 cost curve"]["found"]["points"]] == [1, 2]


@pytest.mark.slow
def test_a_precision_that_diffusers_has_not_is_measured_alone(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    suite = gpu_suite.Suite(tmp_path / "suite.json", 600.0, "cpu")
    gpu_suite.measure_alone(suite, str(tiny_model(ONE_LEVEL)), "cpu", "float32", quick=True)
    points = json.loads((tmp_path / "suite.json").read_text(encoding="utf-8"))["points"]
    assert [point["point"].partition(": ")[2] for point in points] == [
        "load", "warm-up", "D1 cost curve", "D3 served", "D8 memory",
    ]  # fmt: skip
    assert [point.get("error") for point in points] == [None] * 5


def test_without_a_gpu_nothing_is_measured_and_nothing_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError) as raised:
        gpu_suite.main(out=tmp_path / "suite.json")
    assert getattr(raised.value, "exit_code", None) == gpu_suite.NO_GPU
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_point_that_fails_is_kept_with_its_error_and_one_too_late_is_named(tmp_path: Path) -> None:
    suite = gpu_suite.Suite(tmp_path / "suite.json", 60.0, "cpu")

    def broken() -> Any:
        raise RuntimeError("an illegal memory access")

    assert suite.point("first", broken) is None
    assert suite.point("second", lambda: {"ms": 1.5}) == {"ms": 1.5}
    suite._until_s = 0.0
    assert suite.point("third", broken) is None
    kept = json.loads((tmp_path / "suite.json").read_text(encoding="utf-8"))
    assert "an illegal memory access" in kept["points"][0]["error"]
    assert kept["points"][1]["found"] == {"ms": 1.5}
    assert (kept["left_out"], suite.num_errors) == (["third"], 1)

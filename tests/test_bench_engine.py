"""The benchmark's parts that are not time: the ladder of workloads, the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report import summary
from benchmarks.workload import GUIDANCE, RUNGS, SAMPLERS, STEPS, batches, kinds, shuffled
from tests.benches import run_bench
from tests.tiny_models import ONE_LEVEL

SIZES = ((128, 128), (128, 192))


def test_each_rung_mixes_one_thing_more() -> None:
    variety = [
        [len({getattr(kind, field) for kind in kinds(rung, SIZES)}) for field in kinds(rung, SIZES)[0].__slots__]
        for rung in RUNGS
    ]
    assert variety == [
        [1, 1, 1, 1, 1],
        [len(STEPS), 1, 1, 1, 1],
        [len(STEPS), len(SAMPLERS), 1, 1, 1],
        [len(STEPS), len(SAMPLERS), len(GUIDANCE), 1, 1],
        [len(STEPS), len(SAMPLERS), len(GUIDANCE), 1, 2],
    ]


def test_a_round_is_repeatable_and_the_next_one_is_fresh() -> None:
    first = [[request.prompt for request in group] for group in batches("+steps", SIZES, copies=2, round_index=0)]
    again = [[request.prompt for request in group] for group in batches("+steps", SIZES, copies=2, round_index=0)]
    other = [[request.prompt for request in group] for group in batches("+steps", SIZES, copies=2, round_index=1)]
    assert first == again
    assert not {prompt for group in first for prompt in group} & {prompt for group in other for prompt in group}


def test_shuffling_loses_nobody() -> None:
    groups = batches("+guidance", SIZES, copies=3, round_index=0)
    mixed = shuffled(groups, 0)
    assert len(mixed) == 48
    assert {request.request_id for request in mixed} == {request.request_id for group in groups for request in group}


def test_a_summary_is_median_least_and_most() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


@pytest.mark.slow
def test_a_small_run_has_every_arm_and_ratios_of_pairs(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate = torch.compile

    def traced(function: Any, options: dict[str, Any], **kwargs: Any) -> Any:
        assert options == {"freezing": True}
        return translate(function, backend="eager", **kwargs)  # without the minute that Inductor's C++ takes

    monkeypatch.setattr(torch, "compile", traced)
    options = [
        "--model",
        tiny_model(ONE_LEVEL),
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--quick",
        "--divisor",
        10,
        "--max-rows",
        8,
    ]
    options += ["--rungs", "same", "--arms", "serial,serial-compiled,static,engine-eager"]
    document = run_bench("bench_engine", *options, out=tmp_path / "engine.json")
    [rung] = document["ladder"]
    assert rung["images_per_run"] == {"engine": 32, "serial": 16, "serial-compiled": 16, "static": 32}
    assert {name for name in rung if "_over_" in name} == {
        f"engine_over_{name}" for name in ("serial", "serial-compiled", "static")
    }
    assert document["settings"]["left_out"] == ["engine-eager"]  # nothing is compiled here
    assert document["exactness"]["bytes_equal_to_solo_run"] == document["exactness"]["images"] == 4
    assert document["exactness"]["max_latent_error_against_diffusers"] < 1e-3

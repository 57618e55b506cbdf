"""Sweeps with measures by networks: values, intervals, verdicts, and what a sweep with other measures does."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.engine import Engine
from diffserve.experiments.engine_generator import request_for
from diffserve.experiments.estimates import Measure
from diffserve.experiments.model_measures import load_measures
from diffserve.experiments.plan import SweepPlan
from diffserve.experiments.power import describe_power
from diffserve.experiments.run import SweepProgress, refuse_early, run_plan, sweep
from diffserve.experiments.store import PARTS
from diffserve.settings.config import EngineConfig
from tests.tiny_models import ONE_LEVEL, save_clip

PLAN = SweepPlan(
    samplers=("ddim", "ddpm"),
    steps=(2,),
    guidance=(3.0,),
    prompts=("a fox", "the red cat", "two apples"),
    num_seeds=3,
    reference_steps=4,
)


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Engine:
    return Engine.from_pretrained(tiny_model(ONE_LEVEL), dtype="float32", device="cpu", config=EngineConfig(max_rows=8))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def folder(tiny: Engine, clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a sweep with PickScore; return its folder."""
    folder = tmp_path_factory.mktemp("sweep")
    run_plan(tiny, PLAN, folder, folders={Measure.PICK_SCORE: clip})
    return folder


def test_a_measure_has_values_intervals_columns_and_verdicts(tiny: Engine, clip: Path, folder: Path) -> None:
    document = json.loads((folder / "report.json").read_bytes())
    assert document["measures"]["pick_score"].startswith(f"{clip.name}, weights ")
    score = load_measures({Measure.PICK_SCORE: clip}, "cpu").scores["pick_score"]
    for cell, summary in zip(PLAN.all_cells, document["cells"], strict=True):
        values = [
            score(PLAN.prompts[place[0]], tiny.generate(request_for(PLAN, cell, place))[0].pixels)
            for place in PLAN.places
        ]
        estimate = summary["measures"]["pick_score"]
        assert estimate["value"] == pytest.approx(sum(values) / len(values), abs=1e-4)
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
    [comparison] = [each for each in document["comparisons"] if each["measure"] == "pick_score"]
    assert comparison["num_pairs"] == 9
    assert comparison["wins"] + comparison["losses"] <= 9
    assert comparison["deviation"] > 0
    rows = list(csv.DictReader((folder / "cells.csv").read_text(encoding="utf-8").splitlines()))
    assert all(row["pick_score_low"] for row in rows)
    assert "PickScore" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_complete_sweep_repeats_nothing(tiny: Engine, clip: Path, folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in (folder / PARTS).glob("*.jsonl")}
    progress: list[SweepProgress] = []
    run_plan(tiny, PLAN, folder, progress.append, folders={Measure.PICK_SCORE: clip})
    assert progress[-1].num_rows == 0
    assert {file.name: file.read_bytes() for file in (folder / PARTS).glob("*.jsonl")} == before


def test_other_measures_need_another_folder(tiny: Engine, clip: Path, folder: Path, tmp_path: Path) -> None:
    changed = save_clip(tmp_path / "changed")
    (changed / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    for folders in ({}, {Measure.CLIP_SCORE: clip}, {Measure.PICK_SCORE: changed}):
        with pytest.raises(InvalidRequest, match="has a sweep with other measures; choose another folder"):
            run_plan(tiny, PLAN, folder, folders=folders)


def test_bad_weights_are_refused_before_anything_is_generated(tiny: Engine, tmp_path: Path) -> None:
    options: dict[str, Any] = {"samplers": ["ddim"], "steps": [2], "prompts": ["a fox"], "seeds": 1}
    with pytest.raises(InvalidRequest, match="clip_score needs weights, and there is no folder"):
        sweep(tiny, folder=tmp_path / "out", measures={"clip_score": tmp_path / "none"}, **options)
    with pytest.raises(InvalidRequest, match="clip_score cannot use"):
        sweep(tiny, folder=tmp_path / "out", measures={"clip_score": tmp_path}, **options)
    assert not list(tmp_path.iterdir())


def test_a_difference_of_a_measure_can_be_of_interest_with_its_weights_only(clip: Path, tmp_path: Path) -> None:
    plan = SweepPlan(samplers=("ddim", "ddpm"), steps=(2,), guidance=(3.0,), prompts=("a",), detect={"hps_v2": 0.01})
    refuse_early(plan, tmp_path / "out", {Measure.HPS_V2: clip})
    with pytest.raises(InvalidRequest, match="hps_v2 needs weights: pass --measures hps_v2=FOLDER"):
        refuse_early(plan, tmp_path / "out")
    comparison = ("ddpm 2 against ddim 2", Measure.HPS_V2)
    [sentence] = describe_power([(*comparison, None)], 64, 4, plan.detect)
    assert sentence == "ddpm 2 against ddim 2: the spread of HPSv2 is unknown; --previous DIR takes it from a report"
    [sentence] = describe_power([(*comparison, 0.02)], 64, 4, plan.detect)
    assert "detect a difference of 0.007" in sentence

"""Too few steps of a sampler are told, by what a sweep of the model measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from diffserve.api.errors import ModelLoadError
from diffserve.api.types import Picture
from diffserve.models.fewest_steps import FEWEST_STEPS_FILE, FewestSteps, read_fewest_steps
from diffserve.runtime.loading.family import BUILT_IN, EMBEDDED
from tests.engine.desk import INFO, admission, request

MEASURED = FewestSteps(digest="0" * 12, most=30, steps={"heun": 8, "dpmpp_2m": 4, "dpmpp_2m karras": 10, "lcm": None})
DOOR = admission(msgspec.structs.replace(INFO, fewest_steps=MEASURED))


def warnings_of(**fields: Any) -> tuple[str, ...]:
    return DOOR.admit(request(**fields), 0.0).warnings


def test_fewer_steps_than_the_sampler_was_measured_to_need_are_told() -> None:
    told = "7 steps of heun are few for this model: its pictures come out right from 8 on."
    assert warnings_of(sampler="Heun", num_steps=7) == (told,)
    assert warnings_of(sampler="heun", num_steps=8) == ()
    assert "1 step of heun is few" in warnings_of(sampler="heun", num_steps=1)[0]


def test_sampler_with_a_sigma_schedule_has_its_own_measure() -> None:
    assert warnings_of(sampler="dpmpp_2m", num_steps=5) == ()
    assert "5 steps of dpmpp_2m karras are few" in warnings_of(sampler="DPM++ 2M Karras", num_steps=5)[0]
    assert warnings_of(sampler="DPM++ 2M beta", num_steps=2) == ()


def test_sampler_that_never_painted_right_is_told_at_the_counts_that_were_tried() -> None:
    assert "up to 30 steps; take another" in warnings_of(sampler="lcm", num_steps=4)[0]
    assert warnings_of(sampler="lcm", num_steps=31) == ()


def test_nothing_is_told_of_a_picture_that_does_not_begin_as_noise() -> None:
    picture = Picture.from_array(np.zeros((64, 64, 3), dtype=np.uint8))
    assert warnings_of(sampler="heun", num_steps=7, init_image=picture, strength=0.5) == ()


def test_nothing_is_told_of_models_and_samplers_that_nobody_measured(tmp_path: Path) -> None:
    assert admission().admit(request(sampler="heun", num_steps=1), 0.0).warnings == ()
    assert warnings_of(sampler="plms", num_steps=1) == ()
    assert read_fewest_steps(tmp_path) is None


def test_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / FEWEST_STEPS_FILE).write_text('{"steps": 3}', encoding="utf-8")
    with pytest.raises(ModelLoadError, match=FEWEST_STEPS_FILE):
        read_fewest_steps(tmp_path)


def report(shares: dict[str, dict[int, float]]) -> dict[str, Any]:
    """The parts of a sweep's report.json that are read."""
    cells = [
        {
            "cell": {"sampler": name, "num_steps": count, "guidance_scale": 3.0, "is_reference": False},
            "measures": {"exact": {"value": value, "low": 0.0, "high": 1.0}},
        }
        for name, by in shares.items()
        for count, value in by.items()
    ]
    return {"model": {"digest": "0" * 12}, "cells": cells}


def test_enough_is_where_no_higher_count_falls_short_again(tmp_path: Path) -> None:
    from diffserve.training.fewest_steps import fewest_of, main

    shares = {
        "euler": {4: 0.95, 10: 0.96, 20: 1.0},
        "heun": {4: 0.95, 10: 0.5, 20: 0.9},
        "lcm": {4: 0.1, 10: 0.1, 20: 0.2},
    }
    found = fewest_of(report(shares))
    assert found == FewestSteps(digest="0" * 12, most=20, steps={"euler": 4, "heun": 20, "lcm": None})
    for part in ("euler", "heun"):
        (tmp_path / "report.json").write_text(json.dumps(report({part: shares[part]})), encoding="utf-8")
        main(tmp_path / "report.json", tmp_path)
    assert read_fewest_steps(tmp_path) == FewestSteps(digest="0" * 12, most=20, steps={"euler": 4, "heun": 20})


def test_shipped_model_was_measured() -> None:
    measured = read_fewest_steps(BUILT_IN[EMBEDDED])
    assert measured is not None
    assert measured.warning("plms", None, 4)
    assert measured.warning("dpmpp_2m", None, 25) is None

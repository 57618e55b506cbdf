"""Warnings about too few steps of a sampler, from measurements of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from diffserve.api.errors import ModelLoadError
from diffserve.api.types import Picture
from diffserve.models.vocabulary import FEWEST_STEPS_FILE, FewestSteps, read_fewest_steps
from diffserve.runtime.loading.family import BUILT_IN, EMBEDDED
from tests.engine.simulated_scheduler import INFO, admission, request

MEASURED = FewestSteps(
    digest="0" * 12, max_steps=30, steps={"heun": 8, "dpmpp_2m": 4, "dpmpp_2m karras": 10, "lcm": None}
)
ADMISSION = admission(msgspec.structs.replace(INFO, fewest_steps=MEASURED))


def warnings_of(**fields: Any) -> tuple[str, ...]:
    return ADMISSION.admit(request(**fields), 0.0).warnings


def test_fewer_steps_than_the_measured_minimum_produce_a_warning() -> None:
    expected = "7 steps of heun are too few for this model; use at least 8."
    assert warnings_of(sampler="Heun", num_steps=7) == (expected,)
    assert warnings_of(sampler="heun", num_steps=8) == ()
    assert "1 step of heun is too few" in warnings_of(sampler="heun", num_steps=1)[0]


def test_sampler_with_a_sigma_schedule_has_a_separate_minimum() -> None:
    assert warnings_of(sampler="dpmpp_2m", num_steps=5) == ()
    assert "5 steps of dpmpp_2m karras are too few" in warnings_of(sampler="DPM++ 2M Karras", num_steps=5)[0]
    assert warnings_of(sampler="DPM++ 2M beta", num_steps=2) == ()


def test_sampler_without_a_sufficient_count_produces_a_warning_up_to_the_highest_measured_count() -> None:
    assert "up to 30 steps; use another" in warnings_of(sampler="lcm", num_steps=4)[0]
    assert warnings_of(sampler="lcm", num_steps=31) == ()


def test_image_to_image_requests_produce_no_warning() -> None:
    picture = Picture.from_array(np.zeros((64, 64, 3), dtype=np.uint8))
    assert warnings_of(sampler="heun", num_steps=7, init_image=picture, strength=0.5) == ()


def test_models_and_samplers_without_measurements_produce_no_warning(tmp_path: Path) -> None:
    assert admission().admit(request(sampler="heun", num_steps=1), 0.0).warnings == ()
    assert warnings_of(sampler="plms", num_steps=1) == ()
    assert read_fewest_steps(tmp_path) is None


def test_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / FEWEST_STEPS_FILE).write_text('{"steps": 3}', encoding="utf-8")
    with pytest.raises(ModelLoadError, match=FEWEST_STEPS_FILE):
        read_fewest_steps(tmp_path)


def report(shares: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Return the parts of the report.json of a sweep that are read."""
    cells = [
        {
            "cell": {"sampler": name, "num_steps": count, "guidance_scale": 3.0, "is_reference": False},
            "measures": {"exact": {"value": value, "low": 0.0, "high": 1.0}},
        }
        for name, share_by_count in shares.items()
        for count, value in share_by_count.items()
    ]
    return {"model": {"digest": "0" * 12}, "cells": cells}


def test_minimum_is_the_count_from_which_all_higher_counts_suffice(tmp_path: Path) -> None:
    from diffserve.training.fewest_steps import fewest_of, main

    shares = {
        "euler": {4: 0.95, 10: 0.96, 20: 1.0},
        "heun": {4: 0.95, 10: 0.5, 20: 0.9},
        "lcm": {4: 0.1, 10: 0.1, 20: 0.2},
    }
    fewest = fewest_of(report(shares))
    assert fewest == FewestSteps(digest="0" * 12, max_steps=20, steps={"euler": 4, "heun": 20, "lcm": None})
    for part in ("euler", "heun"):
        (tmp_path / "report.json").write_text(json.dumps(report({part: shares[part]})), encoding="utf-8")
        main(tmp_path / "report.json", tmp_path)
    assert read_fewest_steps(tmp_path) == FewestSteps(digest="0" * 12, max_steps=20, steps={"euler": 4, "heun": 20})


def test_embedded_model_has_measurements() -> None:
    measured = read_fewest_steps(BUILT_IN[EMBEDDED])
    assert measured is not None
    assert measured.warning("plms", None, 4)
    assert measured.warning("dpmpp_2m", None, 25) is None

"""Learned tables: the file keeps every number, and damaged files are refused with one sentence."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from schedulers import NoiseSchedule, compile_table
from schedulers.errors import InvalidTable
from schedulers.learned import MAX_RESIDUAL, LearnedSampler
from schedulers.noise import make_betas

SCHEDULE = NoiseSchedule.from_betas(make_betas("scaled_linear", 1000, 0.00085, 0.012), "v_prediction")
FACTS: dict[str, Any] = {
    "name": "fast",
    "model": "tiny",
    "model_digest": "ab" * 32,
    "prediction_type": "v_prediction",
    "guidance_scale": 3.0,
}


def columns_of(sampler: str = "dpmpp_2m", num_steps: int = 4) -> dict[str, list[float]]:
    """Return the columns of a built-in sampler, as a search writes them."""
    table = compile_table(sampler, SCHEDULE, num_steps, spacing="trailing")
    names = ("sigma", "timestep", "c_in", "c_skip", "c_out", "a")
    columns = {name: getattr(table, name).tolist() for name in names}
    return columns | {f"b{back}": table.b[:, back].tolist() for back in range(table.b.shape[1])}


def learned(**changes: Any) -> LearnedSampler:
    """Return a sampler whose table is that of DPM++ 2M."""
    return LearnedSampler.from_columns(columns_of(), **FACTS | changes)


def test_the_file_gives_the_same_table() -> None:
    sampler = learned(search={"seconds": 3}, measured={"psnr_db": 20.5})
    copy = LearnedSampler.from_json(sampler.to_json())
    assert copy == sampler
    assert copy.table().packed.tobytes() == sampler.table().packed.tobytes()
    original = compile_table("dpmpp_2m", SCHEDULE, 4, spacing="trailing")
    np.testing.assert_allclose(copy.table().columns, original.columns, rtol=1e-8, atol=1e-8)
    assert copy.table().init_scale == pytest.approx(math.hypot(1.0, original.sigma[0]))


def test_residuals_are_declared_and_checked() -> None:
    exact = learned()
    assert max(exact.residuals.values()) < 1e-5, "a built-in sampler satisfies both invariants"
    columns = columns_of()
    columns["b0"][1] += 0.02
    columns["a"][2] *= 1.01
    changed = LearnedSampler.from_columns(columns, **FACTS)
    scale = math.hypot(1.0, columns["sigma"][2])
    assert changed.residuals["image"] == pytest.approx(0.02 / scale, abs=0.01)
    assert changed.residuals["noise"] > 1e-3
    with pytest.raises(InvalidTable, match=r"row \d of learned:fast"):
        LearnedSampler(columns=columns, residuals=exact.residuals, **FACTS)
    columns["b0"][1] += 100.0
    with pytest.raises(InvalidTable, match="scales a noise-free image"):
        LearnedSampler.from_columns(columns, **FACTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_digest": "abc"}, "64 hexadecimal digits"),
        ({"prediction_type": "flow"}, "prediction_type is 'flow'; known are epsilon"),
        ({"guidance_scale": None}, "guidance_scale is None; it must be a number"),
        ({"guidance_scale": 0.5}, "at least 1"),
        ({"residuals": {"image": 0.0}}, "residual noise is None; it must lie between 0 and"),
        ({"residuals": {"image": 0.0, "noise": 2.0 * MAX_RESIDUAL}}, "residual noise is 2.0"),
        ({"columns": {"sigma": [1.0]}}, "the columns are sigma; they must be sigma, timestep"),
        ({"columns": columns_of() | {"a": [1.0, 2.0]}}, "column a must have 4 finite numbers"),
        ({"columns": columns_of() | {"a": [math.inf] * 4}}, "column a must have 4 finite numbers"),
        ({"columns": columns_of() | {"sigma": [1.0, 2.0, 3.0, 4.0]}}, "sigma does not fall"),
        ({"columns": columns_of() | {"b2": [1.0, 0.0, 0.0, 0.0]}}, "reads history entry 2"),
        ({"author": "me"}, "it has author; the fields of a learned sampler are name, model"),
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, Any], message: str) -> None:
    content = json.loads(learned().to_json()) | change
    with pytest.raises(InvalidTable, match=message):
        LearnedSampler.from_json(json.dumps(content))


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "it has"), ("{}", "lacks a field")])
def test_another_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidTable, match=message):
        LearnedSampler.from_json(text)

"""Conversion of an experiment's form to a request or to an error message."""

from __future__ import annotations

from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.client import ExperimentFields
from ui.experiment.handlers import ExperimentForm, read_form


def fields_of(**fields: Any) -> ExperimentFields:
    values: dict[str, Any] = {"samplers": ["DDIM", "dpmpp_2m"], "steps": "5, 2", "prompts": "a fox\n\n two apples \n"}
    return read_form(ExperimentForm(**values | fields))


def test_a_form_becomes_a_request() -> None:
    assert fields_of(num_seeds=3.0, first_seed=7.0) == {
        "samplers": ["DDIM", "dpmpp_2m"], "steps": "5, 2", "prompts": ["a fox", "two apples"], "num_seeds": 3,
        "first_seed": 7, "reference_steps": 200,
    }  # fmt: skip
    assert fields_of(guidance=" 3, 5 ").get("guidance") == "3, 5"
    assert fields_of(guidance=2.5).get("guidance") == "2.5"
    assert fields_of(model="photo").get("model") == "photo"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"samplers": []}, "choose at least one"),
        ({"samplers": [["ddim"]]}, "choose from the list"),
        ({"prompts": " \n"}, "write at least one"),
        ({"prompts": "5," * 200_000}, "prompts have 400000 characters"),
        ({"num_seeds": 1.5}, "1.5"),
        ({"first_seed": float("nan")}, "nan"),
        ({"reference_steps": 0.5}, "reference steps is 0.5"),
    ],
)
def test_an_invalid_form_has_a_message(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        fields_of(**fields)

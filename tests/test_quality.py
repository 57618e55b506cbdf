"""Quality names: the same number of steps in the API, the page and the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diffserve.service.http.bodies import parse
from diffserve.service.images.plan import ImagePlan, plan_images
from diffserve.service.images.schemas import GenerateBody
from diffserve.service.models import image_capabilities
from diffserve.settings.layers import load_settings
from diffserve.settings.quality import SHARES, is_quality, quality_steps, share_of_steps
from tests.service.test_capabilities import INFO

CONFIG = load_settings(env={}).serve


def painting(**fields: Any) -> ImagePlan:
    return plan_images(parse(GenerateBody, json.dumps({"prompt": "a fox", **fields}).encode()), INFO, CONFIG, "img-1")


@pytest.mark.parametrize(
    ("word", "steps"),
    [
        ("draft", 12), ("low", 12), ("standard", 30), ("medium", 30), ("auto", 30), ("fine", 60), ("high", 60),
        ("hd", 60), ("xhigh", 60), ("max", 60),
    ],
)  # fmt: skip
def test_a_quality_means_the_same_steps_in_the_api_and_in_the_capabilities(word: str, steps: int) -> None:
    assert is_quality(word)
    assert share_of_steps(word, INFO) == steps
    planned = painting(quality=word)
    assert planned.request.diffusion.num_steps == (None if word == "auto" else steps)
    assert (planned.quality, planned.warnings) == (word, ())
    reported = image_capabilities(INFO, CONFIG)["quality_steps"]
    assert reported == quality_steps(INFO)
    if word in SHARES:
        assert reported[word] == steps


def test_explicit_steps_override_quality() -> None:
    assert painting(quality="high", num_inference_steps=7).request.diffusion.num_steps == 7


def test_warning_about_an_unknown_quality_lists_the_choices() -> None:
    (warning,) = painting(quality="ultra").warnings
    assert '"ultra"' in warning
    assert "draft, standard, fine" in warning

"""The shipped weights: their size, their format, and what they can paint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

import diffserve.embedded
from diffserve.embedded.checker import read_picture
from diffserve.embedded.marks import mark, paint_held_out
from diffserve.engine import Engine
from diffserve.types import GenerationRequest

WEIGHTS = Path(diffserve.embedded.__file__).parent / "weights"
MARKS = WEIGHTS.parent / "marks.json"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained("embedded")


def test_the_weights_are_sixteen_bit_safetensors_of_at_most_forty_megabytes() -> None:
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 40_000_000
    for path in WEIGHTS.rglob("*.safetensors"):
        with safe_open(path, framework="np") as tensors:
            names = list(tensors.keys())
            assert {tensors.get_slice(name).get_dtype() for name in names} == {"F16"}, path
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt"}


def test_the_published_marks_belong_to_these_weights_and_reach_the_first_mark(engine: Engine) -> None:
    published = json.loads(MARKS.read_text(encoding="utf-8"))
    assert published["digest"] == engine.info.digest
    assert published["num_steps"] == 30
    assert published["marks"]["all"]["count"] == 300
    assert published["marks"]["all"]["exact_share"] >= 0.8


@pytest.mark.slow
def test_a_sample_of_the_held_out_captions_confirms_the_published_marks(engine: Engine) -> None:
    published = json.loads(MARKS.read_text(encoding="utf-8"))
    painted = paint_held_out(engine, 60)
    share = mark(painted)["all"].exact_share
    # three standard errors of a sample of sixty
    expected = published["marks"]["all"]["exact_share"]
    assert abs(share - expected) <= 3 * (expected * (1 - expected) / 60) ** 0.5


@pytest.mark.slow
def test_the_background_follows_the_prompt(engine: Engine) -> None:
    places = {"on a red background": "red", "on the beach": "beach", "in the city": "city", "at night": "night sky"}
    requests = [GenerationRequest(prompt=f"a fox {words}", seed=1) for words in places]
    seen = [read_picture(result.pixels).background for result in engine.generate(requests)]
    assert seen == list(places.values())

"""The shipped weights: their size, their format, and the quality of their images."""

from __future__ import annotations

import json
import statistics
from itertools import islice

import pytest
import torch
from safetensors import safe_open

from diffserve.api.types import DiffusionParams, GenerationRequest
from diffserve.engine import Engine
from diffserve.models.vocabulary import EMBEDDED_DIRECTORY
from diffserve.training import card
from diffserve.training.eval.captions import judge_held_out, score
from diffserve.training.eval.parts import preview_db, round_trip_db, times_cheaper
from diffserve.training.eval.ranges import background_kept_away
from diffserve.world.checker import check, read_picture
from diffserve.world.render import render
from diffserve.world.scenes import scenes

WEIGHTS = EMBEDDED_DIRECTORY
CAPTIONS, RANGES, PARTS = (card.RESULTS / f"{name}.json" for name in ("captions", "ranges", "parts"))


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


def test_no_shipped_file_contains_a_local_path() -> None:
    for path in WEIGHTS.parent.rglob("*.json"):
        assert "_name_or_path" not in path.read_text(encoding="utf-8"), path


def test_the_published_scores_are_of_these_weights_and_high_enough(engine: Engine) -> None:
    published = json.loads(CAPTIONS.read_text(encoding="utf-8"))
    assert published["digest"] == engine.info.digest
    info = engine.info
    assert (published["sampler"], published["num_steps"]) == (info.default_sampler, info.default_num_steps)
    assert published["scores"]["all"]["count"] == 300
    assert published["scores"]["all"]["exact_share"] >= 0.95


@pytest.mark.parametrize(
    ("category", "part", "share"),
    [
        ("one object", "exact", 0.98), ("two objects", "exact", 0.95), ("three objects", "exact", 0.90),
        ("between", "exact", 0.90), ("all", "background", 0.98), ("two objects", "relation", 0.90),
    ],
)  # fmt: skip
def test_the_published_scores_are_high_enough_in_every_part(category: str, part: str, share: float) -> None:
    row = json.loads(CAPTIONS.read_text(encoding="utf-8"))["scores"][category]
    assert row[part] / row["count"] >= share


def test_unseen_pairs_are_painted_nearly_as_well_as_seen_ones() -> None:
    scores = json.loads(CAPTIONS.read_text(encoding="utf-8"))["scores"]
    assert scores["unseen pairs"]["exact_share"] >= scores["seen pairs"]["exact_share"] - 0.08


def test_the_parts_are_good_enough(engine: Engine) -> None:
    published = json.loads(PARTS.read_text(encoding="utf-8"))
    assert published["digest"] == engine.info.digest
    assert published["round_trip_db"] >= 30
    assert published["preview"]["times_cheaper"] >= 10
    assert published["checker_ms"] <= 50
    assert published["seconds"]["25 steps"] <= 2


def test_the_other_canvases_give_sensible_pictures() -> None:
    published = json.loads(RANGES.read_text(encoding="utf-8"))
    assert set(published["canvases"]) == {"128x192", "192x128"}
    assert min(published["canvases"].values()) >= 0.5 * published["count"]


@pytest.mark.slow
def test_a_sample_confirms_what_is_published_of_the_parts(engine: Engine) -> None:
    published = json.loads(PARTS.read_text(encoding="utf-8"))
    model = engine.model
    assert statistics.mean(round_trip_db(model, 8)) == pytest.approx(published["round_trip_db"], abs=1)
    assert statistics.mean(preview_db(model, 8)) == pytest.approx(published["preview"]["psnr_db"], abs=1)
    assert times_cheaper(model) == pytest.approx(published["preview"]["times_cheaper"], abs=0.1)


@pytest.mark.slow
def test_round_trips_of_the_autoencoder_are_exact_and_noisy_decodes_are_not(engine: Engine) -> None:
    selected = list(islice(scenes(123, held_out=True), 8))
    vae, generator = engine.model.vae, torch.Generator().manual_seed(0)
    exact = {0.0: 0, 1.0: 0}
    for scene in selected:
        latents = vae.encode(render(scene)[None])
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        for strength in exact:
            exact[strength] += check(vae.decode(latents + strength * noise)[0], scene).exact
    assert exact[0.0] == 8
    assert exact[1.0] == 0


@pytest.mark.slow
def test_a_sample_of_the_held_out_captions_confirms_the_published_scores(engine: Engine) -> None:
    published = json.loads(CAPTIONS.read_text(encoding="utf-8"))
    share = score(judge_held_out(engine, 6)).exact_share
    # three standard errors of a sample of six: one of them may be wrong, two may not
    expected = published["scores"]["all"]["exact_share"]
    assert abs(share - expected) <= 3 * (expected * (1 - expected) / 6) ** 0.5


@pytest.mark.slow
def test_the_background_follows_the_prompt(engine: Engine) -> None:
    places = {"on a red background": "red", "on the beach": "beach", "in the city": "city", "at night": "night sky"}
    params = DiffusionParams(num_steps=8)
    requests = [GenerationRequest(prompt=f"a fox {words}", seed=1, diffusion=params) for words in places]
    backgrounds = [read_picture(result.pixels).background for result in engine.generate(requests)]
    assert backgrounds == list(places.values())


def test_guidance_works_from_one_and_a_half_to_nine(engine: Engine) -> None:
    published = json.loads(RANGES.read_text(encoding="utf-8"))
    assert published["digest"] == engine.info.digest
    exact = {float(scale): count for scale, count in published["guidance"].items()}
    assert {1.5, 3.0, 5.0, 7.0, 9.0} <= set(exact)
    assert min(count for scale, count in exact.items() if scale >= 1.5) >= 0.6 * max(exact.values())


def test_negative_prompts_keep_away_what_they_name() -> None:
    published = json.loads(RANGES.read_text(encoding="utf-8"))
    for what in ("background_kept_away", "objects_kept_away"):
        row = published[what]
        assert row["avoided"] >= 0.9 * row["count"] > 0
        assert row["right"] >= 0.6 * row["count"]


@pytest.mark.slow
def test_a_negative_prompt_drives_an_unasked_background_away(engine: Engine) -> None:
    result = background_kept_away(engine, 1)
    assert result.count == result.avoided == 1

"""Best of several: all images are generated, and those with the highest scores are returned, best first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from diffserve.api.errors import DiffserveError, InvalidRequest, ModelLoadError, ModelNotFound
from diffserve.api.types import Accepted, DiffusionParams, Finished, GenerationRequest, ImageFinished, Progress
from diffserve.engine import Engine
from diffserve.engine.image.outputs import CheckerScorer, ImageScores
from diffserve.runtime import load_model
from diffserve.runtime.clip_scorer import ClipScorer
from diffserve.runtime.loading.library_imports import hushed, import_quietly
from diffserve.runtime.precision import choose_device
from diffserve.world.render import render
from diffserve.world.scenes import Placed, Scene
from tests.device import DEVICE
from tests.engine.conftest import MakeEngine
from tests.tiny_models import save_clip

FEW = DiffusionParams(num_steps=2)


class BySeed:
    """A scorer that likes dark pictures, and cannot look at one of them."""

    def __init__(self, unscored: int = -1) -> None:
        self.asked: list[float] = []
        self._unscored = unscored

    def score(self, prompt: str, pixels: Any) -> float:
        self.asked.append(-float(pixels.mean()))
        if len(self.asked) - 1 == self._unscored:
            raise ValueError("too bright")
        return self.asked[-1]


def choosing(engine: Engine, scorer: Any) -> Engine:
    """Return ``engine`` with ``scorer``."""
    engine.scheduler._scores._scorer = scorer
    return engine


def test_the_best_are_delivered_in_order_and_repeat_themselves_by_their_seeds(make_engine: MakeEngine) -> None:
    scorer = BySeed()
    engine = choosing(make_engine(max_rows=4), scorer)
    order: dict[str, Any] = {"prompt": "a fox", "seed": 7, "diffusion": FEW}
    events = list(engine.stream(GenerationRequest(num_images=2, best_of=4, **order)))
    results = [event.result for event in events if isinstance(event, ImageFinished)]
    assert [result.score for result in results] == sorted(scorer.asked, reverse=True)[:2]
    assert [result.image_index for result in results] == [0, 1]
    assert isinstance(events[0], Accepted)
    assert events[0].num_images == len({event.image_index for event in events if isinstance(event, Progress)}) == 4
    assert isinstance(events[-1], Finished)
    assert (events[-1].num_painted, events[-1].num_failed) == (2, 0)
    rows = results[0].num_evaluations
    assert [(result.num_discarded, result.discarded_evaluations) for result in results] == [(2, 2 * rows), (0, 0)]
    for result in results:
        [again] = engine.generate(GenerationRequest(**order | {"seed": result.seed}))
        assert again.picture == result.picture
        assert again.score is None


def test_who_cannot_be_scored_is_not_missed_until_too_few_are_left(make_engine: MakeEngine) -> None:
    order: dict[str, Any] = {"prompt": "a fox", "seed": 7, "diffusion": FEW}
    engine = choosing(make_engine(max_rows=4, result_cache_bytes=1 << 24), BySeed(unscored=1))
    assert len(engine.generate(GenerationRequest(best_of=2, **order))) == 1
    choosing(engine, BySeed(unscored=1))
    *_, failed, last = engine.stream(GenerationRequest(num_images=2, best_of=2, **order))
    assert "could not be scored: ValueError: too bright" in getattr(failed, "message", "")
    assert (getattr(last, "num_painted", 0), getattr(last, "num_failed", 0)) == (1, 1)
    choosing(engine, BySeed(unscored=0))
    with pytest.raises(DiffserveError, match="could not be scored"):
        engine.generate(GenerationRequest(best_of=1, **order))
    assert engine.stats().results.num_hits == 3, "a picture that is known is scored as well"
    pending = engine.submit(GenerationRequest(best_of=3, **order))
    engine.tick()
    assert engine.cancel(pending)
    list(engine.events())
    engine.check_integrity()


def test_what_cannot_be_chosen_is_refused_in_a_sentence(make_engine: MakeEngine) -> None:
    for num, best in ((3, 2), (1, 11), (1, 0)):
        with pytest.raises(InvalidRequest, match=f"best_of is {best}; give at least n, which is {num}, and at most"):
            GenerationRequest(prompt="a fox", num_images=num, best_of=best)
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=r"best_of is 2; no scorer is loaded: leave it out, or set"):
        engine.submit(GenerationRequest(prompt="a fox", best_of=2))
    scores = ImageScores(CheckerScorer())
    with pytest.raises(InvalidRequest, match="the checker reads images of at most 256 px per side, not 512x512"):
        scores.check(GenerationRequest(prompt="a fox", best_of=2), 512, 512)
    [warning] = scores.check(GenerationRequest(prompt="a zeppelin", best_of=2), 128, 128)
    assert "chosen by clarity only" in warning
    assert "zeppelin" in warning
    assert scores.check(GenerationRequest(prompt="a fox", best_of=2), 128, 128) == ()


def test_the_checker_grades_what_is_right_and_how_much_of_it() -> None:
    picture = render(Scene((Placed("fox", 64, 72, 64),), "beach"))
    grades = [CheckerScorer().score(f"a {what} on the beach", picture) for what in ("fox", "cat")]
    assert grades[0] == 1.0 > grades[1] > 0.0
    assert CheckerScorer().score("nothing that it knows", picture) == 1.0


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny random CLIP model as transformers writes it."""
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.mark.parametrize("shape", [(64, 64), (48, 80), (75, 33)])
def test_a_clip_model_scores_as_in_transformers(clip: Path, shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    prompt = "the red fox on the cat " * 20
    with hushed("transformers"):
        model = import_quietly("transformers", "CLIPModel").from_pretrained(clip)
        processor = import_quietly("transformers", "CLIPImageProcessorPil").from_pretrained(clip)
        words = import_quietly("transformers", "CLIPTokenizer").from_pretrained(str(clip))
    inputs = words(prompt, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        output = model(**inputs, pixel_values=processor(pixels, return_tensors="pt").pixel_values)
        expected = float(output.logits_per_image / model.logit_scale.exp())
    assert ClipScorer.load(clip, choose_device("cpu", "float32")).score(prompt, pixels) == pytest.approx(
        expected, abs=1e-5
    )


def test_a_model_names_its_scorer_or_says_what_is_wrong_with_it(
    clip: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tiny_model("sd15")
    model_profile = load_model(path, dtype="float32", device=DEVICE).profile

    def load(scorer: Path | str) -> Engine:
        profile = msgspec.structs.replace(model_profile, scorer=str(scorer), probe=False)
        return Engine(load_model(path, dtype="float32", device=DEVICE, profile=profile))

    engine = load(clip)
    assert engine.info.scorer == clip.name
    results = engine.generate(GenerationRequest(prompt="a fox", seed=1, num_images=2, best_of=3, diffusion=FEW))
    assert [result.score for result in results] == sorted((result.score or 0.0 for result in results), reverse=True)
    assert all(abs(result.score or 9.0) <= 1.0 for result in results)
    with pytest.raises(ModelNotFound, match=r"there is no scorer at .*; model.scorer names"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="a scorer must be a complete CLIPModel"):
        load(path / "text_encoder")
    with pytest.raises(ModelLoadError, match="the checker only scores images of the embedded model"):
        load("checker")
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    for file in clip.iterdir():
        (spoilt / file.name).write_bytes(file.read_bytes())
    prepared = json.loads((spoilt / "preprocessor_config.json").read_text())
    (spoilt / "preprocessor_config.json").write_text(json.dumps(prepared | {"crop_size": 16}))
    with pytest.raises(ModelLoadError, match=r"prepares images of \(16, 16\), but the model reads 32x32"):
        load(spoilt)
